"""The route of the lookups of one call: which ranks own which part of which table.

Immutable, the same on every rank, made once from the plan. The ids of a lookup go to every owner of
its table: all of them to an owner of all rows, else only those of its own rows, counted from its
first row. Ids of a dynamic table have no rows yet: they go unchanged to the owner of their hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.plan import Placement, Table

_SMALL = 2**31 - 1  # ids of tables with at most so many rows travel as int32


@dataclass(frozen=True, slots=True)
class Owner:
    """The part of one table that one rank holds: some rows, some columns."""

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

    ``tables, placements``: for each table of the call; ``table, mode``: for each lookup, as in
    ``embedding_bags``; ``wire``: the formats of rows, forward and backward; ``repeating``: tables
    whose ids repeat so much in a batch that each is sent once (see ``ranks.exchange_buckets``).
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
    def __name__(self) -> str:  # shown in dumps for a constant
        return str(self)

    def owners(self, t: int) -> tuple[Owner, ...]:
        """The owners of table ``t``, by rank."""
        return self._owners[t]

    def ranges(self, t: int) -> tuple[tuple[int, int], ...]:
        """The row ranges that table ``t`` is cut into, in order."""
        return self._ranges[t]

    def owned(self, rank: int) -> tuple[int, ...]:
        """The lookups in tables that ``rank`` holds a part of."""
        return self._owned[rank]

    def own(self, rank: int, k: int) -> Owner:
        """The part that ``rank``, one of its owners, holds of the table of lookup ``k``."""
        return self._own[rank, k][0]

    def range_of(self, rank: int, k: int) -> int:
        """The index of the row range of ``rank`` in the table of lookup ``k``."""
        return self._own[rank, k][1]

    def repeats(self, k: int) -> bool:
        """Whether an id of lookup ``k`` is sent only once per batch."""
        return self.tables[self.table[k]].name in self.repeating

    def hashed(self, k: int) -> bool:
        """Whether lookup ``k`` is in a dynamic table."""
        return self.tables[self.table[k]].dynamic

    @cached_property
    def some_hashed(self) -> bool:
        """Whether any lookup is in a dynamic table."""
        return any(t.dynamic for t in self.tables)

    def id_dtype(self, k: int) -> torch.dtype:
        """The dtype in which the ids of lookup ``k`` travel."""
        small = self.tables[self.table[k]].rows <= _SMALL and not self.hashed(k)
        return torch.int32 if small else torch.int64

    def meta(self, t: int) -> Tensor:
        """Table ``t`` as the model has it, without memory: (rows, dim) on meta."""
        table = self.tables[t]
        dtype = getattr(torch, table.dtype)
        return torch.empty(table.rows, table.dim, dtype=dtype, device="meta")

    @cached_property
    def local_modes(self) -> tuple[str, ...]:
        """How owners pool each lookup: a mean whose rows have several owners as sums."""
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
