"""Runs the items of a group, in a process of its own.

The process writes a line before and after every item (``item_log``). An error that leaves the CUDA
context unusable ends it, and the runner starts another for the rest.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from gpu import ROOT
from gpu.harness import item_log
from gpu.harness.item_log import SO_FAR, STARTED, WHOLE, Row
from gpu.harness.items import Group, Item, Skip
from recast.errors import RecastWarning

POISONED = 75  # exit status of a child whose CUDA context is unusable
_EMULATED = 8  # times longer it may on the emulator
PARENT = "RECAST_GPU_PARENT"  # the process that waits for a child
_report: Callable[[Sequence[object]], None] | None = None


def report_so_far(rows: Sequence[object]) -> None:
    """Keep what the running item has found so far, in case it does not end."""
    if _report is not None:
        _report(rows)


def work(
    group: Group, file: Path, device: torch.device, tiny: bool, only: str | None,
    also: Callable[[], Mapping[str, object]] = dict, patience: float = 1.0,
) -> int:  # fmt: skip
    """Run the items of ``group`` that ``file`` does not hold yet; returns the exit status.

    ``also``: recorded with each item when it ends. ``patience``: a factor for all limits.
    """
    global _report
    _end_with_parent()
    item_log.trim(file)
    done = {row["name"] for row in item_log.read(file)}
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
            _report = partial(tell, item.name)
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
    if os.environ.get(PARENT) != str(parent) or os.getpgrp() != os.getpid():
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
            row |= {"status": "failed", "detail": _error_text(error)}
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


def _error_text(error: Exception) -> str:
    """The error, and the last lines of its traceback in this repository."""
    lines = [line for line in str(error).splitlines() if line.strip()][:6]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if str(ROOT) in f.filename]
    at = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-3:]]
    return f"{type(error).__name__}: {' | '.join(lines)} ({' < '.join(reversed(at))})"[:4000]
