"""The judgement of the zoo itself: a good model passes, and each defect is reported."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo_judge
from torch import Tensor, nn
from zoo_data import Draw, Subject, columns, packed

import recast

SIZES = (11, 5, 30)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in SIZES)
        self.deep = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        found = [table(x[:, k]) for k, table in enumerate(self.tables)]
        return self.deep(torch.cat(found, 1)).squeeze(1)


SUBJECT = Subject("ours/Small", lambda: (Small(), columns(SIZES)))


def test_a_good_model_passes() -> None:
    verdict = zoo_judge.judge(SUBJECT)
    assert verdict.right and verdict.all_fused, verdict
    assert verdict.captured == "whole" and verdict.batches == 1
    assert verdict.found == verdict.fused == 3
    assert 0 < verdict.share <= 1


def test_a_wrong_rewrite_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = recast.optimize

    def wrong(model: nn.Module, **how: Any) -> Any:
        return real(model, passes="default,sabotage-low-precision", **how)

    monkeypatch.setattr(recast, "optimize", wrong)
    verdict = zoo_judge.judge(SUBJECT)
    assert not verdict.right and "of its limit" in verdict.why, verdict


def test_a_lookup_that_is_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = recast.optimize
    monkeypatch.setattr(recast, "optimize", lambda m, **how: real(m, passes="normalize", **how))
    verdict = zoo_judge.judge(SUBJECT)
    assert verdict.right and not verdict.all_fused
    assert verdict.left == 3


def test_other_names_are_told() -> None:
    plain = Small()
    other = copy.deepcopy(plain)
    other.register_buffer("extra", torch.zeros(1))
    assert "state_dict" in zoo_judge.names(plain, other)


def test_a_sparse_buffer_is_loaded_too() -> None:
    class Graph(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.eye(30).to_sparse())

    plain = Graph()
    assert zoo_judge.names(plain, copy.deepcopy(plain)) == ""
    other = copy.deepcopy(plain)
    other.load_state_dict = lambda state: None  # type: ignore[assignment, method-assign]
    assert "is not what was loaded" in zoo_judge.names(plain, other)


def test_a_model_that_raises_is_no_right_one() -> None:
    class Refuses(Small):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    verdict = zoo_judge.judge(Subject("ours/Refuses", lambda: (Refuses(), columns(SIZES))))
    assert not verdict.right and "no" in verdict.why


def test_batches_depend_on_the_seed_only() -> None:
    draw = packed(SIZES, 2, tags=4)
    one, same, other = (draw(6, Draw().manual_seed(k))[0] for k in (1, 1, 2))
    assert one.shape == (6, 9) and torch.equal(one, same) and not torch.equal(one, other)


def test_the_speed_is_a_ratio() -> None:
    assert 0.01 < zoo_judge.speed(SUBJECT, rows=64, rounds=2) < 100
    assert 0.01 < zoo_judge.inference(SUBJECT, rows=64, rounds=2) < 100
