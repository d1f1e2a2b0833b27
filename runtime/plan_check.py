"""Checks a plan: every row lives exactly once (or everywhere), every rank has enough memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from recast.errors import UsageError

if TYPE_CHECKING:
    from .plan import Placement, Plan, Shard, Table

GIB = 2**30
AGAIN = "make the plan again for this model"


def check(plan: Plan, tables: Sequence[Table] | None = None) -> None:
    """Raise UsageError if ``plan`` is not valid.

    That is: it is for other ``tables``, leaves out or repeats a row, names an unknown rank, cuts a
    table in a way that its kind does not, or puts more on a rank or host than fits.
    """
    if tables is not None:
        _same_model(plan, tables)
    if plan.world_size < 1:
        raise UsageError(f"a plan for {plan.world_size} ranks")
    if plan.topology is not None and plan.topology.ranks != plan.world_size:
        raise UsageError(
            f"a plan for {plan.world_size} ranks on a topology of {plan.topology.ranks}",
            tries=(AGAIN,),
        )
    known = {t.name: t for t in plan.tables}
    if len(known) < len(plan.tables):
        names = [t.name for t in plan.tables]
        double = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"two tables are named {double!r} in the plan", tries=(AGAIN,))
    placed = [p.table for p in plan.placements]
    twice = (
        sorted({name for name in placed if placed.count(name) > 1})
        if (len(set(placed)) < len(placed))
        else []
    )
    named = set(placed)
    missing = [name for name in known if name not in named]
    unknown = [name for name in placed if name not in known]
    for wrong, what in ((twice, "placed twice"), (missing, "not placed"), (unknown, "unknown")):
        if wrong:
            raise UsageError(f"table {wrong[0]!r} is {what} in the plan", tries=(AGAIN,))
    for p in plan.placements:
        _covers(p, known[p.table], plan)
    _fits(plan, known)


def _same_model(plan: Plan, tables: Sequence[Table]) -> None:
    from .plan import fingerprint

    if plan.fingerprint == fingerprint(tables) and plan.tables == tuple(tables):
        return
    theirs, ours = {t.name: t for t in plan.tables}, {t.name: t for t in tables}
    for name in ours:
        if name not in theirs:
            why = f"the model has a table {name!r} that the plan does not know"
            break
        if ours[name] != theirs[name]:
            why = f"{name} is {_facts(ours[name])} in the model, {_facts(theirs[name])} in the plan"
            break
    else:
        extra = [name for name in theirs if name not in ours]
        why = (
            f"the plan has a table {extra[0]!r} that the model does not"
            if extra
            else ("its fingerprint differs, or the order of the tables")
        )
    raise UsageError("the plan is for another model", why=why, tries=(AGAIN,))


def _facts(t: Table) -> str:
    return f"{t.rows:,} x {t.dim} {t.dtype}{', dynamic' if t.dynamic else ''}"


def _covers(p: Placement, table: Table, plan: Plan) -> None:
    """Every element of ``table`` is there once; of a data-parallel table, once on every rank."""
    for s in p.shards:
        if not 0 <= s.rank < plan.world_size:
            raise UsageError(f"{p.table}: rank {s.rank} of a plan for {plan.world_size} ranks")
        ends = [at + n for at, n in zip(s.offset, s.size, strict=True)]
        if min(*s.offset, *s.size) < 0 or ends[0] > table.rows or ends[1] > table.dim:
            raise UsageError(
                f"{p.table}: shard {list(s.offset)} + {list(s.size)} of rank {s.rank} is outside"
                f" the table of {table.rows} x {table.dim}"
            )
    if table.dynamic and plan.world_size > 1:
        _by_hash(p, plan)
    if p.sharding_type == "data_parallel":
        whole = [
            s.rank for s in p.shards if s.offset == (0, 0) and s.size == (table.rows, table.dim)
        ]
        if sorted(whole) != list(range(plan.world_size)) or len(whole) != len(p.shards):
            raise UsageError(
                f"{p.table}: data_parallel, but not whole, once, on every rank",
                why=f"{len(whole)} whole copies of {len(p.shards)} shards, {plan.world_size} ranks",
            )
        return
    filled = [s for s in p.shards if s.size[0] and s.size[1]]
    strips: dict[tuple[int, int], list[Shard]] = defaultdict(list)  # by their range of rows
    for s in filled:
        strips[s.offset[0], s.size[0]].append(s)
    if table.rows and table.dim:
        _tiles([(at, n) for at, n in strips], table.rows, f"{p.table}: row")
    for (at, n), strip in strips.items():
        where = f"{p.table}: rows {at} to {at + n}, column"
        _tiles([(s.offset[1], s.size[1]) for s in strip], table.dim, where)
    _shape(p, filled, plan)


def _by_hash(p: Placement, plan: Plan) -> None:
    """Every rank has room for rows of a dynamic table, in the order of the ranks."""
    ranks = [s.rank for s in sorted(p.shards, key=lambda s: s.offset) if s.size[0]]
    if p.sharding_type != "row_wise" or ranks != list(range(plan.world_size)):
        raise UsageError(
            f"{p.table}: dynamic, but not row_wise over all {plan.world_size} ranks in order",
            why="every rank owns the ids of a hash, and has room for some rows at least",
            tries=(f"a budget of at least {plan.world_size} rows",),
        )


def _tiles(parts: list[tuple[int, int]], size: int, where: str) -> None:
    """The ``(offset, length)`` of ``parts`` make up ``range(size)``, each index once."""
    at = 0
    for start, length in sorted(parts):
        if start != at:
            lives = "lives nowhere" if start > at else "lives twice"
            raise UsageError(
                f"{where} {min(start, at)} {lives}", why="every row lives exactly once"
            )
        at = start + length
    if at != size:
        raise UsageError(f"{where} {at} lives nowhere", why="every row lives exactly once")


def _shape(p: Placement, filled: list[Shard], plan: Plan) -> None:
    """The shards are cut as the sharding type says; a rank has one range of rows."""
    ranges: dict[int, tuple[int, int]] = {}
    for s in filled:
        rows = s.offset[0], s.size[0]
        if ranges.setdefault(s.rank, rows) != rows:
            raise UsageError(
                f"{p.table}: rank {s.rank} has two ranges of rows",
                why="the local part of a table is one matrix: one range of rows, whole columns",
            )
    rows_cut = len(set(ranges.values())) > 1
    columns_cut = len({s.offset[1] for s in filled}) > 1
    kind = p.sharding_type
    if (rows_cut and "row" not in kind) or (columns_cut and "column" not in kind):
        cut = "rows" if rows_cut else "columns"
        raise UsageError(f"{p.table}: {kind}, but its {cut} are cut")
    if kind.startswith("table_") and kind != "table_wise" and plan.topology is not None:
        hosts = {plan.topology.host(s.rank) for s in filled}
        if len(hosts) > 1:
            raise UsageError(
                f"{p.table}: {kind}, but on {len(hosts)} hosts", why="it is of one host"
            )


def _fits(plan: Plan, known: dict[str, Table]) -> None:
    """Weights, optimizer state and the reserve fit on each rank and host."""
    if plan.topology is None:
        return
    device = [plan.reserved] * plan.world_size
    host = [0] * plan.topology.hosts
    for p in plan.placements:
        table = known[p.table]
        weight = float(getattr(torch, table.dtype).itemsize)
        if p.stored_row is not None:
            weight = p.stored_row / max(table.dim, 1)
        for s in p.shards:
            size = int(s.size[0] * s.size[1] * weight)
            size += int(s.size[0] * p.state_bytes * s.size[1] / max(table.dim, 1))
            if p.memory == "host":
                host[plan.topology.host(s.rank)] += size
            else:
                device[s.rank] += size
    for held, most, what in (
        (device, plan.topology.device_memory, "rank"), (host, plan.topology.host_memory, "host"),
    ):  # fmt: skip
        fullest = max(range(len(held)), key=held.__getitem__)
        if held[fullest] > most:
            raise UsageError(
                f"{what} {fullest} is too full: {held[fullest] / GIB:.2f} GiB of {most / GIB:.2f}",
                why="tables, their optimizer state and what is reserved must fit",
                tries=("move tables to other ranks", "memory: host", "more ranks"),
            )
