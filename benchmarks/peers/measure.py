"""The cells of one set of tables, in one process: same losses? then times, in turn.

Every round each variant runs a forward without gradients and a step, on batches that the variant
before it did not have: rows that one has just pulled into the cache are no help to the next.
Variants far behind leave after the first rounds; what they took stays in the record. Where a step
is long, the steps of the comparison of losses are a round already: who is far behind in them has
that one round only.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from peers.cells import Cell, table_rows
from peers.floor import floor
from peers.model import Batch, Tables, batch
from peers.variants import OURS, RECIPES, Built, Variant, build, failure, given

# Losses of the first steps, and the clicks of a forward, may differ by this much: sums are taken in
# another order.
SAME = 2e-5
CHECKED = 4  # steps; half as many where they are long
LONG = 0.4  # seconds of a step of ours: each round counts then, and there are two at least
BEHIND = {1: 4.0, 3: 2.0}  # after so many rounds, leave when so many times slower than the first
# The same after the steps of the comparison, where they are long: of step and forward, or the step.
LAST, FAR = 1.4, 3.0
WARM = 2
REPEAT = 2e-3  # seconds of a measurement, at least
SHORT = 0.1  # seconds: a step that is run once more before it is measured
_MOST_IDS = 1 << 22  # ids kept in batches, all tables together


@dataclass(frozen=True)
class Plan:
    """How long to measure each cell, and what."""

    names: tuple[str, ...] = tuple(RECIPES)
    rounds: int = 15
    seconds: float = 20.0
    gib: float = 2.5  # of the tables and one state, where they are cut
    cpu_time: bool = False  # of the process, instead of the clock on the wall


@dataclass
class Times:
    """Seconds of every round."""

    step: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Milliseconds: median and quartiles; how many rounds."""
        found: dict[str, Any] = {"rounds": len(self.forward)}
        for name, seconds in (("step", self.step), ("forward", self.forward)):
            if seconds:
                low, middle, high = _quartiles(seconds)
                found[name] = [round(1e3 * x, 4) for x in (middle, low, high)]
        return found


def _quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high


def run(cells: Sequence[Cell], plan: Plan) -> Iterator[dict[str, Any]]:
    """A result for each of ``cells``, which share their data and width."""
    rows = table_rows(cells[0].data, cells[0].dim, plan.gib)
    tables = Tables(rows, cells[0].dim)
    torch.set_num_threads(cells[0].threads)
    built = build(tables, cells[0], plan.names)
    for cell in cells:
        torch.set_num_threads(cell.threads)
        yield _cell(cell, tables, built, plan)
        gc.collect()


