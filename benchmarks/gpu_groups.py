"""Checks and measurements of a GPU in processes of their own, within a budget of time.

A group is a function that yields named items. Each group runs in a child process, which writes a
line before and after every item; so a crash, an item that takes longer than its ``limit``, or an
error that leaves the CUDA context unusable costs one item: it is recorded as failed, and the rest
goes on in a new process. Children lead process groups of their own, so that what they have started
(a sanitizer, pytest, a compiler's workers) ends with them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple

import torch
from gpu_progress import Progress, Row, ended_well

ROOT = Path(__file__).resolve().parent.parent
POISONED = 75  # exit status of a child whose CUDA context is of no more use
LIMIT = 120.0  # seconds that an item may take
_EMULATED = 8  # times longer it may on the emulator
_RESTARTS = 6
_IN_IT = "the process ended in it"
_OVER = "the time was over"
REST = "(all of the rest)"  # the name of a row that stands for items of which nothing is known


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


def work(
    group: Group, file: Path, device: torch.device, tiny: bool, only: str | None,
    also: Callable[[], Mapping[str, object]] = dict,
) -> int:  # fmt: skip
    """Run the items of ``group`` that ``file`` does not hold yet; the exit status.

    ``also``: what is recorded with each item when it has ended.
    """
    done = {row["name"] for row in read(file)}
    with file.open("a") as out:

        def say(row: Mapping[str, object]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        for item in group(device, tiny):
            if item.name in done or (only is not None and not re.search(only, item.name)):
                continue
            limit = item.limit * (_EMULATED if tiny else 1)
            say({"name": item.name, "status": "started", "limit": limit})
            row, dead = _run(item, device)
            say(row | also())
            if dead:
                return POISONED
            gc.collect()  # models of one item leave no room for those of the next
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


def _run(item: Item, device: torch.device) -> tuple[Row, bool]:
    started, row, dead = time.perf_counter(), {"name": item.name, "status": "ok"}, False
    try:
        row |= item.run() or {}
        _settle(device)
    except Skip as why:
        row |= {"status": "skipped", "detail": str(why)}
    except Exception as error:
        row |= {"status": "failed", "detail": _told(error)}
        try:
            _settle(device)
        except Exception:
            dead = True
    return row | {"seconds": round(time.perf_counter() - started, 3)}, dead


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _told(error: Exception) -> str:
    """The error, and the last lines of its way through this repository."""
    lines = [line for line in str(error).splitlines() if line.strip()][:6]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if str(ROOT) in f.filename]
    at = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-3:]]
    return f"{type(error).__name__}: {' | '.join(lines)} ({' < '.join(reversed(at))})"[:1500]


# ---------------------------------------------------------------- in the parent


def read(file: Path) -> list[Row]:
    """What is known of every item, in order; one that began and did not end is a crash."""
    rows: dict[str, Row] = {}
    for row in _lines(file):
        if row["status"] == "started":
            row = {"name": row["name"], "status": "failed", "detail": _IN_IT}
        rows[row["name"]] = row
    return list(rows.values())


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

    ``progress`` is told of them as they end. ``resume``: what ``folder`` holds of an earlier call
    is taken over, but for what failed. ``more``: of the environment of the children.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + budget
    # References run on the CPU: the children share its cores.
    env = environment() | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    env |= more or {}

    def group(name: str) -> list[Row]:
        rows = _group(script, name, folder, deadline, options, env, progress, resume)
        if progress is not None:
            progress.group(name, rows)
        return rows

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
    env: Mapping[str, str], progress: Progress | None, resume: bool,
) -> list[Row]:  # fmt: skip
    file, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    if resume:
        ended_well(file)
    else:
        file.unlink(missing_ok=True)
    command = [sys.executable, str(script), "--group", name, "--lines", str(file), *options]
    left = deadline - time.monotonic()
    ended = ""
    for _ in range(_RESTARTS):
        left = deadline - time.monotonic()
        if left <= 1 or _stopped.is_set():
            ended = _OVER
            break
        known = len(read(file))
        with log.open("a") as out:
            status = _watched(command, out, file, left, env, name, progress)
        if status is None:
            ended = _OVER
            break
        if status == 0:
            ended = ""
            break
        tail = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        ended = f"the process ended with status {status}: {tail}"[:800]
        if len(read(file)) == known:  # nothing was even begun: a new process would do no better
            break
    rows = read(file)
    if ended == _OVER:
        rows = [r | {"detail": f"{ended} in it"} if r.get("detail") == _IN_IT else r for r in rows]
    if ended:
        rows.append({"name": REST, "status": "failed", "detail": ended})
    return [{"group": name, **row} for row in rows]


def _watched(
    command: Sequence[str], out: IO[str], file: Path, left: float, env: Mapping[str, str],
    name: str, progress: Progress | None,
) -> int | None:  # fmt: skip
    """Run a child; its exit status, or None where the time was over. Its items are told.

    One that is too long in one item is ended, and the item recorded as failed.
    """
    deadline, known, slow = time.monotonic() + left, len(_ended(file)), _Slow()
    child = subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
    )
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.05, min(0.5, deadline - time.monotonic())))
            status = child.poll()
            why = None if status is not None else slow.why(_lines(file))
            if why is not None:
                _end(child)
                _add(file, why)
                status = child.returncode
            rows = _ended(file)
            for row in rows[known:] if progress is not None else ():
                progress.item({"group": name, **row})
            known = len(rows)
            if status is not None:
                return status
            if time.monotonic() >= deadline or _stopped.is_set():
                return None
    finally:
        _end(child)


# What a process may take before its first item, and between two: it may build the extension.
_BETWEEN: Row = {"name": "(between items)", "limit": 2 * LIMIT}


class _Slow:
    """Whether the item at work takes longer than it may."""

    def __init__(self) -> None:
        self._at, self._since = -1, time.monotonic()

    def why(self, rows: Sequence[Row]) -> Row | None:
        """The row of an item that does, to be recorded; ``rows``: all lines so far."""
        if len(rows) != self._at:
            self._at, self._since = len(rows), time.monotonic()
        last = rows[-1] if rows and rows[-1]["status"] == "started" else _BETWEEN
        limit = float(last.get("limit", LIMIT))
        if time.monotonic() - self._since < limit:
            return None
        told = f"it took more than {limit:.0f} s and was ended"
        return {"name": last["name"], "status": "failed", "detail": told, "seconds": limit}


def _add(file: Path, row: Row) -> None:
    """A line more, behind what may be half a line of a process that was ended."""
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    file.write_text(whole + json.dumps(row) + "\n")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _ended(file: Path) -> list[Row]:
    """The items of which the end is known."""
    return [row for row in _lines(file) if row["status"] != "started"]


def _lines(file: Path) -> list[Row]:
    """All whole lines: a process may be killed while it writes one."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def program(asked: Sequence[str], seconds: float, **more: str) -> tuple[int | str, str]:
    """A program's exit status and what it said; after so many ``seconds`` it is ended."""
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(
            asked, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment() | more
        )
        try:
            status: int | str = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"none after {seconds:.0f} s"
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        return status, out.read().strip()


