"""Records on disk, read and written by a thread of their own, in the order of the requests.

What could not be written stays in memory and is retried when the table is used next; until then
reads look there first. Records that were read ahead are dropped if their ids have been written
since.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recast.errors import TierError
from recast.runtime.tiers import folder
from recast.runtime.tiers.engine import FIXED, OVERHEAD, Engine, Ids, Reading, Records

_AHEAD = 4  # how many prefetches are kept
_BEHIND = 4  # writes that may wait
_SLACK = 1.4  # bytes of files per byte of records: replaced ones stay until compaction
_CHECKS = 16  # how often file sizes are checked while one budget's worth is written


def rows_in(budget: int, size: int) -> int:
    """How many records of ``size`` bytes fit into a budget of files."""
    return max(0, int((budget - FIXED) / (_SLACK * (size + OVERHEAD))))


@dataclass(eq=False)
class _Write:
    ids: Ids
    records: Records
    done: Future[None]


@dataclass(eq=False)
class _Read:
    ids: Ids  # sorted
    got: Future[Reading]
    written: list[Ids] = field(default_factory=list)  # since


@dataclass
class Traffic:
    """Records written to disk and read back."""

    read: int = 0
    ahead: int = 0  # how many of those were prefetched
    written: int = 0


class Store:
    """Records of ``size`` bytes in files of ``budget`` bytes."""

    def __init__(self, path: Path, table: str, size: int, budget: int, buffer: int) -> None:
        self.path, self.size, self.budget = path, size, budget
        self._lock, self._rows = folder.claim(path, table)
        self._buffer = buffer
        self.traffic = Traffic()
        try:
            self._engine = Engine(self._rows, size, buffer)
        except BaseException:
            folder.release(path, self._lock)
            raise
        self._thread = ThreadPoolExecutor(1, "recast-tier")
        self._writes: list[_Write] = []
        self._reads: list[_Read] = []
        self._unchecked = 0

    # ------------------------------------------------------------ reading

    def ahead(self, ids: Ids) -> None:
        """Start to read the sorted ``ids``."""
        self._reads = self._reads[-(_AHEAD - 1) :]
        self._reads.append(_Read(ids, self._thread.submit(self._engine.begin, ids)))

    def read(self, ids: Ids) -> tuple[NDArray[np.bool_], Records]:
        """(n,) bool: which of the sorted ``ids`` have a record; and these records, in order."""
        found = np.zeros(len(ids), np.bool_)
        asked = np.zeros(len(ids), np.bool_)
        records = np.empty((len(ids), self.size), np.uint8)
        for early in reversed(self._reads):  # the last one was for this lookup, and has most ids
            if asked.all():
                break
            self._take(early, ids, asked, found, records)
        self.traffic.ahead += int(found.sum())
        rest = np.flatnonzero(~asked)
        if len(rest):
            there, got = self._thread.submit(self._engine.read, ids[rest]).result()
            found[rest], records[rest[there]] = there, got
        for write in self._failed():
            place, at = _places(ids, write.ids)
            found[place], records[place] = True, write.records[at]
        self.traffic.read += int(found.sum())
        return found, records[found]

    def _take(
        self, early: _Read, ids: Ids, asked: NDArray[np.bool_], found: NDArray[np.bool_],
        records: Records,
    ) -> None:  # fmt: skip
        place, at = _places(ids, early.ids)
        new = ~asked[place]
        place, at = place[new], at[new]
        if early.written and len(place):
            fresh = ~np.isin(ids[place], np.concatenate(early.written))
            place, at = place[fresh], at[fresh]
        if not len(place):
            return
        try:
            there, got = early.got.result().result()
        except TierError:
            return  # the real read will raise it again
        asked[place], found[place] = True, there[at]
        row = np.cumsum(there) - 1
        records[place[there[at]]] = got[row[at[there[at]]]]

    def scan(self) -> Iterator[tuple[Ids, Records]]:
        """All records, in an order that is stable while nothing is written."""
        self.settle(raises=False)
        failed = self._failed()
        waiting = np.concatenate([w.ids for w in failed]) if failed else np.empty(0, np.int64)
        for ids, records, _ in self._engine.scan():
            keep = ~np.isin(ids, waiting)
            yield ids[keep], records[keep]
        last = {int(i): r for w in failed for i, r in zip(w.ids, w.records, strict=True)}
        if last:
            yield np.array(list(last), np.int64), np.stack(list(last.values()))

    def walk(self, after: bytes | None, records: int) -> tuple[Ids, Records, bytes | None]:
        """The next ``records`` records in the files after the key ``after``, and the last key of
        these; None at the end of the files.
        """
        self.settle()
        found = next(self._engine.scan(after, records), None)
        if found is None:
            return np.empty(0, np.int64), np.empty((0, self.size), np.uint8), None
        return found

    # ------------------------------------------------------------ writing

    def write(self, ids: Ids, records: Records) -> None:
        """Store records in the background; blocks if too many writes are waiting."""
        self._stale(ids)
        self._put(ids, records)
        self.traffic.written += len(ids)
        if len(self._writes) > _BEHIND:
            self._writes[0].done.exception()
        self._writes = [w for w in self._writes if not w.done.done() or w.done.exception()]

    def delete(self, ids: Ids) -> None:
        self.settle()
        self._stale(ids)
        self._thread.submit(self._engine.delete, ids).result()

    def settle(self, *, raises: bool = True) -> None:
        """Wait until everything is written, and retry writes that failed.

        Raises:
            TierError: a retry failed too. Nothing is lost: unwritten records stay in memory.
        """
        waiting, self._writes = self._writes, []
        failed = [w for w in waiting if w.done.exception() is not None]
        if failed:
            self._reads.clear()
        for k, write in enumerate(failed):
            self._put(write.ids, write.records)
            if self._writes[-1].done.exception() is not None:
                self._writes += failed[k + 1 :]
                break
        error = next((w.done.exception() for w in self._failed()), None)
        if raises and error is not None:
            raise error

    def check(self) -> None:
        """Retry failed writes. Raises TierError if they fail again."""
        if any(w.done.done() and w.done.exception() is not None for w in self._writes):
            self.settle()

    def _put(self, ids: Ids, records: Records) -> None:
        done = self._thread.submit(self._write, ids, records)
        self._writes.append(_Write(ids, records, done))

    def _failed(self) -> list[_Write]:
        return [w for w in self._writes if w.done.done() and w.done.exception() is not None]

    def _stale(self, ids: Ids) -> None:
        for early in self._reads:
            early.written.append(ids)

    def _write(self, ids: Ids, records: Records) -> None:
        room = os.statvfs(self.path)
        wanted = records.nbytes + 4 * self._buffer
        if room.f_bavail * room.f_frsize < wanted:
            raise folder.full(self.path, f"less than {wanted} bytes are free")
        self._engine.write(ids, records)
        self._unchecked += records.nbytes
        if self._unchecked * _CHECKS >= self.budget:
            self._keep_to_budget()
            self._unchecked = 0

    def _keep_to_budget(self) -> None:
        if self._engine.files() <= self.budget:
            return
        self._engine.compact()
        size = self._engine.files()
        if size > self.budget:
            raise TierError(
                f"the files at {self.path} take {size} bytes of a budget of {self.budget}",
                tries=("a larger budget of the disk tier",),
            )

    # ------------------------------------------------------------ all of it

    def clear(self) -> None:
        """Remove all records."""
        self.settle(raises=False)
        self._writes, self._reads = [], []
        self._engine.close()
        folder.empty(self._rows)
        self._engine = Engine(self._rows, self.size, self._buffer)

    def compact(self) -> None:
        self.settle()
        self._thread.submit(self._engine.compact).result()

    def files(self) -> int:
        return self._engine.files()

    def close(self) -> None:
        """Release the folder, and delete what is in it."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(Exception):  # the files are deleted anyway
            self._engine.close()
        folder.release(self.path, self._lock)


def _places(ids: Ids, of: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids that the sorted ``ids`` and ``of`` have in common: their indices in both."""
    if not len(ids) or not len(of):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    place = np.minimum(np.searchsorted(ids, of), len(ids) - 1)
    at = np.flatnonzero(ids[place] == of)
    return place[at], at
