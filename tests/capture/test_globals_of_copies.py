"""Globals of methods that are traced as copies, with ``len`` of our own: what is read is asked
again, and what is set is seen.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from strange import IDS, Base
from torch import Tensor

import recast
from recast.errors import RecastWarning
from recast.rewriter.compiled import homes

SCALE: Any = 2.0
LAST: Any = None


def scaled(h: Tensor) -> Tensor:
    return h * SCALE


class Rows(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * SCALE + torch.arange(len(ids))[:, None, None]


class InHelper(Base):
    def forward(self, ids: Tensor) -> Tensor:
        return scaled(self.rows(ids)) + torch.arange(len(ids))[:, None, None]


class Counts(Base):
    def reset(self) -> None:
        self.steps = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.steps += 1
        return self.rows(ids) * SCALE + self.steps


class Heated(Base):
    def reset(self) -> None:
        self.heat = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * SCALE / self.heat


@pytest.mark.parametrize("kind", [Rows, InHelper, Counts, Heated])
def test_what_they_read(kind: type[Base], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = kind()
    known = dict(homes._SCRIPTS)
    varying = ["heat"] if kind is Heated else []
    fast = recast.optimize(copy.deepcopy(plain), example=IDS, varying=varying)
    assert fast.report.captured == "whole" and known == homes._SCRIPTS  # which nothing clears
    torch.testing.assert_close(fast(IDS), plain(IDS))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    with pytest.warns(RecastWarning, match=r"SCALE was 2\.0 and is now 3\.0"):
        torch.testing.assert_close(fast(IDS), plain(IDS))


class Keeps(Base):
    def forward(self, ids: Tensor) -> Tensor:
        global LAST
        LAST = self.rows(ids)
        return LAST + torch.arange(len(ids))[:, None, None]


def test_what_they_set() -> None:
    fast = recast.optimize(Keeps(), example=IDS)
    assert fast.report.captured == "partial"
    fast(IDS)
    torch.testing.assert_close(LAST, fast.rows(IDS))


def test_a_function_in_a_closure() -> None:
    act: Any = scaled

    class Closed(Base):
        def forward(self, ids: Tensor) -> Tensor:
            return act(self.rows(ids)) + torch.arange(len(ids))[:, None, None]

    plain = Closed()
    fast = recast.optimize(copy.deepcopy(plain), example=IDS)
    assert fast.report.captured == "whole"
    torch.testing.assert_close(fast(IDS), plain(IDS))  # without a warning
    act = torch.neg
    with pytest.warns(RecastWarning, match="act was changed"):
        torch.testing.assert_close(fast(IDS), plain(IDS))
