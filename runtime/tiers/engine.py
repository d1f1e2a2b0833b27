"""RocksDB, as a tier needs it: records of one size by 64-bit id, in batches.

The key of an id is its product with an odd number, so that neighbours in the files are unrelated
ids; the product with the inverse gives the id back. Every block has a checksum that is verified
when it is read. There is no write-ahead log: only a checkpoint outlives the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recast.errors import NotBuiltError, TierError
from recast.runtime.tiers import folder

Ids = NDArray[np.int64]
Records = NDArray[np.uint8]  # (n, bytes)

_KEY = 8
_ODD = 0x9E3779B97F4A7C15
_INVERSE = pow(_ODD, -1, 2**64)
_CHUNK = 1 << 13  # records read at once by a scan
_READERS = 8  # reads in flight: a disk takes 260 us for one, and 60 us each for eight at once
_PART = 64  # records per call; a call may hold the interpreter for 0.1 ms
_NICE = 10  # niceness of prefetching threads: a tenth of a core that others want
_PAUSE = 2e-5  # seconds; hands the interpreter to waiting threads at once, not after 5 ms
_SAMPLE_BITS = 10  # filter bits per id: one in a hundred absent ids is searched for in vain
_SMALL = 1 << 16  # bytes of files without records
FIXED = 1 << 18  # bytes of files whatever they contain
OVERHEAD = 24  # bytes of files per record, besides the record
MEMORY_OF_A_RECORD = 4  # bytes: its bits in the filter, its share of the index


def library() -> Any:
    """The package ``rocksdict``. Raises NotBuiltError if it is not installed."""
    try:
        import rocksdict
    except ImportError as error:
        raise NotBuiltError(
            "tables: a disk tier needs RocksDB, by the package rocksdict",
            why=str(error),
            tries=("pip install 'torch-recast[tiers]'",),
        ) from error
    return rocksdict


def buffer_bytes(host: int, disk: int) -> int:
    """Bytes of a write buffer: a small part of both budgets."""
    return min(max(min(host, disk) // 64, 1 << 16), 1 << 25)


def memory_of(buffer: int, records: int) -> int:
    """Bytes of memory that the engine takes: buffers, cache, index and filter."""
    return 4 * buffer + MEMORY_OF_A_RECORD * records


class Engine:
    """Open files of records of ``size`` bytes in ``path``, an empty folder or none."""

    def __init__(self, path: Path, size: int, buffer: int) -> None:
        self.path, self.size = path, size
        self._rocks = library()
        with self._named():
            self._db = self._rocks.Rdict(str(path), _options(self._rocks, buffer))
        writes = self._rocks.WriteOptions()
        writes.disable_wal = True
        self._db.set_write_options(writes)
        self._now = ThreadPoolExecutor(_READERS, "recast-tier-read")
        self._ahead = ThreadPoolExecutor(_READERS // 2, "recast-tier-ahead", _give_way)

    def _named(self) -> _Named:
        return _Named(self.path)

    def read(self, ids: Ids) -> tuple[NDArray[np.bool_], Records]:
        """(n,) bool: which of ``ids`` have a record; and these records, in the order of ``ids``."""
        return Reading(self, ids, self._now).result()

    def begin(self, ids: Ids) -> Reading:
        """Start to read ``ids`` in the background, at low priority."""
        return Reading(self, ids, self._ahead)

    def _records(self, values: list[bytes]) -> Records:
        joined = b"".join(values)
        if len(joined) != len(values) * self.size or not {self.size}.issuperset(map(len, values)):
            raise damaged(self.path, f"records that are not of {self.size} bytes")
        return np.frombuffer(joined, np.uint8).reshape(len(values), self.size)

    def write(self, ids: Ids, records: Records) -> None:
        """Store one record per id, replacing any that it had."""
        keys, order = _keys(ids)
        for first in range(0, len(keys), _PART):
            part = slice(first, first + _PART)
            values = records[order[part]].view(f"V{self.size}").reshape(-1).tolist()
            batch = self._rocks.WriteBatch(raw_mode=True)
            deque(map(batch.put, keys[part], values), 0)
            with self._named():
                self._db.write(batch)
            time.sleep(_PAUSE)

    def delete(self, ids: Ids) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for key in _keys(ids)[0]:
            batch.delete(key)
        with self._named():
            self._db.write(batch)

    def scan(
        self, after: bytes | None = None, chunk: int = _CHUNK
    ) -> Iterator[tuple[Ids, Records, bytes]]:
        """All records in key order, a chunk at a time, starting after the key ``after``; each time
        with the last key of the chunk.
        """
        with self._named():
            at = self._db.iter()
            at.seek_to_first() if after is None else at.seek(after)
            if after is not None and at.valid() and at.key() == after:
                at.next()
        while True:
            keys: list[bytes] = []
            values: list[bytes] = []
            with self._named():
                while len(keys) < chunk and at.valid():
                    keys.append(at.key())
                    values.append(at.value())
                    at.next()
                at.status()  # a failed iterator just ends; only this raises its error
            if not keys:
                return
            mixed = np.frombuffer(b"".join(keys), ">u8").astype(np.uint64)
            ids = (mixed * np.uint64(_INVERSE)).view(np.int64)
            yield ids, self._records(values), keys[-1]

    def files(self) -> int:
        """The size of all files, in bytes."""
        return folder.bytes_in(self.path)

    def flush(self) -> None:
        with self._named():
            self._db.flush(True)

    def compact(self) -> None:
        """Rewrite the files without records that were replaced or removed."""
        with self._named():
            self._db.flush(True)
            self._db.compact_range(None, None)

    def close(self) -> None:
        self._ahead.shutdown(cancel_futures=True)
        self._now.shutdown()
        self._db.close()


class Reading:
    """A read in the background, by several threads, a part at a time."""

    def __init__(self, engine: Engine, ids: Ids, readers: ThreadPoolExecutor) -> None:
        self._engine = engine
        keys, self._order = _keys(ids)
        self._parts = [keys[at : at + _PART] for at in range(0, len(keys), _PART)]
        self._got = [readers.submit(engine._db.get, part) for part in self._parts]
        self._result: tuple[NDArray[np.bool_], Records] | None = None

    def result(self) -> tuple[NDArray[np.bool_], Records]:
        """Wait for the result, as in :meth:`Engine.read`; parts not yet started are read at normal
        priority. If reading fails, every call raises TierError.
        """
        if self._result is None:
            engine = self._engine
            for k, part in enumerate(self._parts):
                if self._got[k].cancel():
                    self._got[k] = engine._now.submit(engine._db.get, part)
            with engine._named():
                got = [x for part in self._got for x in part.result()]
            self._result = self._in_order(got)
            self._parts, self._got = [], []
        return self._result

    def _in_order(self, got: list[bytes | None]) -> tuple[NDArray[np.bool_], Records]:
        order = self._order
        found = np.fromiter((x is not None for x in got), np.bool_, len(got))
        records = self._engine._records([x for x in got if x is not None])
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        place = np.cumsum(found) - 1  # index among the records found
        found = found[back]
        return found, records[place[back][found]]


def _give_way() -> None:
    """Lower the priority of the calling thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def key_order(ids: Ids) -> NDArray[np.int64]:
    """The indices that sort ``ids`` as in the files."""
    return np.argsort(ids.view(np.uint64) * np.uint64(_ODD))


