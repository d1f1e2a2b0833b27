"""Waiting on the host: for what NCCL only makes streams wait for, and for gloo in short turns."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recast.runtime.ranks import collectives, faults, faults_agree
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


@dataclass
class Late:
    """A collective that is done, or has ``failed``, when it is looked at after one turn."""

    failed: bool = False
    done: bool = False

    def is_completed(self) -> bool:
        self.done = True
        return True

    def wait(self, limit: timedelta | None = None) -> None:
        if not self.done:
            assert limit is not None
            raise RuntimeError("Operation timed out!")
        if self.failed:
            raise RuntimeError("Connection closed by peer")


@pytest.fixture
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(faults, "_WATCH", SimpleNamespace(standstill=lambda: None))


@pytest.mark.usefixtures("_watched")
def test_what_is_done_just_after_a_turn_has_not_failed() -> None:
    collectives.wait(Late(), torch.zeros(1))
    with pytest.raises(RuntimeError, match="Connection closed"):
        collectives.wait(Late(failed=True), torch.zeros(1))


@pytest.mark.usefixtures("_watched")
def test_a_question_is_answered_only_if_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is somewhat ahead asks, while this one is about to be done."""
    asked: Any = [{"a": "1"}, None, {"a": "2"}, {"a": "3"}, {"a": "3"}]
    left = list(asked)
    answered: list[Any] = []

    class Never(Late):
        def is_completed(self) -> bool:
            return False

    def answer(question: Any) -> None:
        answered.append((question, len(left)))
        raise KeyboardInterrupt

    monkeypatch.setattr(faults_agree, "question", lambda: left.pop(0))
    monkeypatch.setattr(faults_agree, "answer", answer)
    with pytest.raises(KeyboardInterrupt):
        collectives.wait(Never(), torch.zeros(1))
    assert answered == [({"a": "3"}, 0)]
