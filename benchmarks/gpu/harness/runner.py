"""Runs groups in processes of their own, within a time budget.

A crash, an item that takes longer than its ``limit``, or an error that leaves the CUDA context
unusable costs one item: it is recorded as failed, and the rest goes on in a new process. Processes
lead process groups of their own, so that whatever they have started (a sanitizer, pytest, a
compiler's workers) ends with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from gpu import ROOT
from gpu.harness import item_log
from gpu.harness.item_log import DIED_IN_ITEM, SO_FAR, STARTED, Row
from gpu.harness.items import LIMIT, REST
from gpu.harness.progress import Progress
from gpu.harness.worker import PARENT

_RESTARTS = 6
_OVER = "the time was over"


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
            item_log.drop_failures(file)
        else:
            file.unlink(missing_ok=True)
        if progress is not None:
            progress.taken_over(name, [{"group": name, **row} for row in item_log.read(file)])
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


def end_on_sigterm() -> None:
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
    for _ in () if item_log.is_complete(file) else range(_RESTARTS):
        left = deadline - time.monotonic()
        if left <= 1 or _stopped.is_set():
            ended = _OVER
            break
        known = _begun(item_log.read(file))
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
        rows = item_log.read(file)
        if _begun(rows) == known:  # nothing at all: a new process would do no better
            break
        if rows[-1].get("detail") == DIED_IN_ITEM:
            told = f"{DIED_IN_ITEM} with status {status}: {words}"[:800]
            item_log.add(file, {"name": rows[-1]["name"], "status": "failed", "detail": told})
    rows = item_log.read(file)
    if ended == _OVER:
        rows = [
            r | {"detail": f"{ended} in it"} if r.get("detail") == DIED_IN_ITEM else r for r in rows
        ]
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
    deadline, known, watchdog = time.monotonic() + left, len(item_log.ended(file)), _Watchdog()
    child = subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, env={**env, PARENT: str(os.getpid())},
        cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.05, min(0.5, deadline - time.monotonic())))
            status = child.poll()
            why = None if status is not None else watchdog.why(item_log.lines(file))
            if why is not None:
                _end(child)
                item_log.add(file, why)
                status = child.returncode
            rows = item_log.ended(file)
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


class _Watchdog:
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
