"""The rows of all ranks' batches, for what pairs each row with every other one.

A rank that computes its rows of the logits of an in-batch softmax needs the items of all ranks::

    sizes = sizes_of_all(v, 0)                     (W,) rows of each rank
    V = batch_of_all(v, sizes, 0)                  (ΣN_r, D) in rank order
    logits = u Vᵀ                                  (N_r, ΣN_r)
    target = own_positions(arange(N_r), sizes)     where this rank's items are among them

Gradients of V go back to the ranks whose rows they are, and are added there in rank order. As the
loss of one process is the mean of the ranks' losses, its gradients are the mean of the ranks', as
those of all other parameters. Ranks may have batches of any size, including empty ones. Without
process groups each of these is what one process computes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from recast.errors import UsageError
from recast.runtime.batched_grads import one_at_a_time
from recast.runtime.ranks import call_mode, collectives
from recast.runtime.ranks.sums import gathered

_WHAT = "all_to_all of the batch's rows"


@_disable_dynamo
def sizes_of_all(input: Tensor, dim: int) -> Tensor:
    """(W,) int64 on the CPU: ``input.shape[dim]`` of each rank. A collective."""
    own = input.shape[dim]
    if collectives.ranks() == 1 or input.is_meta:
        return torch.tensor([own])
    call_mode.exchange_once()
    return gathered(torch.tensor(own, device=input.device), what="all_gather of sizes").cpu()


@_disable_dynamo
def batch_of_all(input: Tensor, sizes: Tensor, dim: int) -> Tensor:
    """``input`` of all ranks, concatenated in ``dim`` in rank order. A collective, also in the
    backward pass.

    Raises:
        UsageError: ``input`` has other rows than ``sizes`` says of this rank.
    """
    if collectives.ranks() == 1 or input.is_meta:
        return input
    counts = sizes.tolist()
    if input.shape[dim] != counts[collectives.rank()]:
        raise UsageError(
            f"{input.shape[dim]} rows in dimension {dim}, in a batch of"
            f" {counts[collectives.rank()]}",
            why="it was taken for a row of each sample",
            tries=("example=[batch_a, batch_b] of other sizes, to optimize()",),
        )
    whole: Tensor = _BatchOfAll.apply(input, counts, dim)
    return whole


def own_positions(positions: Tensor, sizes: Tensor) -> Tensor:
    """``arange(N)`` of this rank's batch: where its rows are among those of all ranks."""
    return positions + _first(sizes)


def all_positions(positions: Tensor, sizes: Tensor) -> Tensor:
    """``arange(N)``, of all ranks' rows."""
    return torch.arange(int(sizes.sum()), dtype=positions.dtype, device=positions.device)


def own_block(square: Tensor, sizes: Tensor, own: int) -> Tensor:
    """A diagonal matrix (N, N), as ``eye``, in the place of its columns among those of all ranks;
    ``own`` 1: of its rows.
    """
    if collectives.ranks() == 1:
        return square
    shape = [*square.shape]
    shape[1 - own] = int(sizes.sum())
    whole = square.new_zeros(shape)
    _narrowed(whole, sizes, 1 - own).copy_(square)
    return whole


def widened(constant: Tensor, sizes: Tensor, own: int) -> Tensor:
    """A matrix (N, N) of one number, of this rank's rows in dimension ``own`` by all."""
    shape = [*constant.shape]
    shape[1 - own] = int(sizes.sum())
    return constant[:1, :1].expand(shape) if constant.numel() else constant.new_empty(shape)


def diagonal_filled(rows: Tensor, sizes: Tensor, own: int, value: float) -> Tensor:
    """``fill_diagonal_(value)`` of a square matrix, of which these are this rank's ``rows``."""
    made = rows.clone()
    _narrowed(made, sizes, 1 - own).fill_diagonal_(value)
    return made


def own_diagonal(rows: Tensor, sizes: Tensor) -> Tensor:
    """(N,): of this rank's rows of a square matrix, (N, ΣN_r), what lies on its diagonal."""
    return _narrowed(rows, sizes, 1).diagonal()


def _first(sizes: Tensor) -> int:
    return int(sizes[: collectives.rank()].sum())


def _narrowed(whole: Tensor, sizes: Tensor, dim: int) -> Tensor:
    """This rank's part of ``whole`` in ``dim``."""
    return whole.narrow(dim, _first(sizes), int(sizes[collectives.rank()]))


class _BatchOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, counts: list[int], dim: int) -> Tensor:
        ctx.counts, ctx.dim = counts, dim
        rows = input.movedim(dim, 0)
        own = rows.reshape(-1).repeat(len(counts))
        return _exchanged(own, rows, [len(rows)] * len(counts), counts).movedim(0, dim)

    @staticmethod
    @one_at_a_time
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _OwnOfSum.apply(grad, ctx.counts, ctx.dim), None, None


class _OwnOfSum(torch.autograd.Function):
    """This rank's rows of the sum of what all ranks have for all rows."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, counts: list[int], dim: int) -> Tensor:
        ctx.counts, ctx.dim = counts, dim
        rows, own = whole.movedim(dim, 0), counts[collectives.rank()]
        world = len(counts)
        parts = _exchanged(rows.reshape(-1), rows, counts, [own] * world)
        wide = torch.promote_types(whole.dtype, torch.float32)
        total = parts.view(world, own, *rows.shape[1:]).to(wide).sum(0).to(whole.dtype)
        return total.movedim(0, dim)

    @staticmethod
    @one_at_a_time
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _BatchOfAll.apply(grad, ctx.counts, ctx.dim), None, None


def _exchanged(flat: Tensor, like: Tensor, there: list[int], back: list[int]) -> Tensor:
    """What comes for ``flat``, of which ``there[r]`` rows like those of ``like`` go to rank r, and
    ``back[r]`` come from there: (Σ back, ...). As bytes: gloo does not take all dtypes.
    """
    size = math.prod(like.shape[1:]) * like.element_size()
    sent = flat.contiguous().view(torch.uint8)
    pending = collectives.all_to_all(
        sent, [n * size for n in there], [n * size for n in back], _WHAT
    )
    return pending.wait().view(like.dtype).view(sum(back), *like.shape[1:])
