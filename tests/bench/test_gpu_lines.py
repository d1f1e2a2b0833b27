"""What an interrupted run leaves: lines of items, a record, and no process that holds the GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.harness import item_log, runner, worker
from gpu.harness.item_log import DIED_IN_ITEM, SO_FAR, STARTED
from gpu.harness.items import Item
from gpu.harness.progress import Progress

from recast.errors import RecastWarning

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def say(file: Path, *rows: dict[str, object], half: str = "") -> None:
    with file.open("a") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows) + half)


def test_lines_say_what_is_known_of_items(tmp_path: Path) -> None:
    """An item that fails keeps its intermediate results; half a line is ignored."""
    file, found = tmp_path / "a.jsonl", [{"case": "c", "ms": 1.0}]
    say(file, {"name": "a", "status": STARTED}, {"name": "a", "status": "ok", "n": 1})
    say(file, {"name": "b", "status": STARTED}, {"name": "b", "status": SO_FAR, "rows": found})
    say(file, half='{"name": "b", "sta')
    a, b = item_log.read(file)
    assert a == {"name": "a", "status": "ok", "n": 1}
    assert b == {"name": "b", "status": "failed", "detail": DIED_IN_ITEM, "rows": found}
    assert item_log.ended(file) == [a]
    item_log.add(file, {"name": "b", "status": "failed", "detail": "too long"})
    assert item_log.ended(file) == [a, b | {"detail": "too long"}]
    say(file, half="{")
    item_log.drop_failures(file)
    assert item_log.read(file) == [a] and file.read_text().endswith("}\n")
    say(file, {"name": "b", "status": STARTED}, {"name": "b", "status": SO_FAR, "rows": []})
    say(file, {"name": "b", "status": "ok", "rows": found})
    assert item_log.read(file)[1] == {"name": "b", "status": "ok", "rows": found}
    assert not item_log.is_complete(file)


def test_a_group_that_is_whole_needs_no_process(tmp_path: Path) -> None:
    """One in which something failed does; so does one of which only a part was asked for."""
    file = tmp_path / "a.jsonl"

    def fail() -> None:
        raise ValueError("once")

    for items, only, whole in (
        ([Item("a", lambda: None), Item("b", fail)], None, False),
        ([Item("a", fail), Item("b", lambda: None)], "b", False),
        ([Item("a", fail), Item("b", fail)], None, True),
    ):
        worker.work(lambda d, t, items=items: items, file, CPU, False, only)
        item_log.drop_failures(file)
        assert item_log.is_complete(file) == whole
    nobody = tmp_path / "no such script.py"
    rows = runner.run(nobody, ["a"], tmp_path, budget=9, jobs=1, resume=True)
    assert [(r["group"], r["name"], r["status"]) for r in rows] == [
        ("a", "a", "ok"),
        ("a", "b", "ok"),
    ]


def test_what_is_told_by_the_way_does_not_lengthen_a_limit() -> None:
    slow = runner._Watchdog()
    rows: list[dict[str, Any]] = [{"name": "a", "status": STARTED, "limit": 0.05}]
    assert slow.why(rows) is None
    time.sleep(0.06)
    rows.append({"name": "a", "status": SO_FAR, "rows": []})
    assert (slow.why(rows) or {})["name"] == "a"


def test_a_record_holds_what_an_earlier_call_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first record on, as this call may be cut too; failing to write one stops nothing."""
    say(tmp_path / "b.jsonl", {"name": "old", "status": "ok"}, {"name": "bad", "status": "failed"})
    seen: list[tuple[list[str], list[str]]] = []

    def record(rows: Sequence[dict[str, Any]], left: Sequence[str]) -> None:
        seen.append(([f"{r['group']} {r['name']}" for r in rows], list(left)))
        raise OSError("no space left")

    monkeypatch.setattr(runner, "_group", lambda *a: [{"group": a[1], **_row(a[1])}])
    progress = Progress(["a", "b"], record)
    runner.run(
        tmp_path / "s.py", ["a", "b"], tmp_path, budget=9, jobs=1, resume=True, progress=progress
    )
    assert seen == [(["a new", "b old"], ["b"]), (["a new", "b new"], [])]
    assert "no record could be written: OSError: no space left" in capsys.readouterr().out


def _row(_: str) -> dict[str, object]:
    return {"name": "new", "status": "ok"}


def test_warnings_of_ours_are_kept(tmp_path: Path) -> None:
    """That a library was left out, or a step not recorded, is part of what was measured."""

    def warn() -> None:
        for _ in range(2):
            warnings.warn("it runs without being recorded\nmore", RecastWarning, stacklevel=1)

    items = [Item("loud", warn), Item("still", lambda: None)]
    assert worker.work(lambda d, t: items, tmp_path / "x", CPU, False, None) == 0
    loud, still = item_log.read(tmp_path / "x")
    assert loud["warned"] == ["it runs without being recorded"] and "warned" not in still


def test_a_process_that_hangs_before_its_first_item_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would use up the time of all groups after it."""
    script, begun = tmp_path / "script.py", tmp_path / "begun"
    script.write_text(f"import time\nopen({str(begun)!r}, 'a').write('x')\ntime.sleep(50)\n")
    monkeypatch.setitem(runner._BETWEEN, "limit", 1.0)
    rows = runner.run(script, ["a"], tmp_path / "lines", budget=30, jobs=1)
    assert begun.read_text() == "x"
    assert [r["status"] for r in rows] == ["failed", "failed"]


PARENT = """
import sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
import torch
from gpu.harness import runner, worker
from gpu.harness.items import Item
here, lines = Path(sys.argv[0]), sys.argv[2:]
if "--lines" in lines:
    import os, subprocess
    def hang():
        held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        (here.parent / "pids").write_text(f"{{os.getpid()}} {{held.pid}}")
        time.sleep(100)
    file = Path(sys.argv[sys.argv.index("--lines") + 1])
    sys.exit(worker.work(lambda d, t: [Item("slow", hang)], file, torch.device("cpu"), 0, None))
runner.run(here, ["a"], here.parent / "lines", budget=100, jobs=1)
"""


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_nothing_outlives_a_call_that_is_killed(tmp_path: Path) -> None:
    """Its groups lead sessions of their own: they would keep the GPU from the next call."""
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(PARENT.format(folder=str(BENCHMARKS)))
    parent = subprocess.Popen([sys.executable, str(script)], env=runner.environment())
    try:
        _until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 120)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    left = [int(pid) for pid in pids.read_text().split()]
    _until(lambda: not any(map(_alive, left)), 30)
    (row,) = item_log.read(tmp_path / "lines" / "a.jsonl")
    assert row["detail"] == DIED_IN_ITEM


def _until(done: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)
