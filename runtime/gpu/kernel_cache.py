"""Compiled kernels on disk, shared by all processes of a user.

An entry is a file named by its key, a digest of everything the machine code depends on: the source,
every header it includes, the compiler's options, the architecture and NVRTC's version. It begins
with a checksum over key and content; if that does not match, it is discarded and built again. Files
appear complete, by a rename. If several processes need one entry at the same time, one builds it
and the others wait on a lock. If the folder cannot be written, each process builds its kernels.

The folder is ``cuda`` in that of :mod:`recast.runtime.build_cache` (``RECAST_CACHE``). Above
:data:`LIMIT` bytes, the least recently used entries are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from recast.runtime import build_cache
from recast.runtime.gpu import nvrtc

LIMIT = 256_000_000  # bytes; a kernel is some 5 to 50 kB
_MAGIC = b"recast-1"  # changes with the format of an entry
_SUFFIX = ".kernel"
_STALE = 3600.0  # seconds after which nobody can still be writing a temporary file
_log = logging.getLogger("recast")


@dataclass(frozen=True)
class Cache:
    """A folder of byte strings by key, at most ``limit`` bytes of them (but always the newest)."""

    folder: Path
    limit: int = LIMIT

    def fetch(self, key: str, build: Callable[[], bytes]) -> bytes:
        """The content of ``key``: from disk, else from ``build()``, which is kept.

        Exceptions of ``build`` are passed on; a folder that cannot be written is not an error.
        """
        found = self._read(key)
        if found is not None:
            return found
        with self._alone(key):
            found = self._read(key)  # another process may have built it meanwhile
            if found is None:
                found = build()
                self._write(key, found)
        return found

    def size(self) -> tuple[int, int]:
        """How many entries there are and how many bytes they take."""
        sizes = [size for _, size, _ in self._entries()]
        return len(sizes), sum(sizes)

    def _read(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            whole = path.read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + 32
        content = whole[head:]
        if whole[:head] != _head(key, content):
            _log.warning("a cached kernel was damaged and is built anew: %s", path.name)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of last use, for eviction
        return content

    def _write(self, key: str, content: bytes) -> None:
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as part:
                try:
                    part.write(_head(key, content) + content)
                    part.close()
                    os.replace(part.name, self._path(key))
                except BaseException:
                    os.unlink(part.name)
                    raise
        except OSError as error:
            _unwritable(self.folder, error.strerror)
            return
        self._evict(keep=key)

    def _evict(self, keep: str) -> None:
        """Remove entries down to the limit, least recently used first. A file that another process
        removes first, or that belongs to another user, is skipped.
        """
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.limit:
                break
            if path != self._path(keep):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    total -= size
        for path in self.folder.glob("*.part"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE:
                    path.unlink()

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                yield stat.st_mtime, stat.st_size, path

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """Keep other processes and threads from building ``key``, if the lock can be had."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                # A few lock files for all keys, as nobody could safely remove one per key.
                lock = stack.enter_context((self.folder / f"lock-{key[:1]}").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                _unwritable(self.folder, error.strerror)
            yield


def default() -> Cache:
    """The user's cache, in the folder that ``RECAST_CACHE`` names at present."""
    return Cache(build_cache.folder() / "cuda")


def facts() -> dict[str, Any]:
    """For ``recast env``: the folder, what is in it, and the limit."""
    entries, size = default().size()
    folder = f"{build_cache.said()}/cuda"
    return {"folder": folder, "entries": entries, "bytes": size, "limit": LIMIT}


def binary(program: nvrtc.Program, arch: str) -> nvrtc.Binary:
    """``nvrtc.compile(program, arch)``, from the cache if it is there.

    The compiler's log is cached too. Raises what :func:`.nvrtc.compile` raises.
    """

    def build() -> bytes:
        made = nvrtc.compile(program, arch)
        about = json.dumps({"symbols": dict(made.symbols), "log": made.log}).encode()
        return len(about).to_bytes(8, "little") + about + made.cubin

    content = default().fetch(key(program, arch), build)
    end = 8 + int.from_bytes(content[:8], "little")
    about = json.loads(content[8:end])
    return nvrtc.Binary(content[end:], about["symbols"], about["log"])


def key(program: nvrtc.Program, arch: str) -> str:
    """A digest of all that the machine code depends on; the names of folders do not matter."""
    asked = (_MAGIC.decode(), nvrtc.version(), nvrtc.flags(program, arch), program.kernels)
    digest = hashlib.sha256(json.dumps(asked).encode())
    for name, content in _texts(program):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:40]


# ---------------------------------------------------------------- what a source includes


def _texts(program: nvrtc.Program) -> Iterator[tuple[str, bytes]]:
    """The source, then each header that it may include, under any condition; with contents."""
    folders = nvrtc.include_folders(program)
    yield "", program.source.read_bytes()
    seen: set[str] = set()
    waiting = list(_included(program.source.read_bytes()))
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            continue  # its condition does not hold, or else the compiler will complain
        stat = path.stat()
        content, further = _header(path, stat.st_mtime_ns, stat.st_size)
        yield name, content
        waiting.extend(further)


@lru_cache(maxsize=256)
def _header(path: Path, modified: int, size: int) -> tuple[bytes, tuple[str, ...]]:
    content = path.read_bytes()
    return content, tuple(_included(content))


def _included(text: bytes) -> Iterator[str]:
    for match in re.finditer(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', text, re.M):
        yield match[1].decode(errors="replace")


def _head(key: str, content: bytes) -> bytes:
    """The first bytes of an entry; they do not match in a truncated or misnamed file."""
    return _MAGIC + hashlib.sha256(key.encode() + b"\0" + content).digest()


@cache
def _unwritable(folder: Path, why: str | None) -> None:
    """Log a warning, once per process, folder and reason."""
    _log.warning("compiled kernels cannot be kept in %s: %s", folder, why)
