"""Tables that activation checkpointing keeps on every rank: the plan says so, and what helps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recast
from recast.runtime.plan import Plan
from recast.runtime.planner import picture

IDS = torch.randint(50, (8, 3), generator=torch.Generator().manual_seed(0))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return out


class Net(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(50, 4, mode="sum") for _ in range(2))
        self.top = Recomputed() if apart else nn.Linear(8, 1)
        self.apart = apart

    def rows(self, ids: Tensor) -> Tensor:
        return torch.cat([bag(ids) for bag in self.emb], 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids) if self.apart else checkpoint(self.rows, ids, use_reentrant=False)
        out: Tensor = self.top(rows).squeeze(1)
        return out


def test_the_plan_says_which_tables_stay_whole_and_why() -> None:
    fast = recast.optimize(Net(apart=False), example=IDS, world_size=2)
    assert {p.sharding_type for p in fast.plan.placements} == {"data_parallel"}
    said = "emb.0.weight, emb.1.weight are on every rank: the model is not captured whole"
    for text in (picture.text(fast.plan), str(fast.report), fast.plan.to_json()):
        assert said in text and "activation checkpointing" in text
    assert Plan.from_json(fast.plan.to_json()) == fast.plan
    assert "a module of its own for what is recomputed, with no table in it" in str(fast.report)


def test_the_remedy_spreads_them() -> None:
    fast = recast.optimize(Net(apart=True), example=IDS, world_size=2, sharding="row_wise")
    assert {p.sharding_type for p in fast.plan.placements} == {"row_wise"}
    assert "on every rank" not in picture.text(fast.plan)
