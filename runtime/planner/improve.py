"""Moves that make the slowest rank faster, until none does."""

from __future__ import annotations

import numpy as np

from .problem import Floats, Ints, Where
from .state import State

LESS = 1 - 1e-9  # a score must fall by so much to count as lower


def improve(state: State, limit: float, steps: int = 1_000_000) -> None:
    """Relieve the slowest rank again and again by the best move or swap of one of its tables.

    Each step lowers that rank's score, and all ranks that it changes stay below its old score. So
    the sorted scores decrease, and it terminates; at the latest after ``steps``, or when
    ``state.effort`` exceeds ``limit``.
    """
    first = state.problem.first.tolist()
    for _ in range(steps):
        if state.effort > limit:
            return
        slowest = int(state.score.argmax())
        if not (_move(state, slowest, first) or _swap(state, slowest)):
            return


def _move(state: State, slowest: int, first: list[int]) -> bool:
    """Give one table of ``slowest`` other ranks or another option."""
    worst = float(state.score[slowest]) * LESS
    low = float(state.score.min())
    others = float(np.partition(state.score, -2)[-2]) if len(state.score) > 1 else low
    best: tuple[float, int, int, Ints] | None = None
    for table in [*sorted(state.members[slowest]), *sorted(state.everywhere)]:
        whole = table in state.everywhere
        limit = worst if best is None else best[0]
        base = state.cost[int(state.option[table])]
        options = [
            o
            for o in range(first[table], first[table + 1])
            if _floor(state, o, low, others, base if whole else None) < limit
        ]
        if not options:
            continue
        option, ranks = state.take(table)
        rest = float(state.score[ranks].max())
        for o in options:
            found = state.fit(o) if rest < limit else None
            if found is not None and max(found[0], rest) < limit:
                limit = max(found[0], rest)
                best = (limit, table, o, found[1])
        state.put(table, option, ranks)
    if best is None:
        return False
    state.take(best[1])
    state.put(*best[1:])
    return True


def _floor(
    state: State, option: int, low: float, others: float, freed: list[float] | None
) -> float:
    """A lower bound on the scores of the changed ranks: cheaper than :meth:`State.fit`."""
    add = min(state.cost[option])
    if freed is not None:  # it leaves every rank
        return low - max(freed) + add
    return (others if state.where[option] == Where.ALL else low) + add


def _swap(state: State, slowest: int) -> bool:
    """Exchange a table of ``slowest``, or of its host, with one of another rank or host."""
    return _swap_of(state, slowest, 1) or (
        state.problem.ranks_per_host > 1 and _swap_of(state, slowest, state.problem.ranks_per_host)
    )


def _swap_of(state: State, slowest: int, size: int) -> bool:
    """The same for tables on one rank (``size`` 1) or on all ranks of one host (``size`` ranks)."""
    problem = state.problem
    if problem.ranks <= size:
        return False
    worst = float(state.score[slowest]) * LESS
    kind = Where.ANY if size == 1 else Where.HOST
    movable = (problem.options.where[state.option] == kind) & (
        problem.options.count[state.option] == size
    )
    tables = np.flatnonzero(movable)
    if len(tables) < 2:
        return False
    place = np.array([state.ranks[t][0] // size for t in tables.tolist()])
    here = place == slowest // size
    mine, other, there = tables[here], tables[~here], place[~here]
    if not len(mine) or not len(other):
        return False
    value = _after_swap(state, mine, other, slowest // size, there, size)
    best = int(value.argmin())
    if value.flat[best] >= worst:
        return False
    a, b = int(mine[best // len(other)]), int(other[best % len(other)])
    had_a, had_b = state.take(a), state.take(b)
    state.put(a, had_a[0], had_b[1])
    state.put(b, had_b[0], had_a[1])
    return True


def _after_swap(state: State, mine: Ints, other: Ints, here: int, there: Ints, size: int) -> Floats:
    """(mine, other): the worse score of the two places after the exchange; inf if one overflows."""
    o = state.problem.options
    a, b = state.option[mine], state.option[other]
    load = state.load.reshape(len(state.load), -1, size).max(2)  # a host's term is its worst rank's
    value = np.full((len(a), len(b)), -np.inf)
    state.effort += 5 + value.size / 500 + len(state.option) / 100
    for k, cost in enumerate(o.cost):
        more = cost[b][None, :] - cost[a][:, None]
        np.maximum(value, load[k, here] + more, out=value)
        np.maximum(value, load[k, there][None, :] - more, out=value)
    device = state.device.reshape(-1, size).max(1)
    more = o.device[b][None, :] - o.device[a][:, None]
    wrong = device[here] + more > state.room
    wrong |= device[there][None, :] - more > state.room
    if o.host.any():
        more = (o.host[b][None, :] - o.host[a][:, None]) * min(size, state.problem.ranks_per_pool)
        per_pool = max(1, state.problem.ranks_per_pool // size)
        pools = np.maximum.reduceat(
            state.host, np.arange(0, len(state.host), max(1, size // state.problem.ranks_per_pool))
        )
        apart = there // per_pool != here // per_pool
        wrong |= apart[None, :] & (pools[here // per_pool] + more > state.room_host)
        wrong |= apart[None, :] & (pools[there // per_pool][None, :] - more > state.room_host)
    value[wrong] = np.inf
    return value
