"""The state of a search: each table's option and ranks, with loads that are updated per move."""

from __future__ import annotations

import numpy as np

from .problem import Floats, Ints, Problem, Solution, Where

NONE = -1
_EMPTY = np.zeros(0, dtype=np.int64)
SLACK = 1 + 1e-9  # for capacities, as repeated additions round


class State:
    """The loads of all ranks under the options chosen so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._every = np.arange(problem.ranks)
        self._one = len(problem.start) == 1
        self._hosts = problem.ranks // problem.ranks_per_host
        o = problem.options
        # as Python numbers: indexing an array for one number is ten times as slow
        self.where, self.count = o.where.tolist(), o.count.tolist()
        self.cost = o.cost.T.tolist()
        self.columns = np.ascontiguousarray(o.cost.T)[:, :, None]  # (O, K, 1)
        self.need, self.need_host = o.device.tolist(), o.host.tolist()
        self.room = problem.device_capacity * SLACK
        self.room_host = problem.host_capacity * SLACK
        self.effort = 0.0  # in units of about 10 us; the same number on every machine
        self.reset()

    def reset(self) -> None:
        """Go back to no table having an option."""
        problem = self.problem
        self.load = problem.start.copy()  # (K, W)
        self.device = problem.start_device.copy()  # (W,)
        self.host = problem.start_host.copy()  # (pools,)
        self.score = self.load.max(0)  # (W,)
        self.option = np.full(problem.tables, NONE, dtype=np.int64)
        self.ranks: list[Ints] = [_EMPTY] * problem.tables
        self.members: list[set[int]] = [set() for _ in range(problem.ranks)]  # not on all ranks
        self.everywhere: set[int] = set()
        self._had: dict[int, tuple[int, Ints]] = {}

    def after(self, option: int, ranks: Ints | slice = slice(None)) -> Floats:
        """The scores of ``ranks`` with one more shard of ``option`` on each."""
        if self._one:
            return self.load[0, ranks] + self.cost[option][0]
        return (self.load[:, ranks] + self.columns[option]).max(0)

    def fit(self, option: int, crowd: float = 0.0) -> tuple[float, Ints] | None:
        """The worst score of the best ranks for ``option``, and the ranks; None if none has room.

        ``crowd`` is what full memory counts as, in units of the score; 0: only scores count.
        """
        where = self.where[option]
        self.effort += 1 + len(self.score) / 1000
        after = self.after(option)
        need = self.device + self.need[option]
        if where == Where.ALL:
            if need.max() > self.room or not self._pools_hold(option):
                return None
            return float(after.max()), self._every
        key = np.maximum(after, need * (crowd / self.room)) if crowd else after.copy()
        key[need > self.room] = np.inf
        if self.need_host[option]:
            pools = self.host + self.need_host[option] > self.room_host
            key[np.repeat(pools, self.problem.ranks_per_pool)] = np.inf
        ranks = self._best(where, self.count[option], key)
        if ranks is None or (len(ranks) > 1 and not self._together(option, ranks)):
            return None
        return float(after[ranks].max()), ranks

    def _best(self, where: int, count: int, key: Floats) -> Ints | None:
        """The ranks that are best by their worst ``key``; None if that is infinite."""
        if where == Where.ANY:
            if count == 1:
                best = int(key.argmin())
                return None if np.isinf(key[best]) else self._every[best : best + 1]
            ranks = np.sort(np.argsort(key, kind="stable")[:count])
            return None if np.isinf(key[ranks].max()) else ranks
        size = self.problem.ranks_per_host
        hosts = key.reshape(self._hosts, size)
        if where == Where.HOST:
            host = int(hosts.max(1).argmin())
            ranks = self._every[host * size : (host + 1) * size]
        else:
            order = np.argsort(hosts, axis=1, kind="stable")[:, :count]
            host = int(np.take_along_axis(hosts, order[:, -1:], 1).argmin())
            ranks = np.sort(order[host]) + host * size
        return None if np.isinf(key[ranks].max()) else ranks

    def _together(self, option: int, ranks: Ints) -> bool:
        """Whether the host memories hold the shards of all of ``ranks``."""
        if not self.need_host[option]:
            return True
        pools = np.bincount(ranks // self.problem.ranks_per_pool, minlength=len(self.host))
        return bool((self.host + pools * self.need_host[option] <= self.room_host).all())

    def _pools_hold(self, option: int) -> bool:
        more = self.need_host[option] * self.problem.ranks_per_pool
        return not more or float(self.host.max()) + more <= self.room_host

    def put(self, table: int, option: int, ranks: Ints) -> None:
        self._had.setdefault(table, (NONE, _EMPTY))
        self.option[table], self.ranks[table] = option, ranks
        self._change(table, option, ranks, 1.0)

    def take(self, table: int) -> tuple[int, Ints]:
        """Remove ``table``; returns its option and ranks, which :meth:`put` can restore."""
        had = int(self.option[table]), self.ranks[table]
        self._had.setdefault(table, had)
        self._change(table, *had, -1.0)
        self.option[table], self.ranks[table] = NONE, _EMPTY
        return had

    def mark(self) -> None:
        """Set the point that :meth:`rollback` goes back to."""
        self._had.clear()

    def rollback(self) -> None:
        """Undo what was done since :meth:`mark`."""
        before = dict(self._had)
        for table in before:
            if self.option[table] != NONE:
                self.take(table)
        for table, (option, ranks) in before.items():
            if option != NONE:
                self.put(table, option, ranks)
        self.mark()

    def _change(self, table: int, option: int, ranks: Ints, sign: float) -> None:
        self.effort += 1 + len(ranks) / 50
        whole = len(ranks) == len(self.score)
        at = slice(None) if whole else ranks
        self.load[:, at] += sign * self.columns[option]
        self.score[at] = self.load[0, at] if self._one else self.load[:, at].max(0)
        self.device[at] += sign * self.need[option]
        if self.need_host[option]:
            pools = ranks // self.problem.ranks_per_pool
            np.add.at(self.host, pools, sign * self.need_host[option])
        for group in [self.everywhere] if whole else [self.members[r] for r in ranks.tolist()]:
            (group.add if sign > 0 else group.remove)(table)

    def solution(self) -> Solution:
        """The present state as a Solution, with sums recomputed."""
        load = self.problem.start.copy()
        for option, ranks in zip(self.option.tolist(), self.ranks, strict=True):
            load[:, ranks] += self.columns[option]
        scores = load.max(0)
        return Solution(self.option.copy(), tuple(self.ranks), float(scores.max()), scores)

    def restore(self, solution: Solution) -> None:
        """Go back to ``solution``."""
        self.reset()
        for table, ranks in enumerate(solution.ranks):
            self.put(table, int(solution.option[table]), ranks)
