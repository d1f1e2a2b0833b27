"""The planner's problem, without tables: options that cost time and memory on some ranks.

Choose one option for each table and ranks for its shards, so that the slowest rank is as fast as
can be and no memory overflows. What an option is a cut of, and what its costs mean, only the cost
model knows: ours, or anybody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Where(IntEnum):
    """On which ranks the shards of an option may lie."""

    ANY = 0  # ``count`` different ranks
    ALL = 1  # one shard on every rank
    HOST = 2  # one on every rank of one host
    WITHIN = 3  # ``count`` different ranks of one host


@dataclass(frozen=True, slots=True)
class Options:
    """O options, those of a table side by side; all shards of one option weigh the same.

    ``cost`` (K, O) is what a shard adds to the K terms of its rank, ``device`` and ``host`` (O,) to
    its memory. ``total`` (K, O), ``total_device`` and ``total_host`` (O,) are the exact sums over
    shards, where shards differ (the others are then of the largest): for the lower bound.
    """

    table: Ints
    where: Ints
    count: Ints
    cost: Floats
    device: Floats
    host: Floats
    total: Floats
    total_device: Floats
    total_host: Floats

    def __len__(self) -> int:
        return len(self.table)

    def take(self, kept: NDArray) -> Options:
        """Those of ``kept``, in its order."""
        return Options(
            self.table[kept], self.where[kept], self.count[kept], self.cost[:, kept],
            self.device[kept], self.host[kept], self.total[:, kept], self.total_device[kept],
            self.total_host[kept],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """``score(rank) = max over k of (start[k, rank] + sum of cost[k] of its shards)``.

    ``ranks_per_host`` and ``ranks_per_pool``: neighbours that form a host, and that share one host
    memory of ``host_capacity``. ``start``, ``start_device`` and ``start_host`` is what is there
    whatever is chosen.
    """

    tables: int
    options: Options
    ranks: int
    ranks_per_host: int
    ranks_per_pool: int
    device_capacity: float
    host_capacity: float
    start: Floats  # (K, W)
    start_device: Floats  # (W,)
    start_host: Floats  # (pools,)

    @property
    def first(self) -> Ints:
        """The first option of each table, and the number of options: (tables + 1,)."""
        return np.searchsorted(self.options.table, np.arange(self.tables + 1))


@dataclass(frozen=True, slots=True)
class Solution:
    """``option[t]`` of the problem's options for each table, its shards on ``ranks[t]``."""

    option: Ints
    ranks: tuple[Ints, ...]
    score: float  # of the slowest rank
    scores: Floats  # of each rank
    proven: bool = False  # no other scores less


def undominated(problem: Problem) -> Ints:
    """The options worth a thought: no other of the same table and spread is as good in everything.

    Of equal ones the first stays. Options that no rank can hold go too.
    """
    o = problem.options
    fits = (o.device <= problem.device_capacity) & (o.host <= problem.host_capacity)
    kept: list[int] = []
    weights = np.vstack([o.cost, o.total, o.device, o.host])
    first = problem.first
    for t in range(problem.tables):
        group: dict[tuple[int, int], list[int]] = {}
        for k in range(first[t], first[t + 1]):
            if not fits[k]:
                continue
            same = group.setdefault((int(o.where[k]), int(o.count[k])), [])
            mine = weights[:, k]
            if any((weights[:, j] <= mine).all() for j in same):
                continue
            same[:] = [j for j in same if not (mine <= weights[:, j]).all()] + [k]
        kept += sorted(k for same in group.values() for k in same)
    return np.array(kept, dtype=np.int64)
