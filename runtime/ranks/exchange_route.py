"""The way of the lookups of one call: which ranks own what of which table.

Frozen, the same on every rank, made once from the plan. Ids of a lookup go to every owner of its
table: all of them to an owner of all rows, else those of its rows, counted from its first one. Ids
of a dynamic table have no rows yet: they go as they are to the owner of their hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.plan import Placement, Table

_SMALL = 2**31 - 1  # ids of smaller tables travel as int32, whatever they came as


@dataclass(frozen=True, slots=True)
class Owner:
    """What one rank holds of one table: some rows, of some columns."""

    rank: int
    rows: tuple[int, int]  # the first one, and the one after the last
    columns: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """How many columns."""
        return sum(b - a for a, b in self.columns)


@dataclass(frozen=True)
class Route:
    """Where the lookups of one call go.

    ``tables, placements``: of each table of the call; ``table, mode``: of each lookup, as in
    ``embedding_bags``; ``wire``: what rows are sent as, forward and backward; ``repeating``: tables
    of whose ids a batch has so few that each is sent once (see ``runtime.exchange_buckets``).
    """

    world_size: int
    tables: tuple[Table, ...]
    placements: tuple[Placement, ...]
    table: tuple[int, ...]
    mode: tuple[str, ...]
    include_last_offset: tuple[bool, ...]
    wire: tuple[str, str] = ("fp32", "fp32")
    repeating: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for k, mode in enumerate(self.mode):
            name = self.tables[self.table[k]].name
            if mode == "max" and len(self.ranges(self.table[k])) > 1:
                raise UsageError(
                    f"{name}: a table that is pooled by max cannot be cut by rows",
                    why="the largest of sums of parts is not the sum of the largest",
                    tries=(f"sharding={{{name!r}: 'table_wise'}}", f"{name!r}: 'column_wise'"),
                )

    def __str__(self) -> str:
        kinds = [p.sharding_type for p in self.placements]
        return ", ".join(f"{kinds.count(k)}×{k}" for k in dict.fromkeys(kinds))

    @property
    def __name__(self) -> str:  # what a dump writes for a constant
        return str(self)

    def owners(self, t: int) -> tuple[Owner, ...]:
        """Of table ``t``, by rank."""
        return self._owners[t]

    def ranges(self, t: int) -> tuple[tuple[int, int], ...]:
        """The row ranges that table ``t`` is cut into, in order."""
        return self._ranges[t]

    def owned(self, rank: int) -> tuple[int, ...]:
        """The lookups whose table ``rank`` holds a part of."""
        return self._owned[rank]

    def own(self, rank: int, k: int) -> Owner:
        """What ``rank`` holds of the table of lookup ``k``, of which it holds a part."""
        return self._own[rank, k][0]

    def range_of(self, rank: int, k: int) -> int:
        """Which of the row ranges of the table of lookup ``k`` is that of ``rank``."""
        return self._own[rank, k][1]

    def repeats(self, k: int) -> bool:
        """Whether an id of lookup ``k`` is sent once, however often a batch has it."""
        return self.tables[self.table[k]].name in self.repeating

    def hashed(self, k: int) -> bool:
        """Whether lookup ``k`` is of a dynamic table."""
        return self.tables[self.table[k]].dynamic

    @cached_property
    def some_hashed(self) -> bool:
        """Whether any lookup is of a dynamic table."""
        return any(t.dynamic for t in self.tables)

    def id_dtype(self, k: int) -> torch.dtype:
        """What the ids of lookup ``k`` travel as."""
        small = self.tables[self.table[k]].rows <= _SMALL and not self.hashed(k)
        return torch.int32 if small else torch.int64

    def meta(self, t: int) -> Tensor:
        """Table ``t`` as the model has it, without memory: (rows, dim) on meta."""
        table = self.tables[t]
        dtype = getattr(torch, table.dtype)
        return torch.empty(table.rows, table.dim, dtype=dtype, device="meta")

    @cached_property
    def local_modes(self) -> tuple[str, ...]:
        """How owners pool each lookup: of a mean over rows of several, each gives a sum."""
        return tuple(
            "sum" if mode == "mean" and len(self.ranges(t)) > 1 else mode
            for mode, t in zip(self.mode, self.table, strict=True)
        )

    @cached_property
    def metas(self) -> list[Tensor]:
        """All tables, as :meth:`meta` has them."""
        return [self.meta(t) for t in range(len(self.tables))]

    @cached_property
    def _owners(self) -> tuple[tuple[Owner, ...], ...]:
        found = []
        for placement in self.placements:
            own = []
            for rank in range(self.world_size):
                shards = placement.of(rank)
                if shards:
                    first = shards[0].offset[0]
                    columns = tuple((s.offset[1], s.offset[1] + s.size[1]) for s in shards)
                    own.append(Owner(rank, (first, first + shards[0].size[0]), columns))
            found.append(tuple(own))
        return tuple(found)

    @cached_property
    def _ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(tuple(sorted({o.rows for o in owners})) for owners in self._owners)

    @cached_property
    def _own(self) -> dict[tuple[int, int], tuple[Owner, int]]:
        return {
            (owner.rank, k): (owner, self._ranges[t].index(owner.rows))
            for k, t in enumerate(self.table)
            for owner in self._owners[t]
        }

    @cached_property
    def _owned(self) -> tuple[tuple[int, ...], ...]:
        holders = [{o.rank for o in owners} for owners in self._owners]
        return tuple(
            tuple(k for k, t in enumerate(self.table) if rank in holders[t])
            for rank in range(self.world_size)
        )