def environment() -> dict[str, str]:
    """Of a child: this checkout on the path, one cache for all."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


# ---------------------------------------------------------------- what it ran on


def machine(device: torch.device) -> dict[str, object]:
    """The GPU, its driver, and versions; nothing that names one particular computer."""
    import recast
    from recast.runtime.gpu import cuda_launch

    facts = cuda_launch.facts()
    found: dict[str, object] = {
        "gpu": "none: the emulator and torch on the CPU",
        "cpu cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvrtc": facts["nvrtc"],
        "driver": facts["driver"],
        "recast": recast.__version__,
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["gpu"] = about.name
        found["memory GiB"] = round(about.total_memory / 2**30, 1)
        found["multiprocessors"] = about.multi_processor_count
        found["driver"] = _driver() or found["driver"]
    return found


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip().splitlines()[0]


def write(
    folder: Path, name: str, title: str, on: Mapping[str, object], rows: Sequence[Row], text: str,
    missing: Sequence[str] = (), **more: object,
) -> Path:  # fmt: skip
    """Keep all rows as JSON and ``text`` as a page, ``<date>-<gpu>-<name>``; the page's path.

    ``missing``: what a whole record would have besides, so that this one cannot be taken for it.
    """
    date = datetime.now(UTC).date().isoformat()
    slug = re.sub(r"[^a-z0-9]+", "-", str(on["gpu"]).lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{date}-{slug}-{name}.json"
    held = {"date": date, "title": title, "machine": dict(on), "complete": not missing}
    held |= {"missing": list(missing), **more}
    lines = ",\n  ".join(json.dumps(row) for row in rows)  # one each: rounds are many numbers
    file.write_text(f'{json.dumps(held, indent=1)[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n')
    about = ", ".join(f"{k} {v}" for k, v in on.items() if v is not None)
    mark = "" if not missing else f"**Not complete**: no {'; no '.join(missing)}.\n\n"
    page = f"# {title}\n\n{date}; {about}\n\n{mark}{text}\n"
    file = file.with_suffix(".md")
    file.write_text(page)
    return file


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Markdown; all rows have the columns of the first."""
    if not rows:
        return "(nothing)"
    head = list(rows[0])
    cells = [head, *([str(row.get(k, "")) for k in head] for row in rows)]
    width = [max(len(line[k]) for line in cells) for k in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, width, strict=True)) + " |"
        for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *lines[1:]])


def missing() -> Iterator[str]:
    """What the machine lacks, each with the way to bring it."""
    import importlib.util

    from recast.runtime import device
    from recast.runtime.gpu import cublaslt, cuda_launch

    why = cuda_launch.why_not()
    if why is not None:
        yield f"kernels cannot be launched: {why}"
    # Built here, once, before the children begin: it takes longer than some of their items.
    if (why := device.why_missing()) is not None:
        yield f"no C++ extension, so no cublasLt either: {why}"
    elif (why := cublaslt.why_not()) is not None:
        yield f"no cublasLt: {why}"
    for package, use in (("pytest", "the tests marked gpu"), ("numpy", "torch's own needs")):
        if importlib.util.find_spec(package) is None:
            yield (
                f"no {package} ({use}): elsewhere `pip download {package} -d wheels`, here "
                f"`pip install --no-index --target site wheels/*.whl` and PYTHONPATH=site"
            )