def _cell(cell: Cell, tables: Tables, built: Built, plan: Plan) -> dict[str, Any]:
    each = cell.batch * cell.ids * len(tables.rows)
    number = max(3, min(len(built.variants) + 2, _MOST_IDS // each))
    batches = [batch(cell, tables.rows, seed=100 + k) for k in range(number)]
    forms = {v.form for v in built.variants.values()}
    inputs = {form: [given(form, b) for b in batches] for form in forms}
    live, absent = dict(built.variants), dict(built.absent)
    losses: dict[str, list[float]] = {}
    first: dict[str, tuple[float, float]] = {}
    clock = time.process_time if plan.cpu_time else time.perf_counter
    ids = [i.unique() for i in batches[0].ids]
    saved = tables.saved(ids)
    for name, variant in built.variants.items():
        variant.reset()
        try:
            long = any(step > LONG for _, step in first.values())
            losses[name], first[name] = _check(
                cell, variant, batches, inputs[variant.form], long, clock
            )
        except Exception as error:  # a peer's own failure is a result
            if name in OURS.values():
                raise
            absent[name] = failure(error)
            del live[name]
        tables.restore(ids, saved)
    del saved
    limit = floor(cell, tables, batches[0], clock)
    once = _once(live, first)
    near = {name: variant for name, variant in live.items() if name not in once}
    times = once | _times(cell, near, batches, inputs, plan, clock, first)
    absent |= {name: "left out by an option" for name in RECIPES if name not in plan.names}
    return {
        "cell": asdict(cell),
        "load": round(os.getloadavg()[0], 2),
        "floor": {k: float(f"{v:.4g}") for k, v in limit._asdict().items()},
        "differ": {name: float(f"{_apart(name, losses):.2g}") for name in live},
        "variants": {name: times[name].summary() for name in live},
        "absent": absent,
    }


def _check(
    cell: Cell,
    variant: Variant,
    batches: list[Batch],
    inputs: list[Any],
    long: bool,
    clock: Callable[[], float],
) -> tuple[list[float], tuple[float, float]]:
    """What all variants of the same semantics must agree on: losses, or clicks without training.
    And seconds of the forward and the last step.
    """
    # One batch again and again, so that what a step did to its rows shows in the next loss.
    dense, given, label = batches[0].dense, inputs[0], batches[0].label
    variant.module.eval()
    clicks = variant.infer(dense, given).double()
    found = [clicks.mean().item(), clicks.max().item()]
    forward = step = 0.0
    if long:
        started = clock()
        variant.infer(dense, given)
        forward = clock() - started
    variant.module.train()
    for _ in range((CHECKED // 2 if long else CHECKED) if cell.trains else 0):
        started = clock()
        found.append(variant.train(dense, given, label).item())
        step = clock() - started
    return found, (forward, step)


def _once(live: dict[str, Variant], first: dict[str, tuple[float, float]]) -> dict[str, Times]:
    """Those far behind where steps are long, with the one round they had."""
    known = {n: seconds for n, seconds in first.items() if n in live and seconds[0]}
    least = min((step for _, step in known.values()), default=0.0)
    quickest = min((forward for forward, _ in known.values()), default=0.0)
    return {
        n: Times([step], [forward])
        for n, (forward, step) in known.items()
        if n not in OURS.values()
        and (step > FAR * least or (step > LAST * least and forward > LAST * quickest))
    }


def _apart(name: str, losses: dict[str, list[float]]) -> float:
    """The largest difference from ours of the same semantics, or from the first of them."""
    same = [n for n in losses if RECIPES[n].semantics == RECIPES[name].semantics]
    judge = OURS[RECIPES[name].semantics]
    judge = judge if judge in losses else same[0]
    # One that is checked before steps are known to be long has made more of them.
    return max(abs(a - b) for a, b in zip(losses[name], losses[judge], strict=False))


def _times(
    cell: Cell,
    variants: dict[str, Variant],
    batches: list[Batch],
    inputs: dict[Any, list[Any]],
    plan: Plan,
    clock: Callable[[], float],
    first: dict[str, tuple[float, float]],
) -> dict[str, Times]:
    times = {name: Times() for name in variants}
    repeats: dict[tuple[str, str], int] = {}
    last: dict[str, float] = {}
    turn = 0

    def next_batch() -> int:
        nonlocal turn
        turn += 1
        return turn % len(batches)

    def measure(name: str, what: str, work: Callable[[int], object]) -> float:
        """Mean seconds of a call; short ones are repeated."""
        calls = repeats.get((name, what), 1)
        started = clock()
        for _ in range(calls):
            work(next_batch())
        seconds = (clock() - started) / calls
        repeats.setdefault((name, what), max(1, min(20, int(REPEAT / seconds))))
        return seconds

    def settle(name: str) -> None:
        """What the variant before left behind, such as memory given back, is not this one's."""
        v, k = variants[name], next_batch()
        i = inputs[v.form][k]
        v.infer(batches[k].dense, i)
        if cell.trains and last.get(name, 0.0) < SHORT:
            v.train(batches[k].dense, i, batches[k].label)

    def one(name: str) -> tuple[float, float]:
        settle(name)
        v, given = variants[name], inputs[variants[name].form]
        v.module.eval()
        forward = measure(name, "forward", lambda k: v.infer(batches[k].dense, given[k]))
        v.module.train()
        if not cell.trains:
            return forward, 0.0
        last[name] = measure(
            name, "step", lambda k: v.train(batches[k].dense, given[k], batches[k].label)
        )
        return forward, last[name]

    long = any(step > LONG for _, step in first.values())
    last.update({name: step for name, (_, step) in first.items()})
    if not long:  # else they are warm, and nothing needs repeating
        for _ in range(WARM):
            for name in variants:
                one(name)
        repeats.clear()
        for name in variants:
            one(name)  # how often to repeat, when warm
    left, started = list(variants), time.perf_counter()
    for done in range(plan.rounds):
        if done >= (2 if long else 3) and time.perf_counter() - started > plan.seconds:
            break
        for k in range(len(left)):
            name = left[(k + done) % len(left)]
            forward, step = one(name)
            times[name].forward.append(forward)
            if cell.trains:
                times[name].step.append(step)
        if done + 1 in BEHIND:
            left = _not_behind(left, times, BEHIND[done + 1])
    return times


def _not_behind(left: list[str], times: dict[str, Times], most: float) -> list[str]:
    """Ours, and those whose step (or forward, in a cell without steps) is near the fastest."""
    middle = {n: statistics.median(times[n].step or times[n].forward) for n in left}
    return [n for n in left if n in OURS.values() or middle[n] < most * min(middle.values())]
