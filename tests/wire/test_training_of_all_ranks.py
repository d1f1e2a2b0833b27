"""Training on W ranks: global clipping, masks, statistics and finiteness, on any wire."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from generators import own_generator
from harness import processes, run
from torch import Tensor, nn

import recast
from recast.runtime import tolerances
from recast.runtime.ranks import shards

SIZES = [4, 0, 5]
KINDS = {"users.weight": "row_wise", "items.weight": "column_wise", "few.weight": "table_wise"}
Batch = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(11, 4, mode="sum")
        self.items = nn.EmbeddingBag(7, 6, mode="mean")
        self.few = nn.Embedding(3, 4)
        self.top = nn.Sequential(
            nn.Linear(14, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 1)
        )

    def forward(self, ids: Tensor, one: Tensor) -> Tensor:
        rows = [self.users(ids), self.items(ids % 7), self.few(one)]
        return self.top(torch.cat(rows, 1)).squeeze(1)


def _batches(sizes: list[int], seed: int) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    count = sum(sizes)
    ids, one = (torch.randint(n, s, generator=g) for n, s in ((11, (count, 3)), (3, (count,))))
    parts = (t.split(sizes) for t in (ids, one, torch.rand(count, generator=g)))
    return list(zip(*parts, strict=True))


def _train(model: Any, optimizer: Any, batches: list[Batch], share: list[float]) -> list[Tensor]:
    """Train; returns the gradient norms before clipping."""
    norms = []
    for (ids, one, label), factor in zip(batches, share, strict=True):
        optimizer.zero_grad()
        loss = (model(ids, one) - label.to(next(model.top.parameters()).dtype)).square().sum()
        (loss * factor).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    return norms


def _adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)


def _rank(r: int, model: Net, steps: list[list[Batch]], **words: Any) -> Any:
    model = copy.deepcopy(model)
    fast, optimizer = recast.optimize(
        model, _adagrad(model), example=_batches([6], 1)[0][:2], sharding=KINDS, **words
    )
    own_generator(5)
    torch.manual_seed(5)
    world, total = len(SIZES), sum(SIZES)
    norms = _train(fast, optimizer, [s[r] for s in steps], [world / total] * len(steps))
    parts = {n: (p.detach().clone(), shards.of(p)) for n, p in fast.named_parameters()}
    return norms, parts, [b.clone() for b in fast.buffers()], str(fast)


def _single(model: Net, steps: list[list[Batch]], dtype: torch.dtype) -> Any:
    model = copy.deepcopy(model).to(dtype)
    torch.manual_seed(5)
    whole: list[Any] = [tuple(torch.cat(t) for t in zip(*s, strict=True)) for s in steps]
    norms = _train(model, _adagrad(model), whole, [1 / sum(SIZES)] * len(steps))
    return norms, {n: p.detach() for n, p in model.named_parameters()}, list(model.buffers())


def _compare(how: Any) -> None:
    torch.manual_seed(2)
    model = Net()
    steps = [_batches(SIZES, seed) for seed in range(4)]
    answers = how(len(SIZES), lambda r: _rank(r, model, steps))
    plain, truth = (_single(model, steps, d) for d in (torch.float32, torch.float64))
    assert all(word in answers[0][3] for word in ("global_rows", "batch_norm_global", "wait_rows"))
    for norms, parts, buffers, _ in answers:
        pairs = [*zip(norms, plain[0], truth[0], strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(norms, answers[0][0], strict=True))
        for name, (part, sharded) in parts.items():
            cut = sharded.local if sharded is not None else lambda t: t
            pairs.append((part, cut(plain[1][name]), cut(truth[1][name])))
            assert sharded is not None or torch.equal(part, answers[0][1][name][0])
        pairs += zip(buffers, plain[2], truth[2], strict=True)
        for k, (ours, one, right) in enumerate(pairs):
            assert tolerances.excess(ours, one, right, scale=1.0) <= tolerances.CHAIN, k


def test_clipped_training_is_that_of_one_process() -> None:
    _compare(run)


def test_clipped_training_over_gloo() -> None:
    _compare(processes)


class Roots(nn.Module):
    """For a row of zeros the output is 0, and the gradient NaN or infinite."""

    def __init__(self, spoil: float) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(11, 4, mode="sum")
        self.top = nn.Linear(5, 1)
        self.of_squares = math.isnan(spoil)
        with torch.no_grad():
            self.users.weight.abs_()[10] = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.users(ids)
        root = (rows.square() if self.of_squares else rows).sum(1).sqrt()
        return self.top(torch.cat([rows, root.unsqueeze(1)], 1)).squeeze(1)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8", "fp32/int8"])
@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_a_bad_gradient_is_seen_through_the_wire(wire: str, spoil: float) -> None:
    """Rank 1 alone looks up the row of zeros, rank 2 holds it: no rank steps, all know why."""
    torch.manual_seed(4)
    model = Roots(spoil)
    sharding = {"users.weight": "row_wise"}

    def rank(r: int) -> Any:
        own = copy.deepcopy(model)
        given = {"example": (torch.zeros(6, 1).long(),), "wire": wire, "sharding": sharding}
        fast, optimizer = recast.optimize(own, _adagrad(own), **given)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        seen = []
        for ids in ([1, 2], [3, 10 if r == 1 else 4], [5, 6]):
            before = [p.detach().clone() for p in fast.parameters()]
            optimizer.zero_grad()
            scaler.scale(fast(torch.tensor(ids).unsqueeze(1)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert all(p.isfinite().all() for p in fast.parameters())
            same = [torch.equal(a, b) for a, b in zip(before, fast.parameters(), strict=True)]
            seen.append((scaler.get_scale(), same))
        return seen

    for r, seen in enumerate(run(3, rank)):
        assert [scale for scale, _ in seen] == [8.0, 4.0, 4.0]
        assert not any(seen[0][1][1:])  # dense parameters, everywhere
        assert all(seen[1][1])
        assert not any(seen[2][1][1:])
        assert seen[0][1][0] == (r != 0)  # rows 1 and 2 are rank 0's
