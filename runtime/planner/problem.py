"""The planner's problem in the abstract: options that cost time and memory on some ranks.

Choose one option for each table, and ranks for its shards, so that the slowest rank is as fast as
possible and no memory overflows. Only the cost model, ours or any other, knows how an option cuts
its table and what its costs mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Where(IntEnum):
    """The ranks on which the shards of an option may be."""

    ANY = 0  # ``count`` different ranks
    ALL = 1  # one shard on every rank
    HOST = 2  # one on every rank of one host
    WITHIN = 3  # ``count`` different ranks of one host


@dataclass(frozen=True, slots=True)
class Options:
    """O options, those of one table next to each other; all shards of an option count the same.

    ``cost`` (K, O) is what a shard adds to the K terms of its rank, ``device`` and ``host`` (O,)
    what it adds to its memory; if shards differ, these are for the largest. ``total`` (K, O),
    ``total_device`` and ``total_host`` (O,) are the exact sums over shards, for the lower bound.
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
        """The options with the indices ``kept``, in that order."""
        return Options(
            self.table[kept], self.where[kept], self.count[kept], self.cost[:, kept],
            self.device[kept], self.host[kept], self.total[:, kept], self.total_device[kept],
            self.total_host[kept],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """``score(rank) = max over k of (start[k, rank] + sum of cost[k] of its shards)``.

    ``ranks_per_host`` and ``ranks_per_pool``: how many adjacent ranks form a host, and share one
    host memory of ``host_capacity``. ``start``, ``start_device`` and ``start_host`` are the loads
    that are there whatever is chosen.
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
    """For each table t, the index ``option[t]`` of its option, with its shards on ``ranks[t]``."""

    option: Ints
    ranks: tuple[Ints, ...]
    score: float  # of the slowest rank
    scores: Floats  # of each rank
    proven: bool = False  # whether no other has a lower score


def undominated(problem: Problem) -> Ints:
    """The indices of options that no other of the same table and spread beats or equals in
    everything; of equal ones, the first. Options that fit on no rank are left out too.
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
