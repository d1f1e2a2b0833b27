"""What is removed from the folder of compiled code, and what never is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recast.runtime import build_cache

DAYS = 86_400.0
KEYS = [f"{k:016x}" for k in range(5)]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Builds of 100 bytes, used 5, 4, 3, 2 and 0 days ago; room for two and a half."""
    monkeypatch.setenv("RECAST_CACHE", str(tmp_path))
    monkeypatch.setattr(build_cache, "LIMIT", 250)
    (tmp_path / "lock").touch()
    for age, key in zip((5, 4, 3, 2, 0), KEYS, strict=True):
        build(tmp_path / key, age)
    return tmp_path


def build(folder: Path, days: float) -> None:
    folder.mkdir(parents=True)
    (folder / "_C.so").write_bytes(bytes(100))
    aged(folder, days)


def aged(path: Path, days: float) -> None:
    os.utime(path, (then := time.time() - days * DAYS, then))


def left(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.glob("*") if path.is_dir()}


def test_what_was_used_longest_ago_goes(root: Path) -> None:
    build_cache.used(root / KEYS[0])
    build_cache.prune()
    assert left(root) == {KEYS[0], KEYS[4]}
    assert build_cache.facts() == {"folder": "$RECAST_CACHE", "bytes": 200, "limit": 250}


def test_what_was_used_within_a_day_stays(root: Path) -> None:
    for key in KEYS:
        aged(root / key, 0.9)
    build_cache.prune()
    assert left(root) == {*KEYS}


def test_each_kind_goes_and_nothing_of_others(root: Path) -> None:
    ours = [f"objects-{KEYS[0]}", f"ahead-{KEYS[0]}"]
    for name in (*ours, "of-somebody-else", "cuda"):
        build(root / name, 9)
    (root / "simt").mkdir()
    for name in ("0" * 20 + "-kernel.so", "0" * 20 + ".lock", "notes.txt"):
        (root / "simt" / name).write_bytes(bytes(100))
        aged(root / "simt" / name, 9)
    build_cache.prune()
    assert left(root) == {KEYS[3], KEYS[4], "of-somebody-else", "cuda", "simt"}
    assert [path.name for path in (root / "simt").iterdir()] == ["notes.txt"]


def test_what_killed_builds_left_goes(root: Path) -> None:
    for name, age in (("tmpold", 1.1), ("tmpnew", 0.9)):
        build(root / KEYS[4] / name, age)
    build_cache.prune()
    assert sorted(path.name for path in (root / KEYS[4]).iterdir()) == ["_C.so", "tmpnew"]


@pytest.mark.parametrize("part", ["another", KEYS[0]])
def test_nothing_goes_while_another_process_writes(root: Path, part: str) -> None:
    """It may be about to link objects that were made long ago."""
    code = f"""
from pathlib import Path
from recast.runtime import build_cache
with build_cache.alone(Path({str(root / part)!r})):
    print("writes", flush=True)
    input()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        assert writer.stdout.readline() == "writes\n"
        for key in KEYS[:4]:
            aged(root / key, 5)
        build_cache.prune()
        assert left(root) >= {*KEYS}
        writer.communicate("\n")
    build_cache.prune()
    assert not left(root) & {*KEYS[:2]}
