"""The folder of a checkpoint: written next to its final place, renamed when complete, verified when
read.

``manifest.json`` is written last and names every other file with its size and SHA-256. A folder
without it was never finished. Whatever is being written, replaced or removed has a name that starts
with a dot, so after a crash at any moment ``find`` still finds the last good checkpoint. Those of
one save name its process, so that of two saves to one path neither removes what the other needs.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from recast.errors import CheckpointError, UsageError

FORMAT, VERSION = "recast-checkpoint", 1
MANIFEST = "manifest.json"
REST = "rest.pt"  # all that is not a tensor of the model or of the optimizer
_STEP = re.compile(r"step-(\d{10,})")
_OWNER = re.compile(r"\.(?:saving|previous)-(\w+)-(\d+)-\w+$")  # machine and pid of a save
_CHUNK = 1 << 22
_LITTLE = 1 << 20  # bytes: a disk with less free space counts as full
_SILENT = 3600.0  # seconds without a write after which a save elsewhere counts as given up


def target(path: Path, step: int | None, keep: int | None) -> Path:
    """Where a checkpoint goes: ``path`` itself, or a folder in it for the step.

    Raises:
        UsageError: ``keep`` without ``step``, or a ``step`` that is not a whole number.
        CheckpointError: something else is there.
    """
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise UsageError(f"checkpoint.save: step={step!r} is not a whole number")
    if keep is None:
        if any(path.glob("step-*")):
            raise CheckpointError(
                f"{path} holds a checkpoint for each of several steps",
                tries=("keep=2", "a new path"),
            )
        place = path
    elif keep < 1 or step is None or step < 0:
        raise UsageError(
            f"checkpoint.save: keep={keep} with step={step}",
            why="the last `keep` checkpoints stay, and they are told apart by their step",
            tries=("step=number_of_steps_done, keep=2",),
        )
    elif (path / MANIFEST).exists():
        raise CheckpointError(
            f"{path} is one checkpoint, not a folder of them", tries=("a new path",)
        )
    else:
        place = path / f"step-{step:010}"
    if place.exists() and not (place.is_dir() and _ours(place)):
        raise CheckpointError(
            f"{place} is there, and is no checkpoint: it is not overwritten", tries=("a new path",)
        )
    return place


def _ours(place: Path) -> bool:
    try:
        return (place / MANIFEST).exists() or not any(place.iterdir())
    except FileNotFoundError:  # another save is replacing it
        return True


def begin(place: Path) -> tuple[Path, bytes | None]:
    """A new folder beside ``place``, and what stands there now: see :func:`commit`. Removes what an
    earlier crash has left, but nothing that another process may still be writing.
    """
    standing = _standing(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{place} cannot be written", why=str(error.strerror)) from error
    name = "step-*" if _STEP.fullmatch(place.name) else glob.escape(place.name)
    unfinished = filter(_given_up, place.parent.glob(f".{name}.saving-*"))
    for left in (*unfinished, *place.parent.glob(f".{name}.removed")):
        shutil.rmtree(left, ignore_errors=True)
    owner = f"{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    folder = place.parent / f".{place.name}.saving-{owner}"
    try:
        folder.mkdir()
    except OSError as error:
        raise CheckpointError(f"{place} cannot be written", why=str(error.strerror)) from error
    return folder, standing


def _standing(place: Path) -> bytes | None:
    """The manifest at ``place``, by which a checkpoint is known; None if there is none."""
    try:
        return (place / MANIFEST).read_bytes()
    except OSError:
        return None


def _given_up(folder: Path) -> bool:
    """Whether the process that began a save is gone, or, as one elsewhere cannot be asked, has
    written nothing for long.
    """
    owner = _OWNER.search(folder.name)
    if owner and owner[1] == _machine() and not Path("/proc", owner[2]).exists():
        return True
    try:
        last = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # it is being renamed or removed
        return False
    return time.time() - last > _SILENT


@cache
def _machine() -> str:
    """A word for the processes among which a pid names one: of a machine, and of a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return uuid.uuid4().hex[:8]  # nobody else's: nothing is known of them
    return hashlib.sha256(f"{boot}{space}".encode()).hexdigest()[:8]


