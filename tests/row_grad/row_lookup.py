"""A lookup op of a few lines that gives row gradients, and its plain twin, for the tests here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from recast.runtime.rows.grad import Piece, RowGrad, row_grad

IDS = torch.tensor([1, 2, 2, 5, 7, 1])
OTHER_IDS = torch.tensor([2, 3, 3, 9, 7, 1])


class Lookup(torch.autograd.Function):
    """``weight[ids]`` whose gradient is a RowGrad, and dense under ``create_graph``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.sparse = sparse
        return weight.detach()[ids]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        weight, ids = ctx.saved_tensors
        rows = upstream.reshape(-1, weight.shape[1])
        if torch.is_grad_enabled():
            return torch.zeros_like(weight).index_add(0, ids.reshape(-1), rows), None, None
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        pieces = [piece(ids.reshape(-1), rows)]
        grad = row_grad(weight.shape, weight.dtype, weight.device, pieces, ctx.sparse)
        return grad, None, None


class Bags(torch.autograd.Function):
    """Sum-pooled (B, L) ids of tables, concatenated: they share one upstream gradient."""

    @staticmethod
    def forward(ctx: Any, ids: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.ids, ctx.weights = ids, weights
        pooled = [w.detach()[i].sum(1) for w, i in zip(weights, ids, strict=True)]
        return torch.cat(pooled, 1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None]
        start = 0
        for weight, ids in zip(ctx.weights, ctx.ids, strict=True):
            rows = upstream[:, start : start + weight.shape[1]]
            start += weight.shape[1]
            one = Piece(ids.reshape(-1), rows, None, ids.shape[1], None, False, None, None)
            grads.append(row_grad(weight.shape, weight.dtype, weight.device, [one]))
        return tuple(grads)


def piece(ids: Tensor, rows: Tensor) -> Piece:
    return Piece(ids, rows, None, 1, None, False, None, None)


def ours(weight: Tensor, ids: Tensor = IDS, sparse: bool = False) -> Tensor:
    return Lookup.apply(weight, ids, sparse)


def plain(weight: Tensor, ids: Tensor = IDS, sparse: bool = False) -> Tensor:
    return F.embedding(ids, weight, sparse=True) if sparse else weight[ids]


def twins(rows: int = 100, width: int = 4, seed: int = 0) -> tuple[Parameter, Parameter]:
    """Two equal tables: one for our lookup, one for the plain one."""
    table = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return Parameter(table), Parameter(table.clone())


def weigh(out: Tensor, seed: int = 1) -> Tensor:
    """A loss whose upstream gradient is random, and depends on ``out``."""
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    return (factors * out).sum() + 0.1 * (out * out).sum()


def dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    if isinstance(grad, RowGrad):
        return grad.dense()
    return grad.to_dense() if grad.is_sparse else grad


def same(a: Tensor | None, b: Tensor | None) -> None:
    """Assert that they are equal up to the rounding of fp32."""
    torch.testing.assert_close(dense(a), dense(b), equal_nan=True)


def is_rows(grad: Tensor | None) -> bool:
    return isinstance(grad, RowGrad) and grad.lazy
