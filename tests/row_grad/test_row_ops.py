"""The embedding op, its row gradients and the optimizers together, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from row_lookup import dense, is_rows, same
from torch import Tensor
from torch.nn import Parameter

import recast.runtime  # noqa: F401  registers the ops
from recast.runtime.rows.grad import counters
from recast.runtime.rows.optimizer import attach

MODES = ("sum", "mean", "max", "none")


class Lookups:
    """Lookups of every pooling over two tables; the second table is used twice."""

    def __init__(self, sparse: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sparse = sparse
        self.table = [0, 1, 1, 0]
        self.mode = list(MODES)
        if sparse:  # torch has no sparse gradient of max pooling
            self.mode[2] = "sum"
        pick = lambda *shape: torch.randint(0, 30, shape, generator=generator)  # noqa: E731
        self.ids = [pick(6, 3), pick(14), pick(6, 2).int(), pick(6)]
        self.offsets = [None, torch.tensor([0, 2, 2, 5, 9, 13]), None, None]
        self.samples = [torch.rand(6, 3, generator=generator), None, None, None]
        self.padding = [None, 4, None, 7]

    def ours(self, weights: list[Tensor]) -> list[Tensor]:
        out: list[Tensor] = torch.ops.recast.embedding_bags(
            weights,
            self.ids,
            self.offsets,
            self.samples,
            self.table,
            self.mode,
            self.padding,
            [False] * 4,
            [self.sparse] * 4,
        )
        return out

    def plain(self, weights: list[Tensor]) -> list[Tensor]:
        out = []
        for k, mode in enumerate(self.mode):
            weight, ids, padding = weights[self.table[k]], self.ids[k], self.padding[k]
            if mode == "none":
                out.append(F.embedding(ids, weight, padding, sparse=self.sparse))
                continue
            bag = F.embedding_bag(
                ids,
                weight,
                self.offsets[k],
                mode=mode,
                per_sample_weights=self.samples[k],
                padding_idx=padding,
                sparse=self.sparse,
            )
            out.append(bag)
        return out


def tables(width: int = 8) -> tuple[list[Parameter], list[Parameter]]:
    torch.manual_seed(0)
    values = [torch.randn(30, width), torch.randn(30, width)]
    return [Parameter(v.clone()) for v in values], [Parameter(v.clone()) for v in values]


def loss(outs: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    terms = [
        (torch.randn(o.shape, generator=generator) * o).sum() + 0.1 * (o * o).sum() for o in outs
    ]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("width", [1, 8, 20])
def test_gradients(width: int) -> None:
    mine, theirs = tables(width)
    lookups = Lookups()
    loss(lookups.ours(mine)).backward()
    loss(lookups.plain(theirs)).backward()
    for a, b in zip(mine, theirs, strict=True):
        assert is_rows(a.grad)
        same(a.grad, b.grad)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_training(make: Any) -> None:
    mine, theirs = tables()
    ours, plain = make(mine, lr=0.1), make(theirs, lr=0.1)
    attach(ours)
    for seed in range(4):
        lookups = Lookups(seed=seed)
        for find, weights, optimizer in (
            (lookups.ours, mine, ours),
            (lookups.plain, theirs, plain),
        ):
            optimizer.zero_grad()
            loss(find(weights)).backward()
            torch.nn.utils.clip_grad_norm_(weights, 0.7)
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        same(a, b)
    assert counters()["fused-step"] == 8
    assert not [key for key in counters() if key.startswith("dense")]


def test_sparse_tables_of_a_fused_optimizer_get_rows() -> None:
    mine, theirs = tables()
    optimizer = torch.optim.Adagrad(mine, lr=0.1)
    attach(optimizer)
    lookups = Lookups(sparse=True)
    loss(lookups.ours(mine)).backward()
    loss(lookups.plain(theirs)).backward()
    for a, b in zip(mine, theirs, strict=True):
        assert is_rows(a.grad)
        same(a.grad, b.grad)


def test_sparse_tables_of_nobody_get_torchs_sparse_gradient() -> None:
    mine, theirs = tables()
    ours, plain = torch.optim.SparseAdam(mine), torch.optim.SparseAdam(theirs)
    for seed in range(3):
        lookups = Lookups(sparse=True, seed=seed)
        for find, weights, optimizer in (
            (lookups.ours, mine, ours),
            (lookups.plain, theirs, plain),
        ):
            optimizer.zero_grad()
            loss(find(weights)).backward()
            assert all(w.grad is not None and w.grad.is_sparse for w in weights)
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        same(a, b)


def test_a_gradient_penalty_is_differentiable() -> None:
    mine, theirs = tables()
    lookups = Lookups()
    outs = lookups.ours(mine)
    weight, factors = theirs[0], lookups.samples[0]
    assert factors is not None
    # torch cannot differentiate the gradient of embedding_bag: written out, it can
    pooled = (weight[lookups.ids[0]] * factors.unsqueeze(-1)).sum(1)
    plain = [pooled, F.embedding(lookups.ids[3], weight, lookups.padding[3])]
    for used, table in (([outs[0], outs[3]], mine[0]), (plain, weight)):
        (grad,) = torch.autograd.grad(loss(used), table, create_graph=True)
        grad.pow(2).sum().backward()
    same(mine[0].grad, theirs[0].grad)


def test_the_whole_batch_may_be_overwritten_after_backward() -> None:
    mine, theirs = tables()
    lookups = Lookups()
    loss(lookups.ours(mine)).backward()
    loss(lookups.plain(theirs)).backward()
    want = [dense(w.grad).clone() for w in theirs]
    for tensor in (*lookups.ids, *lookups.offsets, *lookups.samples):
        if tensor is not None:
            tensor.zero_()
    for a, b in zip(mine, want, strict=True):
        same(a.grad, b)


def test_a_gradient_collected_on_another_stream_stays_rows() -> None:
    """Autograd then records the stream with the allocator; on the CPU there is none to record."""
    lookups = Lookups()
    weights = [torch.randn(30, 4, requires_grad=True) for _ in range(2)]
    lookups.ours(weights)[0].sum().backward()
    grad = weights[0].grad
    assert grad is not None and is_rows(grad)
    torch.ops.aten.record_stream(grad, torch.Stream(device="cpu"))
    assert is_rows(grad)
