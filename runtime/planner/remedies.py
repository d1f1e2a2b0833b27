"""No plan fits: what is missing, and what would help, in figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from recast.errors import PlanError

from ..topology import GIB
from .cost import Setting, replica, shard
from .load import TableLoad


def infeasible(loads: Sequence[TableLoad], setting: Setting, reserve: int) -> PlanError:
    """The error for tables that do not fit, with numbered remedies."""
    t = setting.topology
    tables = sum(load.bytes for load in loads)
    need = sum(_least_memory(load, setting) for load in loads)
    room = max(t.device_memory - reserve, 0)
    why = (
        f"tables and optimizer state take {_bytes(tables)}, with buffers {_bytes(need)};"
        f" {ranks_of(t.ranks)} of {_bytes(t.device_memory)} {'leaves' if t.ranks == 1 else 'leave'}"
        f" {_bytes(room * t.ranks)} for them"
    )
    if t.host_memory:
        why += f", and the memory of a host is {_bytes(t.host_memory)} (of {t.hosts})"
    if tables <= room * t.ranks:
        why += "; whole shards leave gaps that the rest does not fit into"
    tries: list[str] = []
    ranks = _ranks(loads, setting, room)
    if ranks is not None and ranks > t.ranks:
        tries.append(f"{ranks} ranks of {_bytes(t.device_memory)}")
    tries.append(f"{ranks_of(t.ranks)} of {_bytes(enough(loads, setting, reserve))}")
    short = need - room * t.ranks
    if short * 1.03 > t.host_memory * t.hosts:
        tries.append(f"hosts of {_bytes(short * 1.03 / t.hosts)} or more, for what is left over")
    state = sum(load.table.rows * load.state_bytes for load in loads)
    if state > tables / 4:
        tries.append(f"an optimizer with one number a row: {_bytes(state)} of state less")
    largest = max(loads, key=lambda load: load.bytes)
    if largest.bytes > room and not any("_wise" in k and k != "table_wise" for k in largest.types):
        tries.append(f"let {largest.table.name} ({_bytes(largest.bytes)}) be cut")
    numbered = [f"{k}. {text}" for k, text in enumerate(tries, 1)]
    return PlanError(
        f"no plan fits: {len(loads)} table{'s' * (len(loads) != 1)} on {t.name}"
        f" ({ranks_of(t.ranks)})",
        why=why,
        tries=numbered,
    )


def enough(loads: Sequence[TableLoad], setting: Setting, reserve: int) -> float:
    """The device memory per rank that would hold the tables, gaps aside."""
    need = sum(_least_memory(load, setting) for load in loads)
    return need / setting.topology.ranks * 1.03 + reserve


def _least_memory(load: TableLoad, setting: Setting) -> float:
    """The least memory that a table takes on all ranks together: one copy, with buffers."""
    if set(load.types) == {"data_parallel"}:
        return replica(load, setting).device * setting.topology.ranks
    return shard(load, setting, load.table.rows, load.table.dim, "device").device


def _ranks(loads: Sequence[TableLoad], setting: Setting, room: int) -> int | None:
    """The least number of ranks whose memory holds the tables, at the same global batch."""
    t = setting.topology
    for hosts in range(1, 4097):
        ranks = hosts * t.ranks_per_host
        if ranks <= t.ranks:
            continue
        each = max(1, math.ceil(setting.samples / ranks))
        more = Setting(
            replace(t, ranks=ranks, hosts=hosts), each, setting.forward, setting.backward
        )
        if sum(_least_memory(load, more) for load in loads) * 1.03 <= room * ranks:
            return ranks
    return None


def ranks_of(number: int) -> str:
    """``1 rank``, ``8 ranks``."""
    return f"{number} rank" + ("" if number == 1 else "s")


def _bytes(size: float) -> str:
    if size < GIB / 10:  # 0.0 GiB would not tell what is missing
        return f"{size / 2**20:.1f} MiB" if size >= 2**20 / 10 else f"{math.ceil(size)} B"
    return f"{size / GIB:.1f} GiB" if size < 1000 * GIB else f"{size / GIB / 1024:.2f} TiB"
