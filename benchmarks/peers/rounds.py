"""Rounds in which all variants take turns, and what they tell.

In every round each variant runs a forward without gradients and a step, on batches that the variant
before it did not have, so that none finds its rows in the cache. The speed of a machine may change
from minute to minute, so ratios are taken within a round, and a variant that leaves early is
compared by the rounds it had.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.model import Batch
from peers.variants import OURS, RECIPES, Variant

WHATS = ("step", "forward")
# After so many rounds, variants so many times slower than the fastest peer leave.
BEHIND = {1: 2.5, 3: 1.5}
WARM = 2
REPEAT = 2e-3  # seconds of a measurement, at least
SHORT = 0.1  # seconds: a shorter step is run once more before it is measured
ENOUGH, NARROW = 5, 0.04  # rounds; distance of the ratios' quartiles over their median
COMPARISON = -1  # the number of the round in which losses were compared

Work = dict[str, set[str]]  # what each variant runs


@dataclass
class Times:
    """Seconds by the number of the round."""

    step: dict[int, float] = field(default_factory=dict)
    forward: dict[int, float] = field(default_factory=dict)

    def of(self, what: str) -> dict[int, float]:
        return self.step if what == "step" else self.forward

    def summary(self) -> dict[str, Any]:
        """Milliseconds: median and quartiles; how many rounds."""
        found: dict[str, Any] = {"rounds": max(len(self.step), len(self.forward))}
        for what in WHATS:
            if seconds := self.of(what):
                low, middle, high = quartiles(list(seconds.values()))
                found[what] = [round(1e3 * x, 4) for x in (middle, low, high)]
        return found


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ours_beside(name: str, what: str) -> str:
    """Which of ours a peer is compared with."""
    return OURS["exact" if what == "forward" else RECIPES[name].semantics]


def ratios(times: Mapping[str, Times], name: str, what: str) -> list[float]:
    """Ours over a peer's time, in each round that both had."""
    mine = times.get(ours_beside(name, what))
    if mine is None or name in OURS.values() or name not in times:
        return []
    theirs, own = times[name].of(what), mine.of(what)
    return [own[k] / theirs[k] for k in theirs if k in own]


def summaries(times: Mapping[str, Times]) -> dict[str, Any]:
    """Each variant's times and, for a peer, our ratio to it: median and quartiles."""
    found = {name: of.summary() for name, of in times.items()}
    for name in times:
        for what in WHATS:
            if some := ratios(times, name, what):
                low, middle, high = quartiles(some)
                numbers = [float(f"{x:.4g}") for x in (middle, low, high)]
                found[name].setdefault("ratio", {})[what] = numbers
    return found


def take_turns(
    variants: Mapping[str, Variant],
    work: Work,
    batches: Sequence[Batch],
    inputs: Mapping[Any, list[Any]],
    clock: Callable[[], float],
    times: dict[str, Times],
    rounds: int,
    seconds: float,
) -> None:
    """Add rounds to ``times`` until there are ``rounds``, or ``seconds`` have passed, or the ratios
    to the fastest peers are narrow. Variants whose losses were compared are warm already.
    """
    warm = any(of.step or of.forward for of in times.values())
    last = {name: max(of.step.values()) for name, of in times.items() if of.step}
    turns = _Turns(variants, work, batches, inputs, clock, last)
    if not warm:
        turns.warm_up()
    started, had = time.perf_counter(), int(warm)
    for done in range(rounds - had):
        least = 1 if warm else 3
        if done >= least and time.perf_counter() - started > seconds:
            break
        names = [name for name in variants if work.get(name)]
        for k in range(len(names)):
            name = names[(k + done) % len(names)]
            for what, spent in turns.one(name).items():
                times[name].of(what)[done] = spent
        if done + 1 in BEHIND:
            drop_behind(work, times, BEHIND[done + 1])
        if done + 1 >= ENOUGH and _narrow(times):
            break


class _Turns:
    """Runs variants on batches, the next one each time."""

    def __init__(
        self,
        variants: Mapping[str, Variant],
        work: Work,
        batches: Sequence[Batch],
        inputs: Mapping[Any, list[Any]],
        clock: Callable[[], float],
        last: dict[str, float],  # seconds of a step
    ) -> None:
        self.variants, self.work, self.clock = variants, work, clock
        self.batches, self.inputs = batches, inputs
        self.repeats: dict[tuple[str, str], int] = {}
        self.last = last
        self.turn = 0

    def warm_up(self) -> None:
        """Run each variant, once if steps are long, and find how often to repeat each."""
        names = [name for name in self.variants if self.work.get(name)]
        for done in range(WARM + 1):
            self.repeats.clear()
            for name in names:
                self.one(name)
            if done == 0 and max(self.last.values(), default=0.0) > SHORT:
                return

    def one(self, name: str) -> dict[str, float]:
        """Seconds of a forward and a step, or of the one that the variant runs."""
        variant, runs = self.variants[name], self.work[name]
        found: dict[str, float] = {}
        # A first step pays for what the variant before left behind, such as freed memory.
        if "step" in runs and self.last.get(name, 0.0) < SHORT:
            variant.module.train()
            self._step(variant)
        variant.module.eval()
        if "forward" in runs:
            self._forward(variant)
            found["forward"] = self._measure(name, "forward", self._forward)
        if "step" in runs:
            variant.module.train()
            found["step"] = self.last[name] = self._measure(name, "step", self._step)
        return found

    def _measure(self, name: str, what: str, call: Callable[[Variant], object]) -> float:
        """Mean seconds of a call; short ones are repeated."""
        calls, variant = self.repeats.get((name, what), 1), self.variants[name]
        started = self.clock()
        for _ in range(calls):
            call(variant)
        spent = (self.clock() - started) / calls
        self.repeats.setdefault((name, what), max(1, min(20, int(REPEAT / max(spent, 1e-9)))))
        return spent

    def _next(self, variant: Variant) -> tuple[Batch, Any]:
        self.turn += 1
        k = self.turn % len(self.batches)
        return self.batches[k], self.inputs[variant.form][k]

    def _forward(self, variant: Variant) -> None:
        batch, given = self._next(variant)
        variant.infer(batch.dense, given)

    def _step(self, variant: Variant) -> None:
        batch, given = self._next(variant)
        variant.train(batch.dense, given, batch.label)


def drop_behind(work: Work, times: Mapping[str, Times], most: float) -> None:
    """Variants far behind the fastest peer in a step, or a forward, no longer run it."""
    for what in WHATS:
        middle = {
            name: statistics.median(of.of(what).values())
            for name, of in times.items()
            if of.of(what) and name not in OURS.values()
        }
        for name, seconds in middle.items():
            rivals = [
                s for n, s in middle.items() if ours_beside(n, what) == ours_beside(name, what)
            ]
            if seconds > most * min(rivals):
                work[name].discard(what)


def _narrow(times: Mapping[str, Times]) -> bool:
    """Whether each contest with the fastest peer is known well enough."""
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for name in times:
        for what in WHATS:
            if some := ratios(times, name, what):
                low, middle, high = quartiles(some)
                key = (what, ours_beside(name, what))
                best[key] = max(best.get(key, (0.0, 0.0)), (middle, (high - low) / middle))
    return all(apart <= NARROW for _, apart in best.values())
