"""Every example runs as it stands, says what it should, and is short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_example import run_forked

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = 60
OPCHECK = "The .grad attribute of a Tensor that is not a leaf"  # its own, from torch 2.14 on
SHORT = [*sorted(p.name for p in EXAMPLES.glob("0*.py")), "dlrm.py"]


def run(name: str, *arguments: str, cwd: Path) -> str:
    """What the example prints; warnings are errors in it too."""
    status, printed = run_forked(EXAMPLES / name, arguments, cwd, OPCHECK, timeout=240)
    assert status == 0, printed
    return printed


def run_alone(name: str, *arguments: str, cwd: Path) -> str:
    """Likewise, in an interpreter of its own."""
    strictly = ["-W", "error", "-W", f"ignore:{OPCHECK}"]
    done = subprocess.run(
        [sys.executable, *strictly, str(EXAMPLES / name), *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SHORT)
def test_under_sixty_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < LINES


def test_hello(tmp_path: Path) -> None:
    said = run_alone("01_hello.py", cwd=tmp_path)
    assert "DLRM: captured whole" in said and "26 of 26" in said
    losses = [float(line.split()[1]) for line in said.splitlines() if line.startswith("loss")]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_explain(tmp_path: Path) -> None:
    said = run("02_explain.py", cwd=tmp_path)
    assert "3 of 4 lookups are grouped" in said
    assert "missed by group-embeddings at dlrm.py:" in said and "scale_grad_by_freq" in said
    assert "equal within limits" in said


def test_own_rule(tmp_path: Path) -> None:
    assert "silu" in run("03_own_rule.py", cwd=tmp_path)


def test_own_op(tmp_path: Path) -> None:
    assert run("04_own_op.py", cwd=tmp_path).count("gradient checked") == 3


def test_train(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the demo's data are not installed: pip install .[demo]")
    said = run("05_train.py", "120", cwd=tmp_path)
    assert float(said.rsplit(maxsplit=1)[1]) > 0.7, "it learns"


def test_dynamic(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the demo's data are not installed: pip install .[demo]")
    said = run("06_dynamic.py", "60", cwd=tmp_path)
    assert float(said.splitlines()[0].rsplit(maxsplit=1)[1]) > 0.55, "it learns"
    assert "emb.tailnum: 1500 of 1500 rows" in said and " 0 evicted" in said
    assert said.rstrip().endswith("Embedding(1500, 16) True")


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the demo's data are not installed: pip install .[demo]")
    said = run("demo.py", "--steps", "60", "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert "327,346 flights" in said and "captured whole" in said and "13 of 13" in said
    assert "equal within limits" in said and "samples/s" in said
    rows = [line.split() for line in said.splitlines() if "0.7" in line and "x" in line]
    assert len(rows) == 2, "two models with their AUC"
    assert (tmp_path / "out" / "report.html").read_text().lstrip().startswith("<!doctype html")
    assert "<svg" in (tmp_path / "out" / "graph.svg").read_text()
