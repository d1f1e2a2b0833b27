"""Ruin and recreate: take part of a plan apart, rebuild it, and keep what is not much worse."""

from __future__ import annotations

from itertools import count

import numpy as np

from .improve import improve
from .problem import Floats, Ints, Problem, Solution
from .state import State

REMOVED = 14  # tables at once, at most
POWER = 24  # of the power mean in place of the maximum, which also sees the load of other ranks
PATIENCE = 1_500  # of State.effort, per table, without a better plan
NEAR = 1.005  # a score of so many times ``enough`` leaves little to gain: less patience
WORSE = 0.3  # of the mean: a plan worse by so much may still be continued, until the next restart
RESTART = 200  # rounds after which it restarts from the best plan, with its sums recomputed


def ruin_and_recreate(
    problem: Problem, start: Solution, priced: Floats, enough: float, effort: float, seed: int
) -> Solution:
    """The best plan found from ``start`` within ``effort``; stops at a score of ``enough``."""
    random = np.random.default_rng(seed)
    first = problem.first.tolist()
    state = State(problem)
    state.restore(start)
    best, current = start, _mean(state, start.score)
    last, patience = 0.0, PATIENCE * max(problem.tables - 4, 2)
    if best.score < enough * NEAR:
        patience //= 10
    for k in count():
        if best.score <= enough or state.effort > min(effort, last + patience):
            break
        if k % RESTART == RESTART - 1:
            state.restore(best)
            current = _mean(state, best.score)
        state.mark()
        if not _rebuild(state, best.score, priced, first, random):
            state.rollback()
            continue
        improve(state, effort, 30)
        found = _mean(state, best.score)
        if found > current * (1 + WORSE * float(random.random())):
            state.rollback()
            continue
        current = found
        if state.score.max() < best.score * (1 - 1e-9):
            best, last = state.solution(), state.effort
            current = _mean(state, best.score)
    return best


def _mean(state: State, unit: float) -> float:
    return float(((state.score / unit) ** POWER).sum())


def _rebuild(
    state: State, worst: float, priced: Floats, first: list[int], random: np.random.Generator
) -> bool:
    """Remove tables from the slowest rank, from another one and from all; place them again."""
    slowest = int(state.score.argmax())
    other = int(random.integers(len(state.score)))
    some = sorted(state.members[slowest] | state.members[other])
    pool = np.array(some + sorted(state.everywhere), dtype=np.int64)
    few = min(len(pool), int(random.integers(2, REMOVED + 1)))
    chosen = random.permutation(pool)[:few].tolist()
    for t in chosen:
        state.take(t)
    noise = random.uniform(0.7, 1.3, len(chosen))
    weights = [min(max(state.cost[o]) for o in range(first[t], first[t + 1])) for t in chosen]
    order = np.argsort(-np.array(weights) * noise, kind="stable").tolist()
    target = worst * float(random.uniform(0.93, 1.0))
    return all(_place(state, chosen[k], target, priced, first) for k in order)


def _place(state: State, table: int, target: float, priced: Floats, first: list[int]) -> bool:
    """Place ``table`` with the cheapest option within ``target``, else that of the lowest score."""
    best: tuple[tuple[bool, float], int, Ints] | None = None
    for o in range(first[table], first[table + 1]):
        found = state.fit(o)
        if found is None:
            continue
        late = found[0] > target
        key = (late, found[0] if late else float(priced[o]))
        if best is None or key < best[0]:
            best = (key, o, found[1])
    if best is None:
        return False
    state.put(table, best[1], best[2])
    return True
