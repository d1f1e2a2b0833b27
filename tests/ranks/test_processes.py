"""The real thing: processes over gloo, and the example by ``torchrun``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from every import COLUMNS, Every, plain_run
from harness import processes
from judged import adagrad, compare
from test_exchange import BATCHES, FORMS, TABLES, check
from test_training import SIZES, train

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("world", [2, 4])
def test_training(world: int) -> None:
    """Five steps with tables of every scheme."""
    torch.manual_seed(world)
    model = Every()
    plain = plain_run(model, adagrad, SIZES[world])
    truth = plain_run(model, adagrad, SIZES[world], dtype=torch.float64)
    compare(processes(world, train, model, adagrad, SIZES[world], COLUMNS), plain, truth)


def test_every_form() -> None:
    check(TABLES, FORMS, "row_wise", BATCHES[2], ranks=processes)


@pytest.mark.long
def test_the_example(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the demo's data are not installed: pip install .[demo]")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "train_sharded.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r"([\d.]+) on 2 processes, ([\d.]+) on one", done.stdout)
    assert found, done.stdout
    many, one = map(float, found.groups())
    assert one > 0.74 and abs(many - one) <= 1e-6
    assert re.search(r"^\S+ apart; 4 orders of one's sums range over \S+$", done.stdout, re.M)
    assert "\nwithin that\n" in done.stdout
    assert "table_wise" in done.stdout
