"""Search: prices choose the options, the least loaded ranks take them, moves and swaps finish.

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
from .shake import shake
from .state import State

TARGETS = (1.01, 1.2, 1.001)  # of the bound
ROOM = (1.0, 0.99, 0.96, 0.85)  # of the memory, for which prices are made: whole shards leave gaps
LUMP = 0.4  # of the bound: a shard of so much time leaves its rank little to do with its memory
LARGE = 2_000_000  # tables x ranks
ENOUGH = 1.0005  # of the bound: no further search
ATTEMPTS = 20  # that share the effort to begin with
STARTS = 3  # plans that are taken apart and put together again
SEEDS = (20_220_301, 2)  # of it; the second for
FEW = 40  # tables, whose best plans are found early or never
EFFORT = 60_000  # of State.effort, a second or so: to begin with, and twice that to shake
POLISH = 20_000  # of it for the best plan, before it is shaken
MORE = 30  # of it for each table to begin with, and less to shake, which helps few tables most


def search(problem: Problem, bound: Bound) -> Solution | None:
    """The best plan found; None where no way was found to fit the memory."""
    found: list[tuple[Solution, float]] = []  # with the price of memory that led to it
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
            shaken = shake(problem, polished, priced, enough, effort, seed)
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
    memory: float  # of a byte

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
    """Bounds whose prices are worth a try: of all memory and of less; without lumps, and with."""
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
    """Place every table: the best-priced option that keeps to ``target``.

    Where none does, the one with the lowest score. An option that leaves less memory than the
    best-priced ones of the tables to come need is a last resort. False where a table finds none.
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
    """Tables by what the shard of their best-priced option weighs, in time or in memory."""
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
