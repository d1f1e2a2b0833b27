"""A dynamic table in GPU memory with tiers below it: ``cuda_table.py`` on top of these.

How it differs from a table without tiers: no id is refused, as a row that is evicted is demoted.
The host waits for the GPU once per step, and twice if rows move, so its steps cannot be recorded,
and it raises if that is tried. Lookups without gradients also look below, and move nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recast.errors import CheckpointError, NotBuiltError, UsageError
from recast.runtime import device
from recast.runtime.dynamic import prefetch_ids
from recast.runtime.dynamic import tiers as dynamic_tiers
from recast.runtime.dynamic.all_rows import AllRows
from recast.runtime.dynamic.cuda import IdTable
from recast.runtime.dynamic.cuda_batch import Batch
from recast.runtime.dynamic.cuda_table import CudaTable
from recast.runtime.dynamic.cuda_tier import DeviceTier
from recast.runtime.dynamic.settings import Dynamic, Initial
from recast.runtime.dynamic.table import _flat
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded import recording
from recast.runtime.tiers import engine, folder, host
from recast.runtime.tiers import records as form
from recast.runtime.tiers.engine import buffer_bytes, memory_of
from recast.runtime.tiers.records import Layout
from recast.runtime.tiers.settings import Tiers, share
from recast.runtime.tiers.settings import check as check_tiers
from recast.runtime.tiers.store import Store, rows_in
from recast.runtime.tiers.tier import Slabs, Tier

_REFUSED = 2  # index in the counts of the id table


class TieredCudaTable(CudaTable):
    """One table, whose hot rows are on a GPU."""

    def __init__(
        self, name: str, dim: int, settings: Dynamic, row: int, initial: Initial,
        padding: int | None, on: Gpu, parts: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(name, dim, settings, row, initial, padding, on, parts)
        self._lock = threading.RLock()  # type: ignore[assignment]  # a mark reads all rows

    def _new_index(self) -> IdTable:
        assert self._on is not None
        how = self.settings
        return IdTable(
            self._on, self.capacity, _policy(how.policy), self._guests, ttl=how.ttl or 0,
            padding=self.padding, demotes=True,
        )  # fmt: skip

    @property
    def _below(self) -> DeviceTier:
        if not isinstance(self.tier, DeviceTier):
            raise UsageError(f"{self.name}: its tiers were given up")
        return self.tier

    # ------------------------------------------------------------ lookups

    def fetch(self, weight: Tensor, ids: Sequence[Tensor], training: bool) -> None:
        """As for a table on the host: bring the rows of ``ids`` to the GPU.

        Raises:
            NotBuiltError: a step is being recorded.
        """
        self._check_recording()
        if self._only_reads(weight, training) or any(x.device != weight.device for x in ids):
            return
        with self._lock:
            self._below.bring(weight, _flat(ids))
            self._below.ready = tuple(ids)

    def find(
        self, weight: Tensor, ids: Sequence[Tensor], training: bool
    ) -> tuple[Tensor, list[Tensor]]:
        self._check_recording()
        if not self._only_reads(weight, training):
            with self._lock:
                is_ready = self._below.is_ready(ids)
            if not is_ready:
                self.fetch(weight, ids, training)
        return super().find(weight, ids, training)

    def _check_recording(self) -> None:
        if recording.current() is not None:
            raise NotBuiltError(
                f"{self.name} has tiers: a step or a forward with it cannot be recorded",
                why="the host moves rows between the GPU and what is below, and a replay runs none"
                " of that",
                tries=("train it in a plain loop", "max_bytes in place of tiers"),
            )

    def _insert(self, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        tier = self._below
        if not tier.missing:  # no row will be evicted
            return super()._insert(weight, ids)
        before = self.index._counts[_REFUSED].clone()
        found = super()._insert(weight, ids)
        refused = int(self.index._counts[_REFUSED] - before)
        if refused:
            raise tier.too_full(refused)
        return found

    def _rescue(self, weight: Tensor, batch: Batch) -> None:
        if self._below.missing:
            self._below.rescue(weight, batch)

    def _read(self, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        tier = self._below
        if torch.is_grad_enabled() and weight.requires_grad:  # rows with a gradient must be there
            with self._lock:
                tier.lift(weight, ids)
            return super()._read(weight, ids)
        matrix, rows = super()._read(weight, ids)
        unique, place = torch.unique(ids, return_inverse=True)
        absent = torch.zeros_like(unique, dtype=torch.bool)
        absent[place] = self.index.rows_of(ids) < 0
        wanted = unique[absent]
        if not len(wanted):
            return matrix, rows
        with self._lock:
            found, values = tier.peek(wanted, "weight")
        row = torch.full_like(unique, -1)
        row[absent.nonzero().squeeze(1)[found]] = torch.arange(len(found), device=ids.device)
        of_each = row[place]
        below = of_each >= 0
        matrix[1:][below] = values[of_each[below]]
        return matrix, rows

    # ------------------------------------------------------------ steps

    def _next_step(self) -> None:
        counts = self.settings.policy == "lfu"
        looked_up = self.index.looked_up if counts else 0
        super()._next_step()
        self._below.advance(looked_up)

    def prefetch(self, ids: Tensor) -> None:
        """Start to fetch the rows of ``ids``, of any shape and on any device, from memory and disk
        for a later lookup.

        The GPU finds out which it lacks beside its other work, and a thread reads them. They are
        moved to the GPU when they are looked up, so prefetching changes no numbers. On many ranks
        ids go to their owners, and the host waits to learn how many come: every rank calls it with
        its own ids, at the same point of its loop.
        """
        self._check_recording()
        device = self.index.gpu.device
        flat = prefetch_ids.ids_of_owner(ids.detach().reshape(-1).long(), self.parts, device)
        with self._lock:
            self._below.ahead(flat)

    # ------------------------------------------------------------ all rows

    stored = AllRows.stored
    take = AllRows.take
    put = AllRows.put

    def load(
        self, slab: Tensor, ids: Tensor, scores: Tensor, stamps: Tensor, weight: Tensor
    ) -> Tensor:
        """As for a table on the host; returns the slab rows, on the GPU."""
        if len(scores) != len(ids):
            raise CheckpointError(f"{self.name}: an id has no score")
        rows = AllRows.load(self, slab, ids, scores, stamps, weight)
        return rows.to(slab.device)

    def renew(self, rows: Tensor, gone: Tensor) -> None:
        super().renew(rows, gone)
        self._below.unstepped = rows

    def erase(self, ids: Tensor) -> int:
        """Forget these ids; returns how many were stored. Not between a lookup and its step."""
        flat = torch.unique(ids.long().reshape(-1).to(self.index.gpu.device))
        with self._lock:
            return int(self.index.erase(flat)) + self._below.erase(flat)

    def check_copies(self) -> None:
        """Raise NotBuiltError: it cannot be copied."""
        raise NotBuiltError(
            f"{self.name} has rows below the GPU: it cannot be copied or pickled",
            why="two tables cannot share the tiers of one",
            tries=("recast.checkpoint.save, and load into another model with tiers",),
        )

    def __getstate__(self) -> dict[str, Any]:
        self.check_copies()
        return super().__getstate__()

    def counters(self) -> dict[str, int]:
        """As for a table on the host; ``evicted`` are rows that left all tiers. Lookups by where
        their row was: ``on_device``, ``in_memory``, ``on_disk``, ``new``; rows ``demoted`` from the
        GPU and ``promoted`` to it, ``ahead`` of these prefetched; the bytes of both, ``down`` and
        ``up``; bytes ``read`` from disk and ``written`` to it.
        """
        return self._below.add_to(super().counters())


def _policy(named: str) -> str:
    """The policy of demotion: if nothing may be evicted, the least recently used row."""
    return "lru" if named == "never" else named


def attach(
    table: TieredCudaTable, weight: Tensor, optimizer: Optimizer | None, *, lazy: bool,
    bytes_of_an_id: int, parts: int = 1,
) -> None:  # fmt: skip
    """Give ``table`` its tiers, or those of one of ``parts`` ranks. If the table is whole, the
    folder is claimed now. ``bytes_of_an_id``: bytes per id in the id table on the host.

    Raises:
        UsageError: a budget has no room for one row, or the folder belongs to somebody else.
        TierError: it cannot be written to.
        NotBuiltError: no RocksDB, or no C++ kernels.
    """
    tiers = _tiers(table, 0, parts)
    kind = dynamic_tiers._layout(optimizer, weight, lazy)
    rooms = _rooms(table.name, tiers, kind.size, _on_disk(kind).size, bytes_of_an_id, parts)
    table.tier = _tier(table, tiers, kind, dynamic_tiers.RecordSlabs(optimizer, kind), rooms)
    if parts == 1:
        _claim(table.tier)


def take_part(table: TieredCudaTable) -> None:
    """Give a table that has become one rank's part its share of the tiers, in its own folder,
    which is claimed now.
    """
    whole = table._below
    dynamic_tiers.detach(table)
    store = whole.store
    rooms = store.rows, store.capacity - store.rows
    tiers = _tiers(table, table.part, table.parts)
    table.tier = _tier(table, tiers, whole.kind, whole.slabs, rooms)
    _claim(table.tier)


def _claim(tier: DeviceTier) -> None:
    if tier.store.disk is not None:
        _ = tier.store.disk.store


def _tiers(table: TieredCudaTable, part: int, parts: int) -> Tiers:
    tiers = check_tiers(table.name, table.settings.tiers)
    assert tiers is not None and tiers.device
    return tiers.of_part(part, parts)


def _on_disk(kind: Layout) -> Layout:
    return form.layout({"record": torch.zeros(1, kind.size, dtype=torch.uint8)})


def _tier(
    table: TieredCudaTable, tiers: Tiers, kind: Layout, slabs: Slabs, rooms: tuple[int, int]
) -> DeviceTier:
    how, (rows, below) = table.settings, rooms
    evicts, policy = how.evict is not None, _policy(how.policy)
    extension = device.extension()
    if extension is None:
        raise NotBuiltError(
            f"tables: {table.name}: tiers below a GPU need the C++ kernels",
            why=device.why_missing() or "",
            tries=("recast env says what is missing",),
        )
    index = extension.IdTable(rows, 1, policy, 1, 0)
    disk = None
    if below:
        buffer, on_disk = buffer_bytes(tiers.host, tiers.disk), _on_disk(kind)
        make = partial(Store, tiers.path / table.name, table.name, on_disk.size, tiers.disk, buffer)
        disk = Tier(
            table.name, index, rows, on_disk, host.slabs, below, policy if evicts else "never", 0,
            False, make,
        )  # fmt: skip
    records = host.HostRows(table.name, index, rows, kind.size, disk, policy, evicts)
    path = tiers.path / table.name if below else Path()
    return DeviceTier(
        table.name, table.index, kind, slabs, records, policy, how.ttl or 0, path
    )  # fmt: skip


def _rooms(
    name: str, tiers: Tiers, record: int, on_disk: int, bytes_of_an_id: int, parts: int
) -> tuple[int, int]:
    """Rows on the host, and on disk (0 without one); ``tiers``: those of one of ``parts``."""
    below = engine_bytes = 0
    if tiers.disk:
        engine.library()
        if parts == 1:  # with several ranks, one might fail here while the others wait
            folder.check(tiers.path / name)
        below = rows_in(tiers.disk, on_disk)
        engine_bytes = memory_of(buffer_bytes(tiers.host, tiers.disk), below)
    row = record + bytes_of_an_id + dynamic_tiers._MEMORY_BESIDE
    rows = (tiers.host - engine_bytes) // row
    if rows < 1 or (tiers.disk and below < 1):
        raise UsageError(
            f"tables: {name}: the tiers below the GPU{share(parts)} leave no room for a row",
            why=f"a row takes {row} bytes of memory, and a disk tier of {tiers.disk} bytes"
            f" {engine_bytes} besides; it takes {on_disk} bytes there",
            tries=("larger budgets",),
        )
    return rows, below