def commit(folder: Path, place: Path, manifest: dict[str, Any], standing: bytes | None) -> None:
    """Write the manifest and move ``folder`` to ``place``. At every moment a good checkpoint is
    there.

    Raises:
        CheckpointError: at ``place`` is another checkpoint than ``standing``, the one that
            :func:`begin` saw: of two saves at a time the first stays.
    """
    manifest = {**manifest, "format": FORMAT, "version": VERSION}
    with open(folder / MANIFEST, "w") as file:
        json.dump({**manifest, "sha256": _digest(manifest)}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    previous = place.parent / folder.name.replace(".saving-", ".previous-")
    try:
        with suppress(FileNotFoundError):
            os.rename(place, previous)
        if previous.exists() and _standing(previous) != standing:
            raise _overtaken(place)
        _move(folder, place)
    except BaseException:
        with suppress(OSError):  # there is a newer one, or nothing was moved
            os.rename(previous, place)
        shutil.rmtree(previous, ignore_errors=True)
        raise
    _sync(place.parent)
    shutil.rmtree(previous, ignore_errors=True)
    _clear(place.parent, glob.escape(place.name))


def _move(folder: Path, place: Path) -> None:
    try:
        os.rename(folder, place)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # it was put there a moment ago
            raise _overtaken(place) from error
        raise


def _overtaken(place: Path) -> CheckpointError:
    return CheckpointError(
        f"{place} is not saved: another save was writing there at the same time",
        why="it was done first, and its checkpoint is whole; the two are not mixed",
        tries=(
            "one save at a time, or a path for each",
            "in the ranks of one model: dist.init_process_group before",
        ),
    )


def _clear(path: Path, name: str) -> None:
    """Remove what crashed saves moved away, as there is a complete one of that ``name`` now."""
    for left in filter(_given_up, path.glob(f".{name}.previous*")):
        shutil.rmtree(left, ignore_errors=True)


def prune(path: Path, keep: int) -> None:
    """Remove all steps in ``path`` but the last ``keep``."""
    for place in _steps(path)[:-keep]:
        gone = place.parent / f".{place.name}.removed"
        with suppress(FileNotFoundError):  # another save removed it
            os.rename(place, gone)
        shutil.rmtree(gone, ignore_errors=True)
    _clear(path, "step-*")


def find(path: Path) -> Path:
    """The folder of the checkpoint at ``path``: itself, its last step, or, if a crash came between
    two renames, the one that was being replaced.

    Raises:
        CheckpointError: there is none.
    """
    for place in (path, *_last_first(path), *_previous(path)):
        if (place / MANIFEST).exists():
            return place
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}", why="there is no such folder")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, not the folder of a checkpoint")
    if (path / REST).exists():
        raise _broken(path, MANIFEST, "is missing")
    unfinished = (path / ".metadata").exists()
    raise CheckpointError(
        f"{path} is not a checkpoint of recast: it has no {MANIFEST}",
        why="torch.distributed.checkpoint wrote it" if unfinished else "",
        tries=("torch.distributed.checkpoint.load",) if unfinished else (),
    )


def room(folder: Path) -> str:
    """A clause for an error if the disk is full, else "": torch reports only that a file is too
    short.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"its disk is full: {free:,} bytes are free" if free < _LITTLE else ""


def _steps(path: Path) -> list[Path]:
    """The complete folders of steps, in order."""
    found = [(int(m[1]), p) for p in path.glob("step-*") if (m := _STEP.fullmatch(p.name))]
    return [p for _, p in sorted(found) if (p / MANIFEST).exists()]


def _last_first(path: Path) -> Iterator[Path]:
    """Where a step may be, from the last on: after each its previous save, which a crash may have
    left without the new one.
    """
    found = {(int(m[1]), m[0]) for p in path.glob("*step-*") if (m := _STEP.search(p.name))}
    for _, name in sorted(found, reverse=True):
        yield path / name
        yield from _previous(path / name)


def _previous(place: Path) -> list[Path]:
    """What saves to ``place`` have moved away, the newest first."""

    def saved(moved: Path) -> float:
        try:
            return (moved / MANIFEST).stat().st_mtime
        except OSError:
            return 0.0

    moved = place.parent.glob(f".{glob.escape(place.name)}.previous*")
    return sorted(moved, key=saved, reverse=True)


# --- what is in it -------------------------------------------------------------------------------


def facts(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, and check that all files are there with their sizes.

    Raises:
        CheckpointError: it names the file and what is wrong.
    """
    at = folder / MANIFEST
    try:
        data = json.loads(at.read_text())
    except (OSError, ValueError) as error:
        raise _broken(folder, MANIFEST, f"cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{at} is not of a checkpoint of recast")
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} has version {data.get('version')} of the format",
            why=f"this recast reads version {VERSION}",
            tries=("the recast that wrote it",),
        )
    if data.pop("sha256", None) != _digest(data):
        raise _broken(folder, MANIFEST, "is not what was written: its checksum differs")
    for name, known in data["files"].items():
        if not (folder / name).exists():
            raise _broken(folder, name, "is missing")
        size = (folder / name).stat().st_size
        if size != known["bytes"]:
            raise _broken(folder, name, f"has {size} bytes, and had {known['bytes']}")
    return data


def prove(folder: Path, data: dict[str, Any], share: int = 0, of: int = 1) -> None:
    """Verify the checksums of every ``of``-th file, from number ``share`` on. Raises
    CheckpointError, which names the file.
    """
    for name in sorted(data["files"])[share::of]:
        if facts(folder / name)["sha256"] != data["files"][name]["sha256"]:
            raise _broken(folder, name, "is not what was written: its checksum differs")


def _broken(folder: Path, name: str, what: str) -> CheckpointError:
    others = [p for p in _steps(folder.parent) if p != folder]
    tries = (f"an older one: {others[-1]}",) if others else ("a copy of it, or an older one",)
    return CheckpointError(f"{folder / name} {what}", why="the checkpoint is damaged", tries=tries)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
