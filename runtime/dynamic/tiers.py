"""Adds a disk tier to a dynamic table: how many rows fit where, and what a row's record holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recast.errors import UsageError
from recast.runtime.dynamic.settings import Dynamic
from recast.runtime.dynamic.table import DynamicTable
from recast.runtime.rows import rules as row_rules
from recast.runtime.tiers import engine, folder, records
from recast.runtime.tiers import settings as tier_settings
from recast.runtime.tiers.engine import buffer_bytes, memory_of
from recast.runtime.tiers.records import Layout
from recast.runtime.tiers.settings import Tiers, share
from recast.runtime.tiers.store import Store, rows_in
from recast.runtime.tiers.tier import Slabs, Tier

_MEMORY_BESIDE = 28  # bytes per row: the eviction order while it is computed, and a flag


def rows_of_host(
    name: str, how: Dynamic, weight: Tensor, optimizer: Optimizer | None, *, lazy: bool,
    other_bytes: int, parts: int = 1,
) -> int:  # fmt: skip
    """How many rows fit into host memory, for all ``parts`` together.

    ``other_bytes``: those of a row that are not in its record.

    Raises:
        UsageError: a budget has no room for one row, or the folder belongs to somebody else.
        TierError: it cannot be written to.
        NotBuiltError: RocksDB is not installed.
    """
    tiers = _tiers(name, how).of_part(0, parts)
    engine.library()
    if parts == 1:  # with several ranks, one might fail here while the others wait: `take_part`
        folder.check(tiers.path / name)
    size = _layout(optimizer, weight, lazy).size
    below = rows_in(tiers.disk, size)
    if below < 1:
        raise UsageError(
            f"tables: {name}: a disk tier of {tiers.disk} bytes{share(parts)} is less than one"
            " record",
            why=f"a row takes {size} bytes with its optimizer state",
        )
    row = size - records.HEADER + other_bytes + _MEMORY_BESIDE
    engine_bytes = memory_of(buffer_bytes(tiers.host, tiers.disk), below)
    rows = (tiers.host - engine_bytes) // row
    if rows < 1:
        raise UsageError(
            f"tables: {name}: recast.Host({tiers.host}){share(parts)} leaves no room for a row",
            why=f"a row takes {row} bytes, and a disk tier of {tiers.disk} bytes needs"
            f" {engine_bytes} of memory itself",
            tries=("a larger budget of memory", "a smaller one of disk"),
        )
    return rows * parts


def attach(
    table: DynamicTable, weight: Tensor, optimizer: Optimizer | None, *, lazy: bool, parts: int = 1
) -> None:
    """Give ``table`` its tier. The folder is claimed now if there is an optimizer and the table is
    whole, else when it is first needed.
    """
    kind = _layout(optimizer, weight, lazy)
    table.tier = _tier(table, kind, RecordSlabs(optimizer, kind))
    if optimizer is not None and parts == 1:
        _ = table.tier.store


def take_part(table: DynamicTable) -> None:
    """Give a table that has become one rank's part its share of the budgets, in its own folder,
    which is claimed now.
    """
    whole = table.tier
    if whole is None:
        return
    detach(table)
    table.tier = _tier(table, whole.kind, whole.slabs)
    _ = table.tier.store


def _tier(table: DynamicTable, kind: Layout, slabs: Slabs) -> Tier:
    how = table.settings
    tiers = _tiers(table.name, how).of_part(table.part, table.parts)
    make = partial(
        Store, tiers.path / table.name, table.name, kind.size, tiers.disk,
        buffer_bytes(tiers.host, tiers.disk),
    )  # fmt: skip
    return Tier(
        table.name, table.index, table.capacity, kind, slabs, rows_in(tiers.disk, kind.size),
        how.policy, how.ttl or 0, how.admit is not None, make,
    )  # fmt: skip


def detach(table: DynamicTable) -> None:
    if table.tier is not None:
        table.tier.close()
        table.tier = None


def check_states(table: DynamicTable, states: tuple[str, ...], optimizer: Optimizer) -> None:
    """Raise UsageError if rows have states that records have no room for, or whose place there is
    that of another optimizer.
    """
    if table.tier is None:
        return
    kind, slabs = table.tier.kind, table.tier.slabs
    if any(kind.of(name) is None for name in states):
        raise UsageError(
            f"{table.name}: on disk there is no place for {', '.join(states)} of the optimizer",
            why="a record holds weights and state of a row, for the optimizer that optimize() had",
            tries=("recast.optimize(model, optimizer, tables=...)",),
        )
    if isinstance(slabs, RecordSlabs) and slabs.optimizer is not optimizer:
        raise UsageError(
            f"{table.name}: stepped by another {type(optimizer).__name__} than optimize() had",
            why="a record on disk holds the state of a row in that one, which would stay where the"
            " state of this one belongs",
            tries=("the same optimizer, with other settings in its param_groups",
                   "recast.checkpoint.save, and load into recast.optimize(model, optimizer, ...)"),
        )  # fmt: skip


def _tiers(name: str, how: Dynamic) -> Tiers:
    tiers = tier_settings.check(name, how.tiers)
    assert tiers is not None
    if tiers.device:
        raise UsageError(
            f"tables: {name} has a tier on a device, and its module is not on a GPU that runs our"
            " kernels",
            tries=("model.cuda()", "leave recast.Device out", "recast env says what is missing"),
        )
    return tiers


def _layout(optimizer: Optimizer | None, weight: Tensor, lazy: bool) -> Layout:
    one = torch.zeros(1, weight.shape[1], dtype=weight.dtype)
    rows = {"weight": one}
    rule = None if optimizer is None else row_rules.rule_of(optimizer, lazy)
    group: Any = None
    if optimizer is not None:
        groups = optimizer.param_groups
        group = next((g for g in groups if any(p is weight for p in g["params"])), None)
    if optimizer is not None and rule is not None and group is not None:
        start = rule.start(optimizer, group, one)
        rows |= {name: start[name] for name in rule.states}
    return records.layout(rows)


@dataclass(frozen=True)
class RecordSlabs:
    """The tensors whose rows make up a record, by field name: a table and its state."""

    optimizer: Optimizer | None
    kind: Layout

    def __call__(self, weight: Tensor) -> dict[str, Tensor]:
        names = [field.name for field in self.kind.fields[1:]]
        state = {} if self.optimizer is None else self.optimizer.state.get(weight, {})
        return {"weight": weight.data, **{name: state[name] for name in names}}
