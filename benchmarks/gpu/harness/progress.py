"""The results of a long run so far: reported and written as it goes, and resumed by the next.

A machine may be available for minutes only. So every finished item is in a file at once, groups are
reported when they end and failures when they happen, and the record is rewritten each time. A call
that resumes runs only what no earlier call has finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu import ROOT
from gpu.harness import item_log
from gpu.harness.item_log import Row

Record = Callable[[Sequence[Row], Sequence[str]], object]  # rows so far, groups still to come

_EVERY = 10.0  # seconds between two records, at least
_SOURCES = ("runtime", "rewriter", "passes", "csrc", "benchmarks", "examples")
_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh")


class Progress:
    """Tells rows as they come. ``record`` is called for what there is, now and then."""

    def __init__(self, names: Sequence[str], record: Record, *, each: bool = False) -> None:
        self._order, self._record, self._each = list(names), record, each
        self._rows: dict[str, list[Row]] = {}
        self._open = set(names)
        self._lock = threading.Lock()
        self._started, self._last = time.monotonic(), 0.0

    def taken_over(self, name: str, rows: Sequence[Row]) -> None:
        """``rows`` of a group are there from an earlier call."""
        self._rows[name] = list(rows)

    def item(self, row: Row) -> None:
        """One item has come to its end."""
        with self._lock:
            self._rows.setdefault(row["group"], []).append(row)
            if self._each or row["status"] == "failed":
                self._say(f"{row['group']}: {row['name']} {_words(row)}")
            if time.monotonic() - self._last > _EVERY:
                self._write()

    def group(self, name: str, rows: Sequence[Row]) -> None:
        """A group has: ``rows`` are all of it."""
        with self._lock:
            self._rows[name] = list(rows)
            self._open.discard(name)
            counts = {s: sum(r["status"] == s for r in rows) for s in ("ok", "failed", "skipped")}
            told = ", ".join(f"{n} {state}" for state, n in counts.items() if n)
            self._say(f"== {name}: {told or 'nothing'}; {len(self._open)} groups to go")
            self._write()

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._started:4.0f}s] {line}", flush=True)

    def _write(self) -> None:
        rows = [row for name in self._order for row in self._rows.get(name, [])]
        left = [name for name in self._order if name in self._open]
        try:
            self._record(rows, left)
        except Exception as error:  # the lines are there still: whoever measures goes on
            self._say(f"no record could be written: {type(error).__name__}: {error}")
        self._last = time.monotonic()


def _words(row: Row) -> str:
    """A row in a line: how it ended, and what was measured."""
    said = [row["status"], f"{row.get('seconds', 0)} s"]
    if row["status"] != "ok":
        said.append(str(row.get("detail", ""))[:300])
    by_case: dict[str, list[str]] = {}
    for line in row.get("rows", []):
        if "ms" in line:
            by_case.setdefault(line["case"], []).append(f"{line['variant']} {line['ms']}")
        elif "why not" in line:
            by_case.setdefault(line["case"], []).append(f"{line['variant']}: {line['why not']}")
    return "; ".join([" ".join(said), *(f"{c}: {', '.join(v)} ms" for c, v in by_case.items())])


# ---------------------------------------------------------------- taking up again


@contextlib.contextmanager
def results_folder(
    resume: Path | None, otherwise: Path | None, about: dict[str, Any]
) -> Iterator[tuple[Path, bool]]:
    """The folder where lines of items are kept, and whether those there are taken over.

    ``resume`` where it is given; else ``otherwise``, from which a later call may resume; else a
    temporary one. It is emptied where nothing is resumed, and where it is of another tree, machine
    or kind of run (``about``).
    """
    folder = resume or otherwise
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made), False
        return
    folder.mkdir(parents=True, exist_ok=True)
    mark, now = folder / "about.json", json.dumps({**about, "tree": tree()}, sort_keys=True)
    same = mark.exists() and mark.read_text() == now
    if resume is not None and mark.exists() and not same:
        print(f"{folder} is of another tree, machine or kind of run: it is begun anew", flush=True)
    if resume is None or not same:
        for file in (*folder.glob("*.jsonl"), *folder.glob("*.log")):
            file.unlink()
    item_log.replace(mark, now)
    yield folder, resume is not None


def tree() -> str:
    """What tells two states of the sources apart."""
    root, found = ROOT, hashlib.sha256()
    for name in _SOURCES:
        for path in sorted((root / name).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                found.update(path.relative_to(root).as_posix().encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:16]
