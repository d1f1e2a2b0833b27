"""kill -9 while training with tiers: the last checkpoint is found again, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rocksdict")


def rounds(folder: Path, count: int) -> dict[str, int]:
    program = Path(__file__).with_name("killed.py")
    (folder / "plain").mkdir()
    ran = subprocess.run(
        [sys.executable, str(program), str(folder), str(count), "7"],
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    told: dict[str, int] = json.loads(ran.stdout.splitlines()[-1])
    return told


def test_three_kills(tmp_path: Path) -> None:
    assert rounds(tmp_path, 3)["kills"] == 3


@pytest.mark.long
@pytest.mark.timeout(1600)
def test_fifty_kills(tmp_path: Path) -> None:
    told = rounds(tmp_path, 50)
    assert told["kills"] == 50
    assert told["found"] > 12 and told["compacting"] > 0 and told["ends"] > 0, told
