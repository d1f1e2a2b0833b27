"""Search: prices choose the options, the least loaded ranks take them, moves and swaps improve the
result, ruin and recreate the best of them.

Deterministic: sorts are stable, ties go to the first, random numbers have a fixed seed, and effort
is counted in steps and never in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise

import numpy as np

from .bound import Bound, lower_bound, relaxed_choice
from .exact import exact
from .improve import improve
from .problem import Floats, Ints, Problem, Solution, Where
from .ruin_recreate import ruin_and_recreate
from .state import State

TARGETS = (1.01, 1.2, 1.001)  # multiples of the bound
ROOM = (1.0, 0.99, 0.96, 0.85)  # fractions of memory to set prices for: whole shards leave gaps
LUMP = 0.4  # fraction of the bound: a shard that slow leaves its rank little use for its memory
LARGE = 2_000_000  # tables x ranks
ENOUGH = 1.0005  # multiple of the bound: no further search
ATTEMPTS = 20  # share EFFORT
STARTS = 3  # how many of the plans are improved by ruin and recreate
# For the random numbers of ruin and recreate: arbitrary, but fixed, so that plans can be repeated.
SEEDS = (20_220_301, 2)  # each start is improved once with each; with the first if not FEW tables
FEW = 40  # tables: their best plans are found early or never, so a second run is worth more
EFFORT = (
    60_000  # of State.effort, a second or so, for the attempts; twice that to ruin and recreate
)
POLISH = 20_000  # of State.effort, for moves and swaps in the best plan before that
MORE = 30  # of State.effort per table: more for the attempts, less for what follows them


def search(problem: Problem, bound: Bound) -> Solution | None:
    """The best plan found; None if none was found that fits into memory."""
    found: list[tuple[Solution, float]] = []  # a plan and its price of memory
    enough = bound.value * ENOUGH
    state = State(problem)
    limit = EFFORT + MORE * problem.tables
    for target, prices, order in _attempts(problem, bound):
        state.reset()
        if not _construct(state, target, prices, order):
            continue
        improve(state, state.effort + max(EFFORT / ATTEMPTS, 2 * problem.tables))
        found.append((state.solution(), prices.memory))
        if found[-1][0].score <= enough:
            return found[-1][0]
        if state.effort > limit:
            break
    found.sort(key=lambda f: f[0].score)
    best, proven = exact(problem, found[0][0] if found else None)
    if best is None or proven:
        return best and replace(best, proven=proven)
    seeds = SEEDS if problem.tables <= FEW else SEEDS[:1]
    effort = max(2 * EFFORT - 4 * MORE * problem.tables, 0) / STARTS / len(seeds)
    for k, (start, price) in enumerate(_different(found)[:STARTS]):
        state.restore(start)
        improve(state, state.effort + POLISH / (1 + k))
        priced = bound.mix @ problem.options.total + price * problem.options.total_device
        polished = state.solution()
        for seed in seeds:
            rebuilt = ruin_and_recreate(problem, polished, priced, enough, effort, seed)
            best = min(best, rebuilt, key=lambda s: s.score)
        if best.score <= enough:
            break
    return best


def _different(found: Sequence[tuple[Solution, float]]) -> list[tuple[Solution, float]]:
    """One plan per score: from different plans, the search reaches different ones."""
    return list({round(s.score, 9): (s, price) for s, price in reversed(found)}.values())[::-1]


@dataclass(frozen=True, slots=True)
class _Prices:
    """The cost of each option at the prices of a bound."""

    relaxed: Floats  # inf if the bound does not allow the option
    plain: Floats
    memory: float  # per byte

    @staticmethod
    def of(problem: Problem, bound: Bound) -> _Prices:
        o = problem.options
        plain = bound.mix @ o.total + bound.price * o.total_device
        return _Prices(relaxed_choice(problem, bound), plain, bound.price)


class Order(Enum):
    """Which tables are placed first."""

    WIDE = auto()  # those with a shard on all ranks, then on a host, while all have room; then FULL
    FULL = auto()  # by the time or the memory of a shard; ranks are chosen by both
    SLOW = auto()  # by the time of a shard


def _attempts(problem: Problem, bound: Bound) -> Iterable[tuple[float, _Prices, Order]]:
    """(target, prices, order of the tables): few if the problem is large."""
    large = problem.tables * problem.ranks > LARGE
    orders = list(Order)[: 1 if large else 2 if bound.price else 3]
    guides = list(_guides(problem, bound))
    for target in TARGETS[:1] if large else TARGETS:
        for guide, prices in guides:
            for order in orders:
                yield guide.value * target, prices, order


def _guides(problem: Problem, bound: Bound) -> Iterable[tuple[Bound, _Prices]]:
    """Bounds whose prices are worth trying: for all memory and for less; without and with lumps."""
    if not bound.price:
        yield bound, _Prices.of(problem, bound)
        return
    o = problem.options
    lump = o.cost.max(0) > LUMP * bound.value
    much = np.where(lump, 1e3 * bound.value * problem.ranks, 0.0)
    smooth = replace(problem, options=replace(o, total=o.total + much))
    for part in ROOM:
        for form in (problem, smooth) if lump.any() else (problem,):
            tight = replace(form, device_capacity=problem.device_capacity * part)
            guide = lower_bound(tight)
            if guide is not None:
                yield guide, _Prices.of(form, guide)


def _construct(state: State, target: float, prices: _Prices, by: Order) -> bool:
    """Place every table with the best-priced option that stays within ``target``, or, if there is
    none, with the one of the lowest score. False if a table finds none.

    An option is a last resort if it leaves less memory than the best-priced options of the
    remaining tables need.
    """
    problem = state.problem
    first = problem.first.tolist()
    measure = 0.0 if by is Order.SLOW else target
    relaxed, plain = prices.relaxed.tolist(), prices.plain.tolist()
    takes = problem.options.total_device.tolist()
    best = [a + int(np.argmin(prices.relaxed[a:b])) for a, b in pairwise(first)]
    left = problem.ranks * problem.device_capacity - float(problem.start_device.sum())
    left -= sum(takes[o] for o in best)
    for t in _order(problem, best, by):
        left += takes[best[t]]
        ranked = sorted(range(first[t], first[t + 1]), key=lambda o: (relaxed[o], plain[o]))
        chosen: tuple[tuple[bool, float], int, Ints] | None = None
        for o in ranked:
            found = state.fit(o, measure)
            if found is None:
                continue
            over = takes[o] > max(left, 0.0)
            if chosen is None or (over, found[0]) < chosen[0]:
                chosen = ((over, found[0]), o, found[1])
            if found[0] <= target and not over:
                break
        if chosen is None:
            return False
        state.put(t, chosen[1], chosen[2])
        left -= takes[chosen[1]]
    return True


def _order(problem: Problem, best: list[int], by: Order) -> list[int]:
    """Tables in order of the weight of a shard of their best-priced option, in time or memory."""
    o = problem.options
    weight = o.cost.max(0) / max(float(o.cost.max()), 1e-300)
    if by is not Order.SLOW:
        weight = np.maximum(
            o.cost.max(0) * problem.ranks / max(float(o.total.max(0).sum()), 1e-300),
            o.device / max(problem.device_capacity, 1e-300),
        )
    spread = np.zeros(len(best))
    if by is Order.WIDE:
        where = o.where[best]
        spread = np.select([where == Where.ALL, where == Where.HOST], [2.0, 1.0], 0.0)
    found: list[int] = np.lexsort((-weight[best], -spread)).tolist()
    return found
