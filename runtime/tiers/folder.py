"""The folder of one table's disk tier, and which table owns it.

It holds ``tier.json``, which says so, ``lock``, locked while a process uses it, and ``rows``, the
files of RocksDB.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

from recast.errors import TierError, UsageError

_SIGN, _LOCK, _ROWS = "tier.json", "lock", "rows"
_OURS = {_SIGN, _LOCK, _ROWS}


def check(path: Path) -> None:
    """Raise UsageError or TierError if :func:`claim` would fail; changes nothing."""
    try:
        _check(path)
    except OSError as error:
        raise named(error, path) from error


def _check(path: Path) -> None:
    if not path.exists():
        parent = next(p for p in path.absolute().parents if p.exists())
        if not parent.is_dir():
            raise UsageError(f"a disk tier at {path}: {parent} is no folder")
        if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
            raise read_only(path)
        return
    if not path.is_dir():
        raise UsageError(f"a disk tier at {path}, which is no folder", tries=("another path",))
    found = sorted(p.name for p in path.iterdir())
    foreign = [name for name in found if name not in _OURS]
    if foreign or (found and not _is_signed(path)):
        raise UsageError(
            f"a disk tier at {path}, which holds {', '.join((foreign or found)[:4])}",
            why="these files are of no tier, and a tier would remove them",
            tries=("an empty folder, or a new one",),
        )
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        raise read_only(path)


def claim(path: Path, table: str) -> tuple[int, Path]:
    """Claim ``path`` for this process, and empty it. Returns the locked file, and the folder for
    rows.

    Raises:
        UsageError: another process uses it, or it contains something else.
        TierError: it cannot be written to.
    """
    check(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        sign = path / _SIGN
        if not sign.exists():
            sign.write_text(json.dumps({"recast": "disk tier", "table": table}))
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise named(error, path) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise UsageError(
            f"a disk tier at {path}: another table uses it",
            why="the folder is locked by a process that runs",
            tries=("another path", "end the other process"),
        ) from error
    try:
        empty(path / _ROWS)
    except OSError as error:
        os.close(lock)
        raise named(error, path) from error
    return lock, path / _ROWS


def empty(rows: Path) -> None:
    """Remove what an earlier use has left there."""
    if rows.exists():
        shutil.rmtree(rows)


def release(path: Path, lock: int) -> None:
    """Remove what :func:`claim` made."""
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def bytes_in(path: Path) -> int:
    """The size of all files in a folder; files that disappear meanwhile do not count."""
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
    return total


def read_only(path: Path) -> TierError:
    return TierError(
        f"a disk tier at {path} cannot be written to",
        why="the folder, or its file system, is read-only to this process",
        tries=("another path",),
    )


def named(error: OSError, path: Path) -> TierError:
    """An error of the file system as a TierError."""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return read_only(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(path, str(error))
    return TierError(f"a disk tier at {path} does not work: {error}")


def full(path: Path, why: str) -> TierError:
    return TierError(
        f"the disk of the tier at {path} is full",
        why=f"{why}; the rows are all still there, in memory or in its files",
        tries=("make room on that file system and call again", "recast.checkpoint.save elsewhere"),
    )


def _is_signed(path: Path) -> bool:
    try:
        told = json.loads((path / _SIGN).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.get("recast") == "disk tier"
