"""Dynamic tables of GPUs over ranks give the numbers of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "dynamic_ranks_on_gpu.py"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def launched(ranks: int, backend: str, kind: str, *more: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*command, str(PROGRAM), backend, kind, *more],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    told = f"{backend}, {ranks} ranks on {kind}: dynamic tables"
    assert done.stdout.count(told) == done.stdout.count("as one process") == ranks


@pytest.mark.long
def test_ranks_of_the_host() -> None:
    """What the tests below start is sound."""
    launched(2, "gloo", "cpu")


@pytest.mark.long
def test_ranks_of_the_emulator_with_tiers() -> None:
    """Likewise, with rows that the GPU has no room for."""
    launched(2, "gloo", "emulated", "tiers")


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="no GPU")
@pytest.mark.parametrize("more", [(), ("tiers",)], ids=["", "tiers"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu(ranks: int, more: tuple[str, ...]) -> None:
    launched(ranks, "gloo", "cuda", *more)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="fewer than two GPUs")
def test_ranks_with_a_gpu_each() -> None:
    launched(2, "nccl", "cuda")
