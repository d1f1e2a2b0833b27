"""State outside the model that forward changes by a function that it calls: a graph took it as it
was, and would run again whenever it comes back to that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from strange import IDS, Base, pair, why
from torch import Tensor

CALLS = 8  # the trace and the proof have counted on: a count that comes there again is met, too
COUNTS, MASKS = [0], dict[int, Tensor]()


def counted() -> int:
    COUNTS[0] += 1
    return COUNTS[0]


def closed() -> Callable[[], int]:
    kept = COUNTS

    def count() -> int:
        kept[0] += 1
        return kept[0]

    return count


def of_environment() -> int:
    os.environ["RECAST_TEST_COUNT"] = str(int(os.environ["RECAST_TEST_COUNT"]) + 1)
    return int(os.environ["RECAST_TEST_COUNT"])


class Counting(Base):
    count: Any
    scale = 0.0

    def reset(self) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(self.scale))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) + self.weight * self.count()


class OfHelper(Counting):
    def reset(self) -> None:
        super().reset()
        self.count = counted


class OfClosure(Counting):
    def reset(self) -> None:
        super().reset()
        self.count = closed()


class OfEnvironment(Counting):
    def reset(self) -> None:
        super().reset()
        self.count = of_environment


def mask(n: int) -> Tensor:
    if n not in MASKS:
        MASKS[n] = torch.arange(n) / n
    return MASKS[n]


class Masked(Base):
    """The cache of a helper, filled at the first call, stays as it is."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.out((self.emb(ids) * mask(ids.shape[1])[:, None]).sum(1))


@pytest.mark.parametrize("scale", [0.0, 1.0])  # at 0 no comparison on the example can tell
@pytest.mark.parametrize("kind", [OfHelper, OfClosure, OfEnvironment])
def test_what_a_helper_counts_goes_on(
    kind: type[Counting], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_start(model: Any) -> list[Tensor]:
        COUNTS[0] = 0
        monkeypatch.setenv("RECAST_TEST_COUNT", "0")
        return [model(IDS) for _ in range(CALLS)]

    COUNTS[0] = 0
    monkeypatch.setenv("RECAST_TEST_COUNT", "0")
    monkeypatch.setattr(Counting, "scale", scale)
    plain, fast = pair(kind)
    assert "forward changes" in why(fast)
    assert "which it reads" in why(fast)
    if kind is not OfEnvironment:
        assert COUNTS == [0]  # what optimize has counted is undone
    for model in (plain, fast):
        model.get_parameter("weight").data.fill_(1.0)
    torch.testing.assert_close(from_start(fast), from_start(plain))


def test_a_cache_that_a_helper_has_filled_is_no_such_state() -> None:
    MASKS.clear()
    plain, fast = pair(Masked)
    assert fast.report.to_dict()["captured"] == "whole"
    for ids in (IDS, IDS[:3]):
        torch.testing.assert_close(fast(ids), plain(ids))
