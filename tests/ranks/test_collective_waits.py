"""Waiting on the host for what NCCL only makes streams wait for."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from recast.runtime.ranks.collectives import until_done


@dataclass
class Work:
    """Done at its ``last`` look."""

    last: int
    looks: int = 0

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks >= self.last


def test_it_looks_until_it_is_done() -> None:
    work = Work(5)
    until_done(work, 10.0)
    assert work.looks == 5


def test_not_for_ever() -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="within 0 s"):
        until_done(Work(10**9), 0.2)
    assert 0.2 <= time.monotonic() - started < 2.0
