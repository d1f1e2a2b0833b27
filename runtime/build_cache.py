"""The folder of compiled code: where it is, who may write there, and what is removed from it.

It holds the CPU kernels, in a folder for each state of their sources; the objects that they are
linked from (``objects-*``); the kernels that tests compile for the emulator (``simt``); and those
of GPUs (``cuda``), which :mod:`~recast.runtime.gpu.kernel_cache` looks after. Of the others, what
was used longest ago is removed above :data:`LIMIT` bytes, but nothing that was used within a day,
as a process may be about to read it. Who writes holds a lock on the folder that all may share; who
removes needs it alone, or removes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 2_000_000_000  # bytes; a build takes 4 to 90 MB, what all tests compile less than 1 GB
_STALE = 86_400.0  # seconds
# ``RECAST_CACHE`` may name a folder with other things in it.
_BUILD = re.compile(r"(objects-|ahead-)?[0-9a-f]{16}")
_EMULATED = re.compile(r"[0-9a-f]{20}[-.].*")


class Entry(NamedTuple):
    """A folder of a build, or a file of the emulator."""

    used: float
    size: int
    path: Path


def folder() -> Path:
    """Where compiled code is kept: ``RECAST_CACHE``, or the user's own cache folder."""
    if named := os.environ.get("RECAST_CACHE"):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "recast"


def said() -> str:
    """The same by its variable, to hide the user's name."""
    variables = ("RECAST_CACHE", "$RECAST_CACHE"), ("XDG_CACHE_HOME", "$XDG_CACHE_HOME/recast")
    return next((said for name, said in variables if os.environ.get(name)), "~/.cache/recast")


@contextlib.contextmanager
def alone(part: Path, lock: str = "lock") -> Iterator[None]:
    """As the only process that writes into a part of the folder, and while nothing is removed."""
    part.parent.mkdir(parents=True, exist_ok=True)
    with (part.parent / "lock").open("w") as all_of_it:
        fcntl.flock(all_of_it, fcntl.LOCK_SH)
        part.mkdir(exist_ok=True)
        with (part / lock).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def used(path: Path) -> None:
    """Note the time of use, if the folder can be written."""
    with contextlib.suppress(OSError):
        os.utime(path)


def prune() -> None:
    """Remove what is above the limit, and what processes left that were killed while they built."""
    with contextlib.suppress(OSError), (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else somebody writes
        entries, stale = sorted(_entries()), time.time() - _STALE
        total = sum(entry.size for entry in entries)
        for last, size, path in entries:
            if total > LIMIT and last < stale:
                total -= size
                _remove(path)
            elif path.is_dir():
                for left in path.glob("tmp*"):
                    if left.stat().st_mtime < stale:
                        _remove(left)


def facts() -> dict[str, Any]:
    """For ``recast env``."""
    size = sum(entry.size for entry in _entries())
    return {"folder": said(), "bytes": size, "limit": LIMIT}


def _entries() -> Iterator[Entry]:
    root = folder()
    builds = (path for path in root.glob("*") if _BUILD.fullmatch(path.name) and path.is_dir())
    emulated = (path for path in root.glob("simt/*") if _EMULATED.fullmatch(path.name))
    for path in (*builds, *emulated):
        with contextlib.suppress(OSError):  # such as of a file that is renamed meanwhile
            inside = path.rglob("*") if path.is_dir() else (path,)
            size = sum(file.stat().st_size for file in inside)
            yield Entry(path.stat().st_mtime, size, path)


def _remove(path: Path) -> None:
    """What belongs to another user stays."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
