"""Arrays that the model keeps and forward writes to: no graph does, unless a function that runs at
each call does it.
"""

from __future__ import annotations

import array
import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from strange import IDS, Base, why
from torch import Tensor

import recast

CALLS = 6  # the proof ran forward some times: a count that comes there again is met, too


class Counting(Base):
    def held(self) -> Any:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        count = self.held()
        count[0] += 1
        return self.rows(ids) * float(count[0])


class OfNumpy(Counting):
    def reset(self) -> None:
        self.kept = np.ones(3)

    def held(self) -> Any:
        return self.kept


class OfPython(OfNumpy):
    def reset(self) -> None:
        self.kept = array.array("d", [1.0, 2.0])  # type: ignore[assignment]


class OfBytes(OfNumpy):
    def reset(self) -> None:
        self.kept = bytearray(4)  # type: ignore[assignment]


class InList(Counting):
    def reset(self) -> None:
        self.kept = [np.ones(3)]

    def held(self) -> Any:
        return self.kept[0]


class InObject(Counting):
    def reset(self) -> None:
        self.kept = SimpleNamespace(of=np.ones(3))

    def held(self) -> Any:
        return self.kept.of


class Tracked(Base):
    """Only the function that leaves torch knows the array: that one runs at each call."""

    def reset(self) -> None:
        self.kept = np.zeros(3)

    def track(self, rows: Tensor) -> Tensor:
        self.kept[0] += rows.detach().numpy().mean()
        return rows * 1

    def forward(self, ids: Tensor) -> Tensor:
        return self.track(self.rows(ids))


@pytest.mark.parametrize("kind", [OfNumpy, OfPython, OfBytes, InList, InObject])
def test_an_array_that_forward_counts_in_counts_on(kind: type[Counting]) -> None:
    plain = kind()
    twin = copy.deepcopy(plain)
    fast = recast.optimize(twin, example=IDS)
    assert "forward changes what is in self.kept" in why(fast)
    for _ in range(CALLS):
        torch.testing.assert_close(fast(IDS), plain(IDS))
    assert list(twin.held()) == list(plain.held())


def test_an_array_of_a_function_that_runs_at_each_call_is_its_own_matter() -> None:
    plain = Tracked()
    twin = copy.deepcopy(plain)
    fast = recast.optimize(twin, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    for _ in range(CALLS):
        torch.testing.assert_close(fast(IDS), plain(IDS))
    np.testing.assert_allclose(twin.kept, plain.kept, rtol=1e-5)
