"""The plan: where every table lives. Immutable, stored as JSON, and able to check itself.

A plan is for one model: it carries a fingerprint of the (name, rows, dim, dtype) of all tables, and
is refused for a model with another one. On one rank there is only one plan, :func:`single`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recast.errors import UsageError

from . import plan_check
from .topology import Topology

VERSION = 2
SHARDING_TYPES = (
    "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "data_parallel",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """One embedding matrix. A dynamic one takes ids of any value and has at most ``rows`` rows; its
    ids are assigned to ranks by hash (``ranks.hashed``), and each rank has room for the rows of its
    shard.
    """

    name: str  # its first path in ``state_dict()``
    rows: int
    dim: int
    dtype: str = "float32"
    dynamic: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of a table, and the rank that owns it. Sizes and offsets are (rows, columns)."""

    rank: int
    offset: tuple[int, int]
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Why:
    """Why a table is placed as it is: what that costs, and what the next best kind would cost."""

    chosen: str
    cost: float  # ms a step, summed over ranks
    runner_up: str | None = None
    runner_up_cost: float | None = None
    reason: str = ""  # pinned, a threshold, the only kind that fits ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one table lives. ``data_parallel``: one whole Shard for every rank."""

    table: str
    sharding_type: str
    shards: tuple[Shard, ...]
    memory: str = "device"  # or "host"
    why: Why | None = None
    state_bytes: float = 0.0  # of the optimizer, for a whole row; a column shard has its part
    stored_row: float | None = None  # bytes of a whole row, if its bits are fewer than the dtype's

    def of(self, rank: int) -> tuple[Shard, ...]:
        """The shards of ``rank``, in the order of their columns; empty if it owns none."""
        own = (s for s in self.shards if s.rank == rank)
        return tuple(sorted(own, key=lambda s: (s.offset[1], s.offset[0])))


@dataclass(frozen=True, slots=True)
class Load:
    """What one rank does in a step (ms) and holds (bytes), according to the cost model."""

    compute: float
    communication: float
    step: float  # with what overlaps
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All placements of a model; immutable."""

    world_size: int
    fingerprint: str  # of (name, rows, dim, dtype) of all tables
    tables: tuple[Table, ...]
    placements: tuple[Placement, ...]
    topology: Topology | None = None
    cost: float | None = None  # ms: the step of the slowest rank
    lower_bound: float | None = None  # ms: no plan with these options is faster
    loads: tuple[Load, ...] = ()  # of each rank
    reserved: int = 0  # device bytes of a rank that tables may not use
    notes: tuple[str, ...] = ()
    version: int = VERSION

    @property
    def gap(self) -> float | None:
        """cost / lower_bound - 1: the most by which this plan can be slower than the best."""
        if self.cost is None or not self.lower_bound:
            return None
        return self.cost / self.lower_bound - 1

    def placement(self, name: str) -> Placement:
        """The placement of the table ``name``. Raises UsageError if it is not in the plan."""
        for p in self.placements:
            if p.table == name:
                return p
        raise UsageError(
            f"no table {name!r} in the plan", why=f"it has {_some([t.name for t in self.tables])}"
        )

    def check(self, tables: Sequence[Table] | None = None) -> None:
        """Check that every row lives once (or everywhere) and every rank has enough memory.

        ``tables``: those of a model, for which the plan must have been made. Raises UsageError if
        it is not.
        """
        plan_check.check(self, tables)

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for table in data["tables"]:
            if not table["dynamic"]:  # said of those that are
                del table["dynamic"]
        for placement in data["placements"]:
            if placement["stored_row"] is None:  # likewise
                del placement["stored_row"]
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read the plan that :meth:`to_json` wrote. Raises UsageError if the text is not a plan."""
        from .plan_json import read  # it makes plans, and so imports this module

        return read(text)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, completely or not at all."""
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(self.to_json() + "\n", encoding="utf-8")
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a JSON file. Raises UsageError if it cannot be read or holds no plan."""
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"plan {path} cannot be read", why=str(error.strerror)) from error
        except UnicodeDecodeError as error:
            raise UsageError(f"plan {path} is not JSON", why=str(error)) from error
        except UsageError as error:
            raise UsageError(
                f"{path}: {error.what}", where=error.where, why=error.why, tries=error.tries
            ) from error

    def __str__(self) -> str:
        total = sum(t.rows * t.dim for t in self.tables)
        tables = f"{len(self.tables)} table{'' if len(self.tables) == 1 else 's'}"
        if self.world_size == 1:
            return f"plan for 1 rank: {tables}, {total:,} parameters, all local"
        kinds = [p.sharding_type for p in self.placements]
        counts = ", ".join(f"{kinds.count(k)} {k}" for k in SHARDING_TYPES if k in kinds)
        text = f"plan for {self.world_size} ranks: {tables}, {total:,} parameters"
        text += f": {counts}" if counts else ""
        if self.cost is not None:
            text += f"; slowest rank {self.cost:.3g} ms a step (modelled)"
        if self.gap is not None:
            text += f", at most {self.gap:.1%} above the best"
        return text


