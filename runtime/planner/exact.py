"""Branch and bound: all plans of a small problem, except those proven to be no better."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import comb

import numpy as np

from .problem import Ints, Problem, Solution, Where
from .state import State

NODES = 6_000  # placements tried before it gives up
LESS = 1 - 1e-9


def exact(problem: Problem, start: Solution | None) -> tuple[Solution | None, bool]:
    """The best plan and True, if all could be tried in few steps; else the best seen, and False."""
    if not _small(problem):
        return start, False
    walk = _Walk(problem, start)
    done = walk.descend(0)
    return walk.best, done


def _small(problem: Problem) -> bool:
    """Whether it is worth trying: few tables, with few options each."""
    if problem.tables > 10:
        return False
    counts = problem.options.count[problem.options.where != Where.ALL]
    return all(comb(problem.ranks, int(c)) <= NODES for c in counts)


class _Walk:
    """The search tree: tables in order of their least cost, the most expensive first."""

    def __init__(self, problem: Problem, start: Solution | None) -> None:
        self.problem, self.best, self.nodes = problem, start, 0
        self.state = State(problem)
        self.first = problem.first.tolist()
        least = np.minimum.reduceat(problem.options.total, problem.first[:-1], axis=1)
        self.order = np.argsort(-least.max(0), kind="stable").tolist()
        after = np.cumsum(least[:, self.order[::-1]], axis=1)[:, ::-1]
        self.rest = np.hstack([after, np.zeros((len(after), 1))])  # of the tables from depth on

    def descend(self, depth: int) -> bool:
        """Try all placements below that may be better; False if the steps ran out."""
        state, problem = self.state, self.problem
        limit = np.inf if self.best is None else self.best.score * LESS
        floor = (state.load.sum(1) + self.rest[:, depth]).max() / problem.ranks
        if max(floor, state.score.max()) >= limit:
            return True
        if depth == problem.tables:
            self.best = state.solution()
            return True
        table = self.order[depth]
        for option in range(self.first[table], self.first[table + 1]):
            for ranks in self._ways(option):
                self.nodes += 1
                if self.nodes > NODES:
                    return False
                if not self._holds(option, ranks):
                    continue
                state.put(table, option, ranks)
                done = self.descend(depth + 1)
                state.take(table)
                if not done:
                    return False
        return True

    def _holds(self, option: int, ranks: Ints) -> bool:
        state = self.state
        if state.device[ranks].max() + state.need[option] > state.room:
            return False
        pools = np.bincount(ranks // self.problem.ranks_per_pool, minlength=len(state.host))
        return bool((state.host + pools * state.need_host[option] <= state.room_host).all())

    def _ways(self, option: int) -> Iterator[Ints]:
        """Sets of ranks for ``option``; of sets that are equivalent now, only one."""
        where, count = self.state.where[option], self.state.count[option]
        ranks, each = self.problem.ranks, self.problem.ranks_per_host
        if where == Where.ALL:
            yield np.arange(ranks)
            return
        hosts = (
            [range(ranks)]
            if where == Where.ANY
            else [range(h, h + each) for h in range(0, ranks, each)]
        )
        looks = self._looks()
        seen: set[tuple[object, ...]] = set()
        for host in hosts:
            for found in combinations(host, count):
                look = tuple(looks[r] for r in found)
                parts = tuple(r // each for r in found) if where == Where.ANY and count > 1 else ()
                if (look, parts) not in seen:
                    seen.add((look, parts))
                    yield np.array(found)

    def _looks(self) -> list[object]:
        """What distinguishes each rank: its own load, and those of the ranks of its host."""
        state, each = self.state, self.problem.ranks_per_host
        pool = self.problem.ranks_per_pool
        own = [
            (*(round(float(x), 9) for x in state.load[:, r]), round(float(state.device[r]), 3),
             round(float(state.host[r // pool]), 3))
            for r in range(self.problem.ranks)
        ]  # fmt: skip
        return [
            (own[r], tuple(sorted(own[r // each * each : (r // each + 1) * each])))
            for r in range(self.problem.ranks)
        ]
