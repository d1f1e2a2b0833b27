"""Checks and measurements of a GPU in processes of their own, within a time budget.

A group is a function that yields named items. Each group runs in a child process, which writes a
line before and after every item; so a crash, an item that takes longer than its ``limit``, or an
error that leaves the CUDA context unusable costs one item: it is recorded as failed, and the rest
goes on in a new process. Children lead process groups of their own, so that whatever they have
started (a sanitizer, pytest, a compiler's workers) ends with them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import gpu_lines
import torch
from gpu_lines import IN_IT, SO_FAR, STARTED, WHOLE, Row
from gpu_progress import Progress

from recast.errors import RecastWarning

ROOT = Path(__file__).resolve().parent.parent
POISONED = 75  # exit status of a child whose CUDA context is unusable
LIMIT = 120.0  # seconds that an item may take
_EMULATED = 8  # times longer it may on the emulator
_RESTARTS = 6
_PARENT = "RECAST_GPU_PARENT"  # the process that waits for a child
_OVER = "the time was over"
REST = "(all of the rest)"  # the name of a row for all items of which nothing is known


class Item(NamedTuple):
    """One thing to check or to measure: ``run()`` raises, or returns what is to be recorded.

    limit: seconds after which its process is ended, whatever it is doing.
    """

    name: str
    run: Callable[[], Mapping[str, object] | None]
    limit: float = LIMIT


class Skip(Exception):
    """Why an item cannot be run here."""


Group = Callable[[torch.device, bool], Iterable[Item]]  # the device, and whether sizes are tiny


# ---------------------------------------------------------------- in the child


_tell: Callable[[Sequence[object]], None] | None = None


def so_far(rows: Sequence[object]) -> None:
    """Keep what the running item has found so far, in case it does not end."""
    if _tell is not None:
        _tell(rows)


def work(
    group: Group, file: Path, device: torch.device, tiny: bool, only: str | None,
    also: Callable[[], Mapping[str, object]] = dict, patience: float = 1.0,
) -> int:  # fmt: skip
    """Run the items of ``group`` that ``file`` does not hold yet; returns the exit status.

    ``also``: recorded with each item when it ends. ``patience``: a factor for all limits.
    """
    global _tell
    _end_with_parent()
    gpu_lines.trim(file)
    done = {row["name"] for row in gpu_lines.read(file)}
    with file.open("a") as out:

        def say(row: Mapping[str, object]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        def tell(name: str, rows: Sequence[object]) -> None:
            say({"name": name, "status": SO_FAR, "rows": rows})

        for item in group(device, tiny):
            if item.name in done or (only is not None and not re.search(only, item.name)):
                continue
            limit = item.limit * patience * (_EMULATED if tiny else 1)
            say({"name": item.name, "status": STARTED, "limit": limit})
            _tell = partial(tell, item.name)
            row, dead = _run(item, device)
            say({**row, **also()})
            if dead:
                return POISONED
            gc.collect()  # models of one item leave no room for those of the next
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if only is None:
            say({"status": WHOLE})
    return 0


def _end_with_parent() -> None:
    """If the parent dies, end this process and all it has started: it leads a group of its own,
    which nothing else would end, and holds the GPU.
    """
    parent = os.getppid()
    if os.environ.get(_PARENT) != str(parent) or os.getpgrp() != os.getpid():
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _run(item: Item, device: torch.device) -> tuple[Row, bool]:
    started, dead = time.perf_counter(), False
    row: Row = {"name": item.name, "status": "ok"}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", RecastWarning)
        try:
            row.update(item.run() or {})
            _settle(device)
        except Skip as why:
            row |= {"status": "skipped", "detail": str(why)}
        except Exception as error:
            row |= {"status": "failed", "detail": _told(error)}
            try:
                _settle(device)
            except Exception:
                dead = True
    own = (w.message for w in heard if issubclass(w.category, RecastWarning))
    if said := list(dict.fromkeys(str(message).splitlines()[0][:300] for message in own)):
        row["warned"] = said[:8]
    return row | {"seconds": round(time.perf_counter() - started, 3)}, dead


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _told(error: Exception) -> str:
    """The error, and the last lines of its traceback in this repository."""
    lines = [line for line in str(error).splitlines() if line.strip()][:6]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if str(ROOT) in f.filename]
    at = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-3:]]
    return f"{type(error).__name__}: {' | '.join(lines)} ({' < '.join(reversed(at))})"[:4000]


# ---------------------------------------------------------------- in the parent


def run(
    script: Path,
    names: Sequence[str],
    folder: Path,
    *,
    budget: float,
    jobs: int,
    options: Sequence[str] = (),
    progress: Progress | None = None,
    resume: bool = False,
    more: Mapping[str, str] | None = None,
) -> list[Row]:
    """Run each group in children of ``script`` for ``budget`` seconds in all; rows of all items.

    ``progress`` is told of them as they end. ``resume``: results of an earlier call in ``folder``
    are taken over, except failures. ``more``: variables for the children's environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + budget
    # References run on the CPU: the children share its cores.
    env = environment() | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    env |= more or {}

    def group(name: str) -> list[Row]:
        rows = _group(script, name, folder, deadline, options, env, progress)
        if progress is not None:
            progress.group(name, rows)
        return rows

    for name in names:
        file = folder / f"{name}.jsonl"
        if resume:
            gpu_lines.ended_well(file)
        else:
            file.unlink(missing_ok=True)
        if progress is not None:
            progress.taken_over(name, [{"group": name, **row} for row in gpu_lines.read(file)])
    _stopped.clear()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(group, name) for name in names]
        try:
            return [row for future in futures for row in future.result()]
        except BaseException:  # Ctrl-C, or told to end: groups of processes do not hear of it
            _stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


