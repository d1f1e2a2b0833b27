"""TableLoad -> options: every cut of a table that its use, the thresholds and the pins allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from recast.errors import UsageError

from ..plan import SHARDING_TYPES, Placement
from .cost import Setting, Work, replica, shard
from .load import TableLoad
from .problem import Options, Where

NARROW = 4  # columns: no option has narrower shards


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Table sizes in elements; None: the cost alone decides.

    Tables of up to ``data_parallel`` elements are data parallel, and no others; those of at least
    ``row_slice`` are cut by rows; those of more than ``column_slice`` are cut into column shards of
    at most that size.
    """

    data_parallel: int | None = None
    row_slice: int | None = None
    column_slice: int | None = None

    def __post_init__(self) -> None:
        for name in ("data_parallel", "row_slice", "column_slice"):
            value = getattr(self, name)
            least = 1 if name == "column_slice" else 0  # shards of at most 0 elements hold nothing
            if value is not None and (type(value) is not int or value < least):
                raise UsageError(
                    f"{name}_threshold={value!r} is not a number of elements",
                    why="a table of rows x columns has as many, and it is compared with them",
                    tries=(f"{name}_threshold=1_000_000",),
                )


@dataclass(frozen=True, slots=True)
class Option:
    """One way to hold one table: ``count`` shards, the largest of which costs ``work``."""

    table: int
    kind: str
    memory: str
    where: Where
    count: int
    work: Work
    least: Work  # of the smallest shard
    more: int  # how many shards are as large as the largest

    @property
    def name(self) -> str:
        cut = f" x{self.count}" if "column" in self.kind else ""
        return self.kind + cut + (" in host memory" if self.memory == "host" else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """The sharding types that are open to a table, and why others are not."""

    kinds: tuple[str, ...]
    cuts: int = 2  # column shards, at least
    reason: str = ""


def choice(load: TableLoad, setting: Setting, limits: Thresholds, pin: str | None = None) -> Choice:
    """The sharding types open to a table. Raises UsageError for a pin that its use rules out."""
    t = load.table
    if pin is not None:
        if pin not in SHARDING_TYPES:
            raise UsageError(
                f"{t.name}: there is no sharding type {pin!r}",
                why=f"there are {', '.join(SHARDING_TYPES)}",
                tries=get_close_matches(str(pin), SHARDING_TYPES, n=2) or ("leave the pin out",),
            )
        if pin not in load.types:
            raise UsageError(
                f"{t.name}: pinned to {pin}, which it cannot be",
                why=load.only
                or f"its pooling ({load.pooling}) or its optimizer leaves {', '.join(load.types)}",
                tries=load.types,
            )
        return Choice((pin,), reason="pinned")
    if setting.topology.ranks == 1:
        return Choice(("data_parallel",), reason="one rank")
    size = t.rows * t.dim
    small = limits.data_parallel is not None and size <= limits.data_parallel
    if small and "data_parallel" in load.types:
        return Choice(("data_parallel",), reason=load.only or "data_parallel_threshold")
    open_ = tuple(
        k for k in load.types if not (k == "data_parallel" and limits.data_parallel is not None)
    )
    if limits.row_slice is not None and size >= limits.row_slice:
        rows = tuple(k for k in open_ if "row_wise" in k)
        if rows:
            return Choice(rows, reason="row_slice_threshold")
    if limits.column_slice is not None and size > limits.column_slice:
        columns = tuple(k for k in open_ if "column_wise" in k)
        if columns:
            cuts = 1 << (-(-size // limits.column_slice) - 1).bit_length()
            return Choice(columns, cuts, "column_slice_threshold")
    if not open_:
        raise UsageError(
            f"{t.name}: can only be data_parallel, and data_parallel_threshold rules that out",
            why=load.only or f"its types are {', '.join(load.types)}",
            tries=(f"data_parallel_threshold={size} or more",),
        )
    return Choice(open_, reason=load.only)


def options_of(
    table: int, load: TableLoad, setting: Setting, allowed: Choice, spill: bool
) -> Iterator[Option]:
    """All options for one table; with ``spill`` also those in host memory."""
    t, top = load.table, setting.topology
    pinned = allowed.reason == "pinned"
    for kind in allowed.kinds:
        if kind == "data_parallel":
            work = replica(load, setting)
            yield Option(table, kind, "device", Where.ALL, top.ranks, work, work, top.ranks)
            continue
        if kind.startswith("table_") and kind != "table_wise" and top.hosts == 1 and not pinned:
            continue  # on one host they are the same as row_wise and column_wise
        for where, count in _cuts(kind, load, setting, allowed):
            rows, columns = _least_cut(t.rows, t.dim, kind, count)
            more = (t.dim if "column" in kind else t.rows) % count if count > 1 else 0
            for memory in ("device", "host") if spill else ("device",):
                small = shard(load, setting, rows, columns, memory)
                large = small
                if more:
                    taller, wider = ("row" in kind), ("column" in kind)
                    large = shard(load, setting, rows + taller, columns + wider, memory)
                yield Option(table, kind, memory, where, count, large, small, more or count)


def _least_cut(rows: int, dim: int, kind: str, count: int) -> tuple[int, int]:
    if "column_wise" in kind:
        return rows, dim // count
    if kind in ("row_wise", "table_row_wise"):
        return rows // count, dim
    return rows, dim


def _cuts(
    kind: str, load: TableLoad, setting: Setting, allowed: Choice
) -> Iterator[tuple[Where, int]]:
    """Where the shards may be, and how many there are."""
    top, t = setting.topology, load.table
    pinned = allowed.reason == "pinned"
    if kind == "table_wise":
        yield Where.ANY, 1
    elif kind == "row_wise" and (pinned or t.rows >= top.ranks):
        yield Where.ALL, top.ranks
    elif kind == "table_row_wise" and (pinned or t.rows >= top.ranks_per_host):
        yield Where.HOST, top.ranks_per_host
    elif "column_wise" in kind:
        where = Where.ANY if kind == "column_wise" else Where.WITHIN
        most = min(top.ranks if where == Where.ANY else top.ranks_per_host, t.dim)
        count = min(allowed.cuts, most)
        found = False
        while count <= most and (t.dim // count >= NARROW or not found):
            found = True
            yield where, count
            count *= 2


def pack(options: Sequence[Option], hidden: bool) -> Options:
    """``options`` as the search sees them. The terms are compute, and compute + communication; or
    the latter alone, if nothing is ``hidden``.
    """

    def column(pick: str, of: str) -> np.ndarray:
        return np.array([getattr(getattr(o, of), pick) for o in options])

    def terms(compute: np.ndarray, communication: np.ndarray) -> np.ndarray:
        both = compute + communication
        return np.stack([compute, both] if hidden else [both])

    count = np.array([o.count for o in options])
    more = np.array([o.more for o in options])

    def total(pick: str) -> np.ndarray:
        return more * column(pick, "work") + (count - more) * column(pick, "least")

    return Options(
        table=np.array([o.table for o in options]),
        where=np.array([int(o.where) for o in options]),
        count=count,
        cost=terms(column("compute", "work"), column("communication", "work")),
        device=column("device", "work"),
        host=column("host", "work"),
        total=terms(total("compute"), total("communication")),
        total_device=total("device"),
        total_host=total("host"),
    )


def fixed(
    placements: Mapping[int, Placement], loads: Sequence[TableLoad], setting: Setting
) -> Iterator[tuple[int, Work]]:
    """``(rank, work)`` of every shard that the caller has placed."""
    for k, placement in placements.items():
        load = loads[k]
        for s in placement.shards:
            if placement.sharding_type == "data_parallel":
                yield s.rank, replica(load, setting)
            else:
                yield s.rank, shard(load, setting, *s.size, placement.memory)
