"""A thread that reads an optimizer's state while another one trains, as loggers and checkpoints in
the background do: what it reads may be of two steps, but the training is as without it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from row_trio import MOVING, Trio

from recast.runtime.rows import ages, whole
from recast.runtime.rows.ages import Moment, turns_of

pytestmark = pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
STEPS = 60


@pytest.fixture(autouse=True)
def _no_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "SMALL", 0)


@pytest.fixture(params=MOVING)
def trio(request: pytest.FixtureRequest) -> Iterator[Trio]:
    yield Trio(MOVING[request.param](), rows=2000, width=32)


def moment(trio: Trio) -> Any:
    return next(held for held in trio.ours.state[trio.table].values() if isinstance(held, Moment))


def in_thread(run: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def norm(trio: Trio) -> None:
    for held in trio.ours.state[trio.table].values():
        if torch.is_tensor(held):
            held.norm()


def copied(trio: Trio) -> None:
    copy.deepcopy(trio.ours.state_dict())


@pytest.mark.parametrize("read", [norm, copied])
def test_training_is_as_without_a_reader(trio: Trio, read: Callable[[Trio], None]) -> None:
    trio.train(2)
    stop, errors, reads = threading.Event(), [], 0

    def look() -> None:
        nonlocal reads
        while not stop.is_set() and not errors:
            try:
                read(trio)
                reads += 1
            except Exception as error:
                errors.append(error)

    thread = in_thread(look)
    try:
        trio.train(STEPS)
    finally:
        stop.set()
        thread.join()
    assert reads and not errors
    trio.check()


def test_a_reader_waits_for_a_step(trio: Trio) -> None:
    trio.train(3)
    held = moment(trio)
    with turns_of(trio.ours).lock:  # as a step does
        thread = in_thread(held.norm)
        thread.join(0.2)
        assert thread.is_alive() and type(held) is Moment
    thread.join()
    assert type(held) is torch.Tensor
    trio.train(3)
    trio.check()


def test_a_step_waits_for_a_reader(trio: Trio) -> None:
    trio.train(3)
    before = trio.table.detach().clone()
    with turns_of(trio.ours).lock:
        thread = in_thread(trio.step)
        thread.join(0.2)
        assert thread.is_alive() and torch.equal(trio.table, before)
    thread.join()
    assert not torch.equal(trio.table, before)
    trio.check()


@pytest.mark.parametrize(("steps", "seconds"), [(5, 0.0), (20, 1e9)])
def test_moments_stay_ordinary_while_another_thread_may_copy_them(
    trio: Trio, monkeypatch: pytest.MonkeyPatch, steps: int, seconds: float
) -> None:
    """For some steps, and for some time: small tables take many while a thread waits for a core."""
    monkeypatch.setattr(ages, "_APART_SECONDS", seconds)
    trio.train(3)
    in_thread(lambda: trio.ours.state_dict()).join()
    trio.train(steps)
    held = [h for h in trio.ours.state[trio.table].values() if torch.is_tensor(h)]
    assert not any(isinstance(h, Moment) for h in held)
    turns_of(trio.ours).until = 0.0
    trio.train(5)
    assert isinstance(moment(trio), Moment)
    trio.check()
