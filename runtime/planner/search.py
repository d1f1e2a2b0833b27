"""Search: prices choose the options, the least loaded ranks take them, moves and swaps finish.

Deterministic: sorts are stable, ties go to the first, random numbers have a fixed seed, and effort
is counted in steps and never in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from .bound import Bound, lower_bound, relaxed_choice
from .exact import exact
from .improve import improve
from .problem import Floats, Ints, Problem, Solution
from .shake import shake
from .state import State

TARGETS = (1.001, 1.01, 1.2)  # of the bound
ROOM = (1.0, 0.97, 0.9, 0.8)  # of the memory, for which prices are made: whole shards leave gaps
LARGE = 2_000_000  # tables x ranks
ENOUGH = 1.0005  # of the bound: no further search
STARTS = 3  # plans that are taken apart and put together again
EFFORT = 60_000  # of State.effort, a second or so: to begin with, and again to shake


def search(problem: Problem, bound: Bound) -> Solution | None:
    """The best plan found; None where no way was found to fit the memory."""
    found: list[tuple[Solution, float]] = []  # with the price of memory that led to it
    enough = bound.value * ENOUGH
    state = State(problem)
    limit = EFFORT + 10 * problem.tables
    for target, guide, crowd in _attempts(problem, bound):
        state.reset()
        if not _construct(state, bound.value * target, _Prices.of(problem, guide), crowd):
            continue
        improve(state, max(limit, state.effort + 2 * problem.tables))
        found.append((state.solution(), guide.price))
        if found[-1][0].score <= enough:
            return found[-1][0]
        if state.effort > limit:
            break
    found.sort(key=lambda f: f[0].score)
    best, proven = exact(problem, found[0][0] if found else None)
    if best is None or proven:
        return best and replace(best, proven=proven)
    for start, price in _different(found)[:STARTS]:
        priced = bound.mix @ problem.options.total + price * problem.options.total_device
        shaken = shake(problem, start, priced, enough, 2 * EFFORT / STARTS)
        best = min(best, shaken, key=lambda s: s.score)
        if best.score <= enough:
            break
    return best


def _different(found: Sequence[tuple[Solution, float]]) -> list[tuple[Solution, float]]:
    """The best of each score: from each, other plans are near."""
    return list({round(s.score, 9): (s, price) for s, price in reversed(found)}.values())[::-1]


@dataclass(frozen=True, slots=True)
class _Prices:
    """What an option costs at the prices of a bound."""

    relaxed: Floats  # inf where the bound leaves the option out
    plain: Floats

    @staticmethod
    def of(problem: Problem, bound: Bound) -> _Prices:
        o = problem.options
        plain = bound.mix @ o.total + bound.price * o.total_device
        return _Prices(relaxed_choice(problem, bound), plain)


def _attempts(problem: Problem, bound: Bound) -> Iterable[tuple[float, Bound, bool]]:
    """(target, prices, whether memory is looked at when ranks are chosen): few if it is large."""
    large = problem.tables * problem.ranks > LARGE
    guides = [bound]
    for part in ROOM[1:] if bound.price else ():
        tight = replace(problem, device_capacity=problem.device_capacity * part)
        guide = lower_bound(tight)
        guides += [guide] if guide else []
    for guide in guides:
        for target in TARGETS[1:2] if large else TARGETS:
            target *= guide.value / bound.value
            yield target, guide, True
            if not large:
                yield target, guide, False


def _construct(state: State, target: float, prices: _Prices, crowd: bool) -> bool:
    """Place every table, the dearest first: the best-priced option that keeps to ``target``.

    Where none does, the one with the lowest score. False where a table finds no memory.
    """
    problem = state.problem
    first = problem.first.tolist()
    measure = target if crowd else 0.0
    relaxed, plain = prices.relaxed.tolist(), prices.plain.tolist()
    for t in _order(problem, prices.relaxed, crowd):
        ranked = sorted(range(first[t], first[t + 1]), key=lambda o: (relaxed[o], plain[o]))
        chosen: tuple[float, int, Ints] | None = None
        for o in ranked:
            found = state.fit(o, measure)
            if found is None:
                continue
            if chosen is None or found[0] < chosen[0]:
                chosen = (found[0], o, found[1])
            if found[0] <= target:
                break
        if chosen is None:
            return False
        state.put(t, chosen[1], chosen[2])
    return True


def _order(problem: Problem, priced: Floats, crowd: bool) -> list[int]:
    """Tables by what the shard of their best-priced option weighs, in time or in memory."""
    o = problem.options
    first = problem.first
    weight = o.cost.max(0) / max(float(o.cost.max()), 1e-300)
    if crowd:
        weight = np.maximum(
            o.cost.max(0) * problem.ranks / max(float(o.total.max(0).sum()), 1e-300),
            o.device / max(problem.device_capacity, 1e-300),
        )
    best = [a + int(np.argmin(priced[a:b])) for a, b in pairwise(first)]
    return np.argsort(-weight[best], kind="stable").tolist()
