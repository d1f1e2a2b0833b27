"""A model with every kind of lookup, its batches, and a training run of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recast.runtime.plan import Plan, Table, explicit

Batch = tuple[Any, ...]


class Every(nn.Module):
    """Fixed, ragged and one-hot bags, sequences with padding, per-sample weights; shared and
    repeated tables.
    """

    def __init__(self, rows: int = 13, dim: int = 6, *, sparse: bool = False) -> None:
        super().__init__()
        kind = {"sparse": sparse}
        self.fixed = nn.EmbeddingBag(rows, dim, mode="sum", **kind)
        self.ragged = nn.EmbeddingBag(rows + 4, dim, mode="mean", padding_idx=1, **kind)
        self.single = nn.Embedding(7, dim, padding_idx=2, **kind)
        nn.init.normal_(self.single.weight)  # its padding row too, which counts in the sequence
        self.weighted = nn.EmbeddingBag(5, dim, mode="sum", include_last_offset=True, **kind)
        self.raw = nn.Parameter(torch.randn(3, 4))
        self.importance = nn.Linear(1, 1)
        self.bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, dim))
        self.top = nn.Sequential(nn.Linear(6 * dim + 4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.unused = nn.Linear(2, 2)

    def forward(
        self, dense: Tensor, fixed: Tensor, flat: Tensor, offsets: Tensor, one: Tensor,
        sequence: Tensor, ids: Tensor, ends: Tensor,
    ) -> Tensor:  # fmt: skip
        factors = self.importance(ids.to(dense.dtype).unsqueeze(1)).squeeze(1)
        rows = [
            self.bottom(dense), self.fixed(fixed), self.ragged(flat, offsets), self.single(one),
            self.single(sequence).sum(1), self.weighted(ids, ends, factors),
            F.embedding(one % 3, self.raw, sparse=self.single.sparse),
        ]  # fmt: skip
        return self.top(torch.cat(rows, 1)).squeeze(1)


TABLES = ("raw", "fixed.weight", "ragged.weight", "single.weight", "weighted.weight")
# Every scheme except by columns, which some optimizers do not support; and with columns.
MIXED = dict(zip(TABLES[1:], ("table_wise", "row_wise", "data_parallel", "row_wise"), strict=True))
COLUMNS = MIXED | {"raw": "column_wise", "fixed.weight": "table_column_wise"}


def planned(model: nn.Module, world: int, kinds: str | dict[str, str], hosts: int = 1) -> Plan:
    """A fixed plan, as the planner takes seconds; other tables are table_wise."""
    held = dict(model.named_parameters())
    dtype = str(held[TABLES[0]].dtype).removeprefix("torch.")
    tables = [Table(n, *held[n].shape, dtype) for n in TABLES]
    return explicit(tables, world, kinds, hosts=hosts)


def batch(sizes: list[int], rank: int | None = None, *, seed: int = 0) -> tuple[Batch, Tensor]:
    """The inputs and labels of ``rank``, or of all ranks one after the other."""
    parts = [_part(size, seed * 100 + r) for r, size in enumerate(sizes)]
    if rank is not None:
        return parts[rank][:-1], parts[rank][-1]
    whole: list[Tensor] = []
    for k, tensors in enumerate(zip(*parts, strict=True)):
        counts = [len(p[k - 1]) for p in parts] if k in (3, 7) else [0] * len(parts)
        firsts = [sum(counts[:r]) for r in range(len(parts))]
        moved = [t + first for t, first in zip(tensors, firsts, strict=True)]
        if k == 7:  # offsets with an end, which is the next one's start
            moved = [t[: len(t) - (r + 1 < len(moved))] for r, t in enumerate(moved)]
        whole.append(torch.cat(moved))
    return tuple(whole[:-1]), whole[-1]


def _part(size: int, seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda high, *shape: torch.randint(high, shape, generator=g)  # noqa: E731
    lengths, others = draw(4, size), draw(3, size)
    zero = torch.zeros(1, dtype=torch.int64)
    offsets = torch.cat((zero, lengths.cumsum(0)))
    ends = torch.cat((zero, others.cumsum(0)))
    return (
        torch.randn(size, 4, generator=g), draw(13, size, 3), draw(17, int(offsets[-1])),
        offsets[:-1], draw(7, size), draw(7, size, 2), draw(5, int(ends[-1])), ends,
        torch.rand(size, generator=g),
    )  # fmt: skip


def step(model: nn.Module, given: tuple[Batch, Tensor], total: int, ranks: int) -> Tensor:
    """Forward and backward; the losses of all ranks average to the mean over ``total`` samples."""
    inputs, label = given
    out = model(*inputs)
    (((out - label.to(out.dtype)) ** 2).sum() * (ranks / total)).backward()
    return out.detach()


def plain_run(
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer],
    sizes: list[int],
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """One process with the batches of all ranks: outputs, first gradients, parameters, state."""
    model = copy.deepcopy(model).to(dtype)
    optimizer = make(model.parameters())
    found: dict[str, Tensor] = {}
    for k in range(5):
        optimizer.zero_grad()
        inputs, label = batch(sizes, seed=k)
        out = step(model, ((inputs[0].to(dtype), *inputs[1:]), label), sum(sizes), 1)
        found[f"output {k}"] = out
        if k == 0:
            found |= grads(model)
        optimizer.step()
    return found | after(model, optimizer)


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"grad {n}": p.grad.to_dense().clone() if p.grad.is_sparse else p.grad.clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def after(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and what the optimizer holds of them."""
    found = {n: p.detach() for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{n} [{key}]"] = torch.as_tensor(value).detach()
    return found
