"""The disk below a dynamic table: which rows are there, and how they move to memory and back.

A row that is looked up is brought into memory first, and rows that the table would evict go to disk
to make room for it. Its record on disk stays there, invalid while the row is in memory, and is
overwritten when the row returns. So a record belongs to a row in memory, or to a row below.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recast.errors import UsageError
from recast.runtime import device
from recast.runtime.tiers import records as form
from recast.runtime.tiers.engine import Ids, Records
from recast.runtime.tiers.records import Layout
from recast.runtime.tiers.store import Store, Traffic

_SAMPLE = 8  # records examined for each one dropped
_AT_ONCE = 4096  # records dropped together, if the tier is large

Slabs = Callable[[Tensor], dict[str, Tensor]]


class Tier:
    """The disk tier of one table. Callers hold the table's lock.

    Attributes:
        capacity: how many records fit. records: how many there are. below: rows on disk only.
        memory, disk, new: lookups in training, by where their row was.
        demoted, promoted, dropped: rows that went to disk, came back, and were dropped for good.
    """

    def __init__(
        self, name: str, index: Any, rows: int, kind: Layout, slabs: Slabs, capacity: int,
        policy: str, ttl: int, waits: bool, make: Callable[[], Store],
    ) -> None:  # fmt: skip
        self.name, self.index, self.rows = name, index, rows
        self.kind, self.slabs, self.capacity = kind, slabs, capacity
        self._policy, self._ttl, self._waits, self._make = policy, ttl, waits, make
        self._store: Store | None = None
        self.records = self.below = 0
        self.memory = self.disk = self.new = 0
        self.demoted = self.promoted = self.dropped = self.expired = 0
        self.gone: list[Tensor] = []  # ids that were dropped for good
        self.order: Tensor | None = None  # ids in the order of the last load, until the next step
        self.ready: tuple[Tensor, ...] = ()  # ids whose rows are in memory, as nothing has moved
        self.unstepped: Tensor | None = None  # rows that still hold the state of their last id
        self._has_record = np.zeros(rows + 1, np.bool_)  # by row in memory
        self._age = 0  # how often all counts were halved
        self._hand: bytes | None = None  # the key after which to look for records to drop

    @property
    def store(self) -> Store:
        """The files, created on first use."""
        if self._store is None:
            self._store = store = self._make()
            self._finalizer = weakref.finalize(self, store.close)
        return self._store

    @property
    def traffic(self) -> Traffic:
        return Traffic() if self._store is None else self._store.traffic

    def close(self) -> None:
        """Release the folder."""
        if self._store is not None:
            self._finalizer()

    @property
    def path(self) -> Path:
        return self.store.path

    def check(self) -> None:
        """Raise TierError if rows have been lost; never here, as a failed move is undone."""

    # ------------------------------------------------------------ lookups

    def bring(self, weight: Tensor, ids: Tensor) -> None:
        """Bring all of ``ids`` that are below to memory, with a free row there for each new id.

        Raises:
            UsageError: no room, in memory or on disk.
            TierError: the disk does not work. Rows that have not moved are still in place.
        """
        self.ready = ()
        rows = _find(self.index, ids)
        absent = rows < 0
        missing = ids[absent]
        self.memory += len(ids) - len(missing)
        if not len(missing):
            return
        wanted, lookups = torch.unique(missing, return_counts=True)
        found, got = self._read(wanted.numpy())
        short = len(wanted) - self._free()
        if short > 0:
            self.index.pin(rows[~absent].contiguous())
            self._give_up(weight, short, wanted)
            # With MinCount, not every new id needs a row.
            if len(got) > self._free() or (not self._waits and len(wanted) > self._free()):
                raise self._too_small(len(wanted))
        on_disk = int(lookups[torch.from_numpy(found)].sum())
        self.disk += on_disk
        self.new += len(missing) - on_disk
        self._take_back(weight, wanted[torch.from_numpy(found)], got)

    def is_ready(self, ids: Sequence[Tensor]) -> bool:
        """Whether the last :meth:`bring` was for these very tensors."""
        ready, self.ready = self.ready, ()
        return len(ready) == len(ids) and all(a is b for a, b in zip(ready, ids, strict=True))

    def lift(self, weight: Tensor, ids: Tensor) -> None:
        """Bring all of ``ids`` that are below to memory, for a lookup that stores no new id."""
        self.ready = ()
        rows = _find(self.index, ids)
        wanted = torch.unique(ids[rows < 0])
        found, got = self._read(wanted.numpy())
        wanted = wanted[torch.from_numpy(found)]
        short = len(wanted) - self._free()
        if short > 0:
            self.index.pin(rows[rows >= 0].contiguous())
            self._give_up(weight, short, wanted)
            if len(wanted) > self._free():
                raise self._too_small(len(wanted))
        self._take_back(weight, wanted, got)

    def peek(self, ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """(n,) bool: which of the distinct ``ids`` are below; field ``name`` of their records."""
        order = torch.argsort(ids)
        found, got = self._read(ids[order].numpy(), drop=False)
        field = self.kind.of(name)
        assert field is not None
        there = torch.zeros(len(ids), dtype=torch.bool)
        there[order] = torch.from_numpy(found)
        place = torch.empty(len(ids), dtype=torch.int64)
        place[order] = torch.from_numpy(np.cumsum(found) - 1)
        return there, form.column(field, got)[place[there]]

    def ahead(self, ids: Tensor) -> None:
        """Start to read the records of those of ``ids`` that are below."""
        if self.below == 0:
            return
        missing = torch.unique(ids[_find(self.index, ids) < 0])
        if len(missing):
            self.store.ahead(missing.numpy())

    def _read(self, ids: Ids, *, drop: bool = True) -> tuple[np.ndarray, Records]:
        if self._store is not None:
            self._store.check()
        if self.below == 0:
            return np.zeros(len(ids), np.bool_), np.empty((0, self.kind.size), np.uint8)
        found, got = self.store.read(ids)
        expired = self._has_expired(form.known(got)[1])
        if expired.any():
            if drop:
                self._remove(ids[found][expired], below=True)
                self.expired += int(expired.sum())
            found[np.flatnonzero(found)[expired]] = False
            got = got[~expired]
        return found, got

    def _has_expired(self, stamps: np.ndarray) -> np.ndarray:
        if self._ttl == 0:
            return np.zeros(len(stamps), np.bool_)
        return stamps + self._ttl < self.index.step

    def scores(self, facts: np.ndarray) -> np.ndarray:
        """The scores that the rows would have if they had stayed in memory."""
        return facts[0] >> (self._age - facts[2]) if self._policy == "lfu" else facts[0]

    # ------------------------------------------------------------ changing places

    def _take_back(self, weight: Tensor, ids: Tensor, got: Records) -> None:
        if not len(ids):
            return
        scores = torch.from_numpy(np.ascontiguousarray(self.scores(form.known(got))))
        rows = torch.empty(len(ids), dtype=torch.int64)
        self.index.take_back(ids.contiguous(), scores, rows)
        try:
            form.scatter(self.kind, self.slabs(weight), rows, got)
        except BaseException:  # their records on disk are still valid
            self.index.erase(ids.contiguous())
            self.index.take_gone(_empty)
            raise
        self._has_record[rows.numpy()] = True
        self.below -= len(ids)
        self.promoted += len(ids)

    def _give_up(self, weight: Tensor, n: int, coming: Tensor) -> None:
        over = self.records + n - self.capacity
        if over > 0:
            self._drop(over, coming)
        ids, rows, scores, stamps = self.index.give_up(n, _empty)
        expired = torch.from_numpy(self._has_expired(stamps.numpy()))
        stay = ~expired
        try:
            block = form.gather(self.kind, self.slabs(weight), rows[stay])
            self._begin_states(rows[stay], block)
        except BaseException:  # flipped, as rows are reused last freed first: each its own
            self.index.take_back(ids.flip(0), scores.flip(0), _empty(len(ids)))
            raise
        kept = int(stay.sum())
        ages = np.full(kept, self._age, np.int64)
        form.write_known(block, np.stack([scores[stay].numpy(), stamps[stay].numpy(), ages]))
        known = self._has_record[rows[stay].numpy()]
        self._has_record[rows[stay].numpy()] = False
        self.records += int((~known).sum())
        self.below += kept
        self.demoted += kept
        self.store.write(ids[stay].numpy(), block)
        if kept < len(ids):
            self.gone.append(ids[expired])
            self.expired += len(ids) - kept
            self.forget(ids[expired], rows[expired])

    def _begin_states(self, rows: Tensor, block: Records) -> None:
        if self.unstepped is not None:
            begin = torch.isin(rows, self.unstepped).cpu().numpy()
            first = self.kind.fields[0].last
            block[begin, first:] = self.kind.start[first:]

    def _too_small(self, wanted: int) -> UsageError:
        return UsageError(
            f"{self.name}: {wanted} rows are wanted in memory, and {self._free()} are free",
            why=f"its tier there has room for {self.rows} rows, and those that were looked up since"
            " the last optimizer step stay until the next",
            tries=("a larger recast.Host budget", "smaller batches", "optimizer.step()"),
        )

    def _free(self) -> int:
        return self.rows - len(self.index)

    def _drop(self, n: int, coming: Tensor) -> None:
        """Make room for ``n`` records: drop those of rows in memory, or of the lowest rows."""
        evicts = self._policy != "never"
        wanted = max(n, min(_AT_ONCE, self.capacity // 64))
        keep = coming.numpy()
        share = max(1 / _SAMPLE, wanted / self.records)
        left, ends = wanted, 0  # ends: how often the walk has reached the end of the files
        while left > 0 and ends < 3:
            ids, got, self._hand = self.store.walk(self._hand, _SAMPLE * wanted)
            ends += self._hand is None
            rows = _find(self.index, torch.from_numpy(ids)).numpy()
            above = rows >= 0
            self._remove(ids[above], below=False)
            self._has_record[rows[above]] = False
            left -= int(above.sum())
            facts = form.known(got)
            low = np.flatnonzero(~above & ~np.isin(ids, keep))
            low = low[np.lexsort((facts[1][low], self.scores(facts)[low]))]
            quota = left if ends > 1 else min(left, math.ceil(share * len(ids)))
            low = low[: max(0, quota)] if evicts else low[:0]
            self._remove(ids[low], below=True)
            self.dropped += len(low)
            left -= len(low)
        if left > wanted - n:
            raise UsageError(
                f"{self.name}: a row is wanted, and all {self.rows} in memory and all"
                f" {self.capacity} on disk are taken",
                why="evict is None, so no row is given up" if not evicts else "",
                tries=('recast.Dynamic(evict="lru")', "larger budgets", "table.erase(ids)"),
            )

    def _remove(self, ids: Ids, *, below: bool) -> None:
        if not len(ids):
            return
        self.store.delete(ids)
        self.records -= len(ids)
        if below:
            self.below -= len(ids)
            self.gone.append(torch.from_numpy(np.ascontiguousarray(ids)))

    # ------------------------------------------------------------ rows that are no more

    def forget(self, ids: Tensor, rows: Tensor) -> None:
        """Remove the records of rows that memory has dropped for good. Raises TierError if that
        fails; the records are still there then.
        """
        known = self._has_record[rows.numpy()]
        self._has_record[rows.numpy()] = False
        try:
            self._remove(ids.numpy()[known], below=False)
        except BaseException:
            self.below += int(known.sum())
            raise

    def erase(self, ids: Tensor) -> int:
        """Remove the records of ``ids``, below or in memory; returns how many were below."""
        self.ready, self.order = (), None
        wanted = torch.unique(ids)
        rows = _find(self.index, wanted)
        found, _ = self._read(wanted[rows < 0].numpy())
        self._remove(wanted[rows < 0].numpy()[found], below=True)
        known = (rows >= 0).numpy() & self._has_record[rows.numpy()]
        self._remove(wanted.numpy()[known], below=False)
        self._has_record[rows.numpy()[known]] = False
        return int(found.sum())

    def advance(self, looked_up: int) -> None:
        """End a step; ``looked_up``: the index's count of lookups before it."""
        self.ready, self.unstepped, self.order = (), None, None
        if self._policy == "lfu" and self.index.looked_up < looked_up:
            self._age += 1

    def begin(self, records: int) -> None:
        """Start afresh after all rows were loaded again, with ``records`` rows below."""
        self.records = self.below = records
        self._has_record[:] = False
        self.ready, self.order = (), None
        self._hand, self._age = None, 0

    def fill(self, ids: Tensor, scores: Tensor, stamps: Tensor) -> Tensor:
        """Replace the contents of memory by ``ids``, at most as many as there are rows; returns
        their rows, (n,), 0 for an id that finds no slot.
        """
        rows = torch.arange(1, 1 + len(ids))
        self.index.load(ids, rows, scores, stamps)
        return rows

    # ------------------------------------------------------------ for the report

    def add_to(self, counted: dict[str, int]) -> dict[str, int]:
        """The counters of the table in memory with those of both tiers."""
        traffic, size = self.traffic, self.kind.size
        return {
            **counted,
            "evicted": counted["evicted"] + self.dropped,
            "expired": counted["expired"] + self.expired,
            "in_memory": self.memory, "on_disk": self.disk, "new": self.new,
            "demoted": self.demoted, "promoted": self.promoted, "ahead": traffic.ahead,
            "read": traffic.read * size, "written": traffic.written * size,
        }  # fmt: skip

    def told(self) -> list[str]:
        """The tiers, in a sentence."""
        asked = self.memory + self.disk + self.new
        shares = [100 * n / max(asked, 1) for n in (self.memory, self.disk, self.new)]
        t = self.traffic
        mib = [n * self.kind.size / 2**20 for n in (t.written, t.read)]
        return [
            f"  {len(self.index)} of {self.rows} rows in memory, {self.below} of {self.capacity} on"
            f" disk; lookups: {shares[0]:.1f} % in memory, {shares[1]:.1f} % on disk,"
            f" {shares[2]:.1f} % new",
            f"  {self.demoted} rows went to disk ({mib[0]:.1f} MiB), {self.promoted} came back"
            f" ({mib[1]:.1f} MiB read, {t.ahead} of {t.read} rows ahead), {self.dropped} dropped",
        ]


def _find(index: Any, ids: Tensor) -> Tensor:
    rows = torch.empty(len(ids), dtype=torch.int64)
    index.find(ids.contiguous(), rows, device.threads())
    return rows


def _empty(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.int64)
