"""The choice between ways to compute one thing: timed once, remembered, never while recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from recast.errors import RecastWarning
from recast.runtime import device, fastest
from recast.runtime.recorded import recording


class Clock:
    """Reports given costs as times, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, way: Callable[[], float]) -> float:
        self.asked += 1
        return way()


LIKE = torch.zeros(1)
SAME = torch.tensor([1.0, -2.0])


def choose(key: str, ways: Mapping[str, Callable[[], float]], result: Any = None) -> str:
    """Ways with equal results, unless ``result`` says otherwise."""
    return fastest.choose(key, ways, LIKE, result or (lambda cost: (SAME, None)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(fastest, "timer_of", lambda like: clock)
    monkeypatch.setattr(fastest, "_chosen", {})
    monkeypatch.setattr(fastest, "_times", {})
    yield clock


def ways(cublaslt: float, plain: float) -> dict[str, Callable[[], float]]:
    return {"cublaslt": lambda: cublaslt, "plain": lambda: plain}


def test_the_fastest_is_taken_and_remembered(clock: Clock) -> None:
    assert fastest.chosen("a") is None
    assert choose("a", ways(1.0, 2.0)) == "cublaslt"
    assert choose("b", ways(2.0, 1.0)) == "plain"
    asked = clock.asked
    assert asked == 2 * 2 * fastest._ROUNDS
    assert (fastest.chosen("a"), fastest.chosen("b")) == ("cublaslt", "plain")
    assert clock.asked == asked
    assert fastest.timings() == [
        {"key": "a", "chosen": "cublaslt", "cublaslt": 1e3, "plain": 2e3},
        {"key": "b", "chosen": "plain", "cublaslt": 2e3, "plain": 1e3},
    ]


def test_the_best_of_some_rounds_counts(clock: Clock) -> None:
    """One way is disturbed at its first timed call."""
    times = iter([0.0, 9.0, 1.0, 1.0])
    assert choose("a", {"cublaslt": lambda: next(times), "plain": lambda: 2.0}) == ("cublaslt")


def test_a_single_way_is_not_timed(clock: Clock) -> None:
    assert choose("a", {"plain": lambda: 1.0}) == "plain"
    assert clock.asked == 0


def test_a_way_that_is_held_to(clock: Clock) -> None:
    choose("a", ways(1.0, 2.0))
    with device.use("plain"):
        assert fastest.chosen("a") is None
        assert choose("a", ways(1.0, 2.0)) == "plain"
    with device.use("cublaslt"):
        assert choose("b", ways(2.0, 1.0)) == "cublaslt"
        assert choose("b", {"plain": lambda: 1.0}) == "plain"
    assert fastest.chosen("a") == "cublaslt" and fastest.chosen("b") is None
    with device.use("fused"):  # says nothing of these
        assert fastest.chosen("a") == "cublaslt"


def test_nothing_is_timed_or_remembered_at_the_wrong_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording.recording():
        assert choose("a", ways(1.0, 2.0)) == "plain"
    torch.use_deterministic_algorithms(True)
    try:
        assert choose("a", ways(1.0, 2.0)) == "plain"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(fastest, "timer_of", lambda like: None)
    assert choose("a", ways(1.0, 2.0)) == "plain"
    assert clock.asked == 0 and fastest.chosen("a") is None


def result(off: Tensor) -> Callable[[float], tuple[Tensor, None]]:
    """Of the way that costs 1, SAME; of the others, with something added."""
    return lambda cost: (SAME if cost == 1.0 else SAME + off, None)


@pytest.mark.parametrize("off", [[0.5, 0.0], [float("nan"), 0.5], [0.0, -4.0]])
def test_a_way_that_is_wrong_is_left_out(clock: Clock, off: list[float]) -> None:
    with pytest.warns(RecastWarning, match="cublaslt gives another result than plain for a"):
        assert choose("a", ways(0.5, 1.0), result(torch.tensor(off))) == "plain"
    assert fastest.chosen("a") == "plain" and clock.asked == 0


@pytest.mark.parametrize("off", [[0.01, 0.01], [float("nan"), 0.0], [float("inf"), 0.01]])
def test_rounding_and_overflow_are_not_wrong(clock: Clock, off: list[float]) -> None:
    assert choose("a", ways(0.5, 1.0), result(torch.tensor(off))) == "cublaslt"


def test_seconds_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two events on the stream, after a call that warms up, and behind what holds the
    device back until all are in its queue.
    """
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            seen.append("event")

        def synchronize(self) -> None:
            seen.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 10.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("hold"))
    assert fastest._seconds(lambda: seen.append("call")) == pytest.approx(0.01 / fastest._CALLS)
    assert seen == ["call", "hold", "event", *["call"] * fastest._CALLS, "event", "wait"]


def test_a_cpu_is_not_timed() -> None:
    assert fastest.timer_of(LIKE) is None