def fingerprint(tables: Sequence[Table]) -> str:
    """SHA-256 of the (name, rows, dim, dtype) of all tables, in order, and which of them are
    dynamic.
    """
    facts = repr(
        [(t.name, t.rows, t.dim, t.dtype, *["dynamic"] * t.dynamic) for t in tables]
    ).encode()
    return "sha256:" + hashlib.sha256(facts).hexdigest()


def single(tables: Sequence[Table]) -> Plan:
    """The plan for one device: every table whole, where it is."""
    whole = (
        Placement(t.name, "data_parallel", (Shard(0, (0, 0), (t.rows, t.dim)),)) for t in tables
    )
    return Plan(1, fingerprint(tables), tuple(tables), tuple(whole))


def explicit(
    tables: Sequence[Table],
    world_size: int,
    sharding: str | Mapping[str, str] = "table_wise",
    *,
    hosts: int = 1,
) -> Plan:
    """A plan without a cost model: even shards, tables dealt out in order.

    Args:
        sharding: a sharding type for all tables but dynamic ones, which are row_wise, or one for
            each by name; others are table_wise.
        hosts: of ``world_size / hosts`` ranks each, which ``table_row_wise`` and
            ``table_column_wise`` keep a table on.

    Raises:
        UsageError: an unknown table or sharding type.
    """
    whole = sharding if isinstance(sharding, str) else "table_wise"
    kinds = {t.name: "row_wise" if t.dynamic else whole for t in tables}
    given = dict(kinds) if isinstance(sharding, str) else dict(sharding)
    for name, kind in given.items():
        if name not in kinds:
            raise UsageError(f"no table {name!r}", why=f"there are {_some(list(kinds))}")
        if kind not in SHARDING_TYPES:
            raise UsageError(
                f"{name}: there is no sharding type {kind!r}",
                why=f"there are {', '.join(SHARDING_TYPES)}",
            )
    if world_size < 1 or hosts < 1 or world_size % hosts:
        raise UsageError(
            f"{world_size} ranks on {hosts} hosts", why="hosts have equally many ranks"
        )
    kinds |= given
    each, dealt, placed = world_size // hosts, 0, []
    for t in tables:
        kind = kinds[t.name]
        local = kind.startswith("table_") and kind != "table_wise"
        first = dealt % hosts * each if local else dealt % world_size
        ranks = range(first, first + each) if local else range(world_size)
        dealt += kind.startswith("table_")
        placed.append(
            Placement(t.name, kind, shards(t, kind, [first] if kind == "table_wise" else ranks))
        )
    return Plan(world_size, fingerprint(tables), tuple(tables), tuple(placed))


def shards(table: Table, sharding_type: str, ranks: Sequence[int]) -> tuple[Shard, ...]:
    """``table`` split over ``ranks`` as evenly as whole rows or columns allow, without empty
    shards.
    """
    rows, dim = table.rows, table.dim
    if sharding_type in ("table_wise", "data_parallel"):
        return tuple(Shard(r, (0, 0), (rows, dim)) for r in ranks)
    if sharding_type in ("row_wise", "table_row_wise"):
        return tuple(Shard(r, (at, 0), (n, dim)) for r, at, n in _cut(rows, ranks))
    return tuple(Shard(r, (0, at), (rows, n)) for r, at, n in _cut(dim, ranks))


def _cut(size: int, ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """``(rank, offset, length)``: ``size`` in parts as equal as possible, the longer ones first."""
    least, more = divmod(size, len(ranks))
    cut, at = [], 0
    for k, rank in enumerate(ranks):
        n = least + (k < more)
        if n or (size == 0 and k == 0):
            cut.append((rank, at, n))
        at += n
    return cut


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