_stopped = threading.Event()


def ends_when_told() -> None:
    """Let SIGTERM raise SystemExit, so that :func:`run` ends its children."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _group(
    script: Path, name: str, folder: Path, deadline: float, options: Sequence[str],
    env: Mapping[str, str], progress: Progress | None,
) -> list[Row]:  # fmt: skip
    file, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    command = [sys.executable, str(script), "--group", name, "--lines", str(file), *options]
    left = deadline - time.monotonic()
    ended = ""
    for _ in () if gpu_lines.is_whole(file) else range(_RESTARTS):
        left = deadline - time.monotonic()
        if left <= 1 or _stopped.is_set():
            ended = _OVER
            break
        known = _begun(gpu_lines.read(file))
        with log.open("a") as out:
            before = out.tell()
            status = _watched(command, out, file, left, env, name, progress)
        if status is None:
            ended = _OVER
            break
        if status == 0:
            ended = ""
            break
        words = _last_words(log.read_bytes()[before:].decode(errors="replace"))
        ended = f"the process ended with status {status}: {words}"[:800]
        rows = gpu_lines.read(file)
        if _begun(rows) == known:  # nothing at all: a new process would do no better
            break
        if rows[-1].get("detail") == IN_IT:
            told = f"{IN_IT} with status {status}: {words}"[:800]
            gpu_lines.add(file, {"name": rows[-1]["name"], "status": "failed", "detail": told})
    rows = gpu_lines.read(file)
    if ended == _OVER:
        rows = [r | {"detail": f"{ended} in it"} if r.get("detail") == IN_IT else r for r in rows]
    if ended:
        rows.append({"name": REST, "status": "failed", "detail": ended})
    return [{"group": name, **row} for row in rows]


def _begun(rows: Sequence[Row]) -> int:
    """How many items are."""
    return sum(row["name"] != _BETWEEN["name"] for row in rows)


def _last_words(log: str) -> str:
    """What a process said at its end; for a crash, the beginning of Python's report."""
    at = log.rfind("Fatal Python error")
    said = [line.strip() for line in log[max(at, 0) :].splitlines() if line.strip()]
    return " | ".join(said[:6] if at >= 0 else said[-3:])


def _watched(
    command: Sequence[str], out: IO[str], file: Path, left: float, env: Mapping[str, str],
    name: str, progress: Progress | None,
) -> int | None:  # fmt: skip
    """Run a child and report its items; its exit status, or None if the time ran out.

    A child that takes too long over one item is ended, and the item recorded as failed.
    """
    deadline, known, slow = time.monotonic() + left, len(gpu_lines.ended(file)), _Slow()
    child = subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, env={**env, _PARENT: str(os.getpid())},
        cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.05, min(0.5, deadline - time.monotonic())))
            status = child.poll()
            why = None if status is not None else slow.why(gpu_lines.lines(file))
            if why is not None:
                _end(child)
                gpu_lines.add(file, why)
                status = child.returncode
            rows = gpu_lines.ended(file)
            if progress is not None:
                for row in rows[known:]:
                    progress.item({"group": name, **row})
            known = len(rows)
            if status is not None:
                return status
            if time.monotonic() >= deadline or _stopped.is_set():
                return None
    finally:
        _end(child)


# The time before a process's first item, and between two: it may build the extension.
_BETWEEN: Row = {"name": "(between items)", "limit": LIMIT}


class _Slow:
    """Whether the running item takes longer than it may."""

    def __init__(self) -> None:
        self._at, self._since = -1, time.monotonic()

    def why(self, rows: Sequence[Row]) -> Row | None:
        """The row of an item that does, to be recorded; ``rows``: all lines so far."""
        rows = [row for row in rows if row["status"] != SO_FAR]
        if len(rows) != self._at:
            self._at, self._since = len(rows), time.monotonic()
        last = rows[-1] if rows and rows[-1]["status"] == STARTED else _BETWEEN
        limit = float(last.get("limit", LIMIT))
        if time.monotonic() - self._since < limit:
            return None
        told = f"it took more than {limit:.0f} s and was ended"
        return {"name": last["name"], "status": "failed", "detail": told, "seconds": limit}


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def program(asked: Sequence[str], seconds: float, **more: str) -> tuple[int | str, str]:
    """A program's exit status and output; it is ended after so many ``seconds``.

    It is first asked to end, as a killed launcher would leave its processes behind.
    """
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(
            asked, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment() | more
        )
        try:
            status: int | str = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"none after {seconds:.0f} s"
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        return status, out.read().strip()


def environment() -> dict[str, str]:
    """Of a child: this checkout on the path, one cache for all."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **told}