def _keys(ids: Ids) -> tuple[list[bytes], NDArray[np.int64]]:
    """The sorted keys, and the index in ``ids`` of each."""
    mixed = ids.view(np.uint64) * np.uint64(_ODD)
    order = np.argsort(mixed)
    keys: list[bytes] = mixed[order].astype(">u8").view(f"V{_KEY}").tolist()
    return keys, order


def _options(rocks: Any, buffer: int) -> Any:
    blocks = rocks.BlockBasedOptions()
    blocks.set_bloom_filter(_SAMPLE_BITS, False)
    blocks.set_block_cache(rocks.Cache(buffer))
    blocks.set_block_size(4096)
    blocks.set_format_version(5)
    blocks.set_checksum_type(rocks.ChecksumType.xxh3())
    options = rocks.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_error_if_exists(True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(rocks.DBCompressionType.none())
    options.set_write_buffer_size(buffer)
    options.set_max_write_buffer_number(3)
    options.set_target_file_size_base(2 * buffer)
    options.set_max_bytes_for_level_base(8 * buffer)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_background_jobs(2)
    options.set_max_open_files(512)
    options.set_paranoid_checks(True)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(_SMALL)
    options.set_max_manifest_file_size(_SMALL)
    options.set_stats_dump_period_sec(0)
    return options


class _Named:
    """Turns errors of RocksDB, which are plain Exceptions, into TierErrors."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, TierError):
            return
        raise named(error, self.path.parent) from error


def named(error: Exception, path: Path) -> TierError:
    said = str(error)
    if "No space left" in said or "quota exceeded" in said.lower():
        return folder.full(path, said)
    if "Read-only" in said or "Permission denied" in said:
        return folder.read_only(path)
    if "Corruption" in said or "checksum" in said or "No such file" in said:
        return damaged(path, said)
    return TierError(f"a disk tier at {path} does not work", why=said)


def damaged(path: Path, said: str) -> TierError:
    return TierError(
        f"the files of the disk tier at {path} are damaged",
        why=said,
        tries=("recast.checkpoint.load of the last checkpoint, into a tier in a new folder",),
    )
