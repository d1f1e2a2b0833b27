"""Ranks on one device give the numbers of one process: NCCL with one rank, gloo with more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "ranks_on_gpu.py"


def launched(ranks: int, backend: str, kind: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*command, str(PROGRAM), backend, kind],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    for wire in ("fp32", "int8"):
        assert f"{backend}, {ranks} ranks on {kind}, {wire}: as one process" in done.stdout


def test_one_rank_that_spreads_all_the_same() -> None:
    """On the CPU, where there is no NCCL: what the tests below start is sound."""
    launched(1, "gloo", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nccl_with_one_rank() -> None:
    launched(1, "nccl", "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu(ranks: int) -> None:
    launched(ranks, "gloo", "cuda")
