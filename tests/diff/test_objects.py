"""Batches and outputs that are objects: their contents are compared, and no model sees what another
one left in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter.cli import bench


class Keyed:
    """Ids of several features, whose offsets are made at first use and kept."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor) -> None:
        self.values, self.lengths, self.weights = values, lengths, weights
        self.kept: Tensor | None = None

    def offsets(self) -> Tensor:
        if self.kept is None:
            self.kept = self.lengths.cumsum(0) - self.lengths
        return self.kept


@dataclass
class Scores:
    score: Tensor
    rows: dict[str, Tensor]
    kind: str = "click"


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 4, mode="sum")
        self.head = nn.Linear(4, 1)

    def forward(self, batch: Keyed) -> Scores:
        rows = self.bag(batch.values, batch.offsets(), per_sample_weights=batch.weights)
        return Scores(self.head(rows).squeeze(1), {"rows": rows})


class Wrong(Ranker):
    """Only the gradient of its table is wrong."""

    def forward(self, batch: Keyed) -> Scores:
        found = super().forward(batch)
        rows = found.rows["rows"]
        return Scores(found.score, {"rows": 2 * rows - rows.detach()})


def _batch(rows: int, seed: int) -> tuple[Keyed]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (rows,), generator=draw)
    count = int(lengths.sum())
    ids = torch.randint(50, (count,), generator=draw)
    return (Keyed(ids, lengths, torch.rand(count, generator=draw)),)


@pytest.fixture
def ranker() -> Ranker:
    torch.manual_seed(0)
    return Ranker()


def test_the_graph_is_what_is_compared(ranker: Ranker) -> None:
    """Not the plain forward, which would run, with a warning, if the batch kept offsets."""
    fast = recast.optimize(ranker, example=_batch(8, 0))
    batches = [_batch(8, 1), _batch(5, 2)]
    report = recast.diff(ranker, fast, batches, steps=1)
    report.check()
    assert "itself" not in str(report.judge), report.judge
    outputs = {row.tensor for row in report.rows if row.group == "outputs"}
    assert {"train output.score", "train output.rows['rows']"} <= outputs
    assert all(batch.kept is None for (batch,) in batches)


def test_gradients_through_an_object_are_compared(ranker: Ranker) -> None:
    wrong = Wrong()
    wrong.load_state_dict(ranker.state_dict())
    report = recast.diff(ranker, wrong, _batch(8, 0), steps=0)
    assert {row.tensor for row in report.rows if not row.ok} == {"bag.weight"}


class Told(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.mlp, self.kind = nn.Linear(3, 2), kind

    def forward(self, x: Tensor) -> Any:
        return {"y": Scores(self.mlp(x), {}, self.kind), "a": [self.kind]}


class Settings:
    def __init__(self, name: str) -> None:
        self.name = name


def test_what_is_no_tensor_is_compared_by_what_it_holds() -> None:
    plain, same, other = (Told(Settings(name)) for name in ("a", "a", "b"))
    for model in (same, other):
        model.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3)
    recast.diff(plain, same, x, steps=0).check()
    bad = {row.tensor for row in recast.diff(plain, other, x, steps=0).rows if not row.ok}
    assert bad == {
        f"{mode} output['{k}" for mode in ("eval", "train") for k in ("y'].kind", "a'][0]")
    }


def test_steps_are_timed_on_batches_of_their_own(ranker: Ranker) -> None:
    (batch,) = _batch(8, 0)
    fast = recast.optimize(ranker, example=batch)
    for model in (ranker, fast):
        step = bench.training_step(model, (batch,), None, None)
        step()
        step()
        bench.inference_step(model, (batch,))()
    assert batch.kept is None


class Cached(nn.Module):
    """Serves from vectors that it keeps, until it is trained again."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 4), nn.Embedding(30, 4)
        self.tower = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.kept: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.kept = None
            return self.users(ids) @ self.tower(self.items.weight).t()
        if self.kept is None:
            self.kept = self.tower(self.items.weight).detach()
        return self.users(ids) @ self.kept.t()


def test_what_a_model_keeps_between_calls_is_taken_back_before_each_run() -> None:
    plain = Cached().eval()
    ids = torch.arange(20)
    fast = recast.optimize(plain, example=[ids, ids[:7]], strict=True)
    with pytest.warns(recast.RecastWarning, match="kept was changed"):
        report = recast.diff(plain, fast, [(ids,), (ids[:7],)], steps=2)
        fast(ids)
        fast(ids)
    report.check()
    assert plain.kept is None


class Stale(Cached):
    """Keeps its vectors where nobody else sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        if not self.training and not self.hidden:
            self.hidden.append(self.tower(self.items.weight).detach())
        items = self.tower(self.items.weight) if self.training else self.hidden[0]
        return self.users(ids) @ items.t()


class Fresh(Cached):
    """Keeps nothing."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.users(ids) @ self.tower(self.items.weight).t()


def test_what_a_model_keeps_too_long_is_told() -> None:
    plain, other, ids = Fresh().eval(), Stale().eval(), torch.arange(20)
    other.load_state_dict(plain.state_dict())
    report = recast.diff(plain, other, (ids,), steps=2)
    assert any("new parameters" in row.when for row in report.rows if not row.ok)
