"""Compiled kernels on disk, shared by all processes of a user.

An entry is a file named by its key, a digest of everything the machine code depends on: the source,
every header it reaches, the compiler's options, the architecture and NVRTC's version. It begins
with a checksum over key and content, and one that does not fit is thrown away and built anew. A
file appears whole, by a rename. Processes that want the same entry at the same time build it once:
the others wait on a lock. Where the folder cannot be written, kernels are built in each process.

The folder is ``cuda`` in the cache folder of :mod:`recast.runtime.device` (``RECAST_CACHE``). Past
:data:`LIMIT` bytes the entries that were not used for longest go.
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

from recast.runtime import device
from recast.runtime.gpu import nvrtc

LIMIT = 256_000_000  # bytes; a kernel is some 5 to 50 kB
_MAGIC = b"recast-1"  # changes with the form of an entry
_SUFFIX = ".kernel"
_STALE = 3600.0  # seconds after which a half-written file belongs to nobody
_log = logging.getLogger("recast")


@dataclass(frozen=True)
class Cache:
    """A folder of byte strings by key, at most ``limit`` bytes of them (but always the newest)."""

    folder: Path
    limit: int = LIMIT

    def fetch(self, key: str, build: Callable[[], bytes]) -> bytes:
        """The content of ``key``: from disk, else from ``build()``, which is kept.

        What ``build`` raises is passed on; a folder that cannot be written is no error.
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
            os.utime(path)  # used just now: last to be evicted
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
        """Down to the limit, oldest use first; losing a race for a file to another is fine, and so
        is an entry of another user, who alone may remove it.
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
        """No other process or thread builds ``key`` meanwhile; without a usable lock, one may."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                # A handful of lock files for all keys: one for each would never be removed.
                lock = stack.enter_context((self.folder / f"lock-{key[:1]}").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                _unwritable(self.folder, error.strerror)
            yield


def default() -> Cache:
    """The user's cache, where ``RECAST_CACHE`` says now."""
    return Cache(device.cache_folder() / "cuda")


def facts() -> dict[str, Any]:
    """For ``recast env``: the folder as its variable names it (no user's name), size and bound."""
    variables = ("RECAST_CACHE", "$RECAST_CACHE"), ("XDG_CACHE_HOME", "$XDG_CACHE_HOME/recast")
    root = next((said for name, said in variables if os.environ.get(name)), "~/.cache/recast")
    entries, size = default().size()
    return {"folder": f"{root}/cuda", "entries": entries, "bytes": size, "limit": LIMIT}


def binary(program: nvrtc.Program, arch: str, cache: Cache | None = None) -> nvrtc.Binary:
    """``nvrtc.compile(program, arch)``, or what it gave when it was last asked that.

    The log of a compilation is kept with it. Raises what :func:`.nvrtc.compile` does.
    """

    def build() -> bytes:
        made = nvrtc.compile(program, arch)
        about = json.dumps({"symbols": dict(made.symbols), "log": made.log}).encode()
        return len(about).to_bytes(8, "little") + about + made.cubin

    content = (cache or default()).fetch(key(program, arch), build)
    end = 8 + int.from_bytes(content[:8], "little")
    about = json.loads(content[8:end])
    return nvrtc.Binary(content[end:], about["symbols"], about["log"])


def key(program: nvrtc.Program, arch: str) -> str:
    """A digest of all that the machine code depends on; the folders' own names are not."""
    asked = (_MAGIC.decode(), nvrtc.version(), nvrtc.flags(program, arch), program.kernels)
    digest = hashlib.sha256(json.dumps(asked).encode())
    for name, content in _texts(program):
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:40]


# ---------------------------------------------------------------- what a source includes


def _texts(program: nvrtc.Program) -> Iterator[tuple[str, bytes]]:
    """The source, then each header it reaches by whatever condition, with its content."""
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
            continue  # behind a condition that does not hold, or the compiler will say so
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
    """What an entry begins with; a file under another's name or cut short does not fit it."""
    return _MAGIC + hashlib.sha256(key.encode() + b"\0" + content).digest()


@cache
def _unwritable(folder: Path, why: str | None) -> None:
    """Told once a process, for one reason."""
    _log.warning("compiled kernels cannot be kept in %s: %s", folder, why)
