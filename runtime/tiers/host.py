"""Records in host memory, with the others on disk: everything below the device tier.

A record is in one place: in a row of memory, found by an id table, or on disk. A new record goes to
memory, and those that the id table evicts make room for it; one that moves up is removed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.tiers import records as form
from recast.runtime.tiers.engine import Ids, Records
from recast.runtime.tiers.records import HEADER
from recast.runtime.tiers.store import _places
from recast.runtime.tiers.tier import Tier, _empty, _find

_AHEAD = 4  # how many prefetches are kept
_CHUNK = 1 << 13  # records of a scan
_MANY = 1 << 60  # lookups: enough to make the index halve its counts
NOWHERE, MEMORY, DISK = 0, 1, 2

Where = NDArray[np.int8]
Found = tuple[Where, Records]  # for each id; the records of those not NOWHERE, in order


@dataclass(eq=False)
class _Early:
    got: Future[tuple[Ids, Where, Records]]
    changed: list[Ids] = field(default_factory=list)  # since


class HostRows:
    """The records below the device tier. Callers hold the table's lock.

    Args:
        index: the id table on the host, with ``rows`` rows; it stores nothing by itself.
        size: bytes per record. disk: the tier below, with one field "record"; None: there is none.
        policy: the eviction policy of the table above, which decides what scores mean.
        evicts: whether rows may be dropped.

    Attributes:
        halved: how often the counts of "lfu" were halved.
        dropped: rows that were dropped for good, including those of the disk.
        early: of the records that were asked for, how many had been prefetched.
    """

    def __init__(
        self, name: str, index: Any, rows: int, size: int, disk: Tier | None,
        policy: str, evicts: bool,
    ) -> None:  # fmt: skip
        self.name, self.index, self.rows, self.size = name, index, rows, size
        self.disk, self._policy, self._evicts = disk, policy, evicts
        self.records = torch.from_numpy(np.zeros((rows + 1, size), np.uint8))
        self._dropped = self.early = self.halved = 0
        self._thread = ThreadPoolExecutor(1, "recast-ahead")
        self._reads: list[_Early] = []
        self._finalizer = weakref.finalize(self, self._thread.shutdown, wait=False)

    def __len__(self) -> int:
        return len(self.index) + (0 if self.disk is None else self.disk.below)

    @property
    def capacity(self) -> int:
        return self.rows + (0 if self.disk is None else self.disk.capacity)

    @property
    def dropped(self) -> int:
        return self._dropped + (0 if self.disk is None else self.disk.dropped)

    # ------------------------------------------------------------ reading

    def fetch(self, ids: Ids) -> Found:
        """Where the sorted ``ids`` are, and the records of those that are not NOWHERE."""
        self._join()
        where, asked = np.zeros(len(ids), np.int8), np.zeros(len(ids), np.bool_)
        records = np.empty((len(ids), self.size), np.uint8)
        for early in self._reads:
            self._take(early, ids, where, asked, records)
        self.early += int((where != NOWHERE).sum())
        rest = np.flatnonzero(~asked)
        if len(rest):
            where[rest], got = self._find(ids[rest])
            records[rest[where[rest] != NOWHERE]] = got
        return where, records[where != NOWHERE]

    def ahead(self, ids: Callable[[], Ids]) -> None:
        """Start to read the sorted ids that ``ids()`` returns; a thread calls it."""

        def read() -> tuple[Ids, Where, Records]:
            wanted = ids()
            return wanted, *self._find(wanted)

        self._reads = self._reads[-(_AHEAD - 1) :]
        self._reads.append(_Early(self._thread.submit(read)))

    def _find(self, ids: Ids) -> Found:
        rows = _find(self.index, torch.from_numpy(ids))
        here = (rows >= 0).numpy()
        where = here.astype(np.int8) * MEMORY
        records = np.empty((len(ids), self.size), np.uint8)
        records[here] = self.records.index_select(0, rows[rows >= 0]).numpy()
        rest = np.flatnonzero(~here)
        if self.disk is not None and len(rest):
            there, got = self.disk._read(ids[rest])
            where[rest[there]], records[rest[there]] = DISK, got[:, HEADER:]
        return where, records[where != NOWHERE]

    @staticmethod
    def _take(
        early: _Early, ids: Ids, where: Where, asked: NDArray[np.bool_], records: Records
    ) -> None:
        if early.got.exception() is not None:  # the real read will raise it again
            return
        known, there, got = early.got.result()
        place, at = _places(ids, known)
        fresh = ~asked[place]
        if early.changed:
            fresh &= ~np.isin(ids[place], np.concatenate(early.changed))
        place, at = place[fresh], at[fresh]
        asked[place], where[place] = True, there[at]
        is_somewhere = there[at] != NOWHERE
        row = np.cumsum(there != NOWHERE) - 1
        records[place[is_somewhere]] = got[row[at[is_somewhere]]]

    def read(self, ids: Ids) -> tuple[NDArray[np.bool_], Records]:
        """Which of the sorted ``ids`` are here, and their records."""
        where, records = self.fetch(ids)
        return where != NOWHERE, records

    def scan(self) -> Iterator[tuple[Ids, Records]]:
        """All records, in an order that is stable while nothing is written."""
        self._join()
        ids, rows, _, _ = self.index.stored(0, _empty)
        for some, their in zip(ids.split(_CHUNK), rows.split(_CHUNK), strict=True):
            yield some.numpy(), self.records.index_select(0, their).numpy()
        if self.disk is not None and self.disk.records:
            for below, got in self.disk.store.scan():
                yield below, np.ascontiguousarray(got[:, HEADER:])

    def _join(self) -> None:
        """Wait for the prefetching thread, as it reads the same tables."""
        wait([early.got for early in self._reads])

    # ------------------------------------------------------------ writing

    def reserve(self, n: int, coming: Ids) -> None:
        """Make room for ``n`` more records; if need be, drop the lowest ones for good, but none of
        ``coming``. Raises UsageError if that is impossible; then nothing has moved.
        """
        self._join()
        over = n - (self.capacity - len(self))
        if over <= 0:
            return
        if n > self.capacity - len(coming) or not self._evicts:
            raise UsageError(
                f"{self.name}: {n} rows have to go down, and of {self.capacity} there"
                f" {len(self)} are taken",
                why=f"{len(coming)} of them are wanted in this step"
                if self._evicts
                else "evict is None, so no row is given up",
                tries=("larger budgets", 'recast.Dynamic(evict="lru")', "smaller batches"),
            )
        keep = torch.from_numpy(coming)
        if self.disk is not None:
            if self.disk.records:
                self.disk._drop(min(over, self.disk.records), keep)
            self._changed(*[x.numpy() for x in self.disk.gone])
            self.disk.gone.clear()
            over = n - (self.capacity - len(self))
        if over > 0:
            self.index.advance()
            held = _find(self.index, keep)
            self.index.pin(held[held >= 0].contiguous())
            gone = self.index.give_up(over, _empty)[0].numpy()
            self._changed(gone)
            self._dropped += len(gone)

    def add(self, ids: Ids, records: Records) -> None:
        """Store the records of distinct ``ids``, none of which are here yet. There must be room."""
        self._join()
        self._changed(ids)
        for at in range(0, len(ids), self.rows):
            part, block = torch.from_numpy(ids[at : at + self.rows]), records[at : at + self.rows]
            self.index.advance()  # records of the previous part may move on to disk
            short = len(part) - (self.rows - len(self.index))
            if short > 0:
                assert self.disk is not None  # else `reserve` has made room
                self.disk._give_up(self.records, short, part)
            rows = _empty(len(part))
            scores = np.ascontiguousarray(self.scores(form.known(block)))
            self.index.take_back(part.contiguous(), torch.from_numpy(scores), rows)
            self.records.index_copy_(0, rows, torch.from_numpy(np.ascontiguousarray(block)))

    def remove(self, ids: Ids) -> None:
        """Forget the records of ``ids``, all of which are here."""
        self._join()
        self._changed(ids)
        here = (_find(self.index, torch.from_numpy(ids)) >= 0).numpy()
        if self.disk is not None and not here.all():  # first, as the disk may fail
            self.disk._remove(ids[~here], below=True)
            self.disk.gone.clear()
        self.index.erase(torch.from_numpy(ids[here]))
        self.index.take_gone(_empty)

    def write(self, ids: Ids, records: Records) -> None:
        """Store records for ``ids``, in any order, replacing any that they had."""
        order = np.argsort(ids)
        where, _ = self.fetch(ids[order])
        self.remove(ids[order][where != NOWHERE])
        self.add(ids, records)

    def _changed(self, *ids: Ids) -> None:
        for early in self._reads:
            early.changed.extend(ids)

    def scores(self, facts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The scores that records would have on the device, from their ``known`` facts."""
        return facts[0] >> (self.halved - facts[2]) if self._policy == "lfu" else facts[0]

    def age(self) -> None:
        """Halve the counts of all rows below, as the device has halved its own."""
        self._join()
        self.halved += 1
        self.index.looked_up = _MANY
        self.index.advance()
        if self.disk is not None:
            self.disk.advance(_MANY)

    # ------------------------------------------------------------ all of it

    def clear(self) -> None:
        """Remove all records."""
        self._join()
        self._reads.clear()
        self.halved = 0
        nothing = _empty(0)
        self.index.load(nothing, nothing, nothing, nothing)
        if self.disk is not None:
            if self.disk.records:
                self.disk.store.clear()
            self.disk.begin(0)

    def settle(self) -> None:
        """Wait until all writes have reached the disk."""
        self._join()
        if self.disk is not None and self.disk.records:
            self.disk.store.settle()

    def close(self) -> None:
        """Release the folder, and delete what is in it."""
        self._join()
        self._thread.shutdown()
        if self.disk is not None:
            self.disk.close()


def slabs(rows: Tensor) -> dict[str, Tensor]:
    """The fields of a record on disk: it contains a whole record of memory."""
    return {"record": rows}
