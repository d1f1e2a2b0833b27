"""Capture runs forward, and what that counts or lists in globals is as before; caches stay warm."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from strange import IDS, Base
from torch import Tensor

import recast

COUNTS = {"calls": 0}
LIST: list[Any] = []
METER = types.SimpleNamespace(calls=0)
CACHE: dict[int, Tensor] = {}


def halved(x: Tensor) -> Tensor:
    halved.calls += 1  # type: ignore[attr-defined]
    return x / 2


class InDict(Base):
    def forward(self, ids: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return self.rows(ids)


class InList(Base):
    def forward(self, ids: Tensor) -> Tensor:
        LIST.append(ids.shape[0])
        return self.rows(ids)


class InObject(Base):
    def forward(self, ids: Tensor) -> Tensor:
        METER.calls += 1
        return self.rows(ids)


class InFunction(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return halved(self.rows(ids))


@pytest.mark.parametrize("kind", [InDict, InList, InObject, InFunction])
def test_what_forward_counts(kind: type[Base]) -> None:
    halved.calls = METER.calls = COUNTS["calls"] = 0  # type: ignore[attr-defined]
    LIST.clear()
    model = kind()
    fast = recast.optimize(model, example=IDS)
    assert "forward changes" in str(fast.report.to_dict()["why"])
    for calls in (0, 1, 2):
        counted = METER.calls, COUNTS["calls"], halved.calls, len(LIST)  # type: ignore[attr-defined]
        assert sum(counted) == calls
        torch.testing.assert_close(fast(IDS), model.rows(IDS) / (2 if kind is InFunction else 1))


class Cached(Base):
    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] not in CACHE:
            CACHE[ids.shape[1]] = torch.arange(ids.shape[1]).sum()
        return self.rows(ids) * CACHE[ids.shape[1]]


def test_a_cache_stays_warm() -> None:
    model = Cached()
    fast = recast.optimize(model, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    assert [type(v) for v in CACHE.values()] == [Tensor]
    torch.testing.assert_close(fast(IDS), model(IDS))  # without a warning
