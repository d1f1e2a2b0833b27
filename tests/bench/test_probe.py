"""The probe computes what torch computes, and is timed together with a step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import probe
import pytest
import torch

COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no compiler")
def test_the_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loops = probe.Probe(16, str(tmp_path))
    probe.check(loops)
    probe.check(loops, rows=3000, bags=130, many=1, tables=26)  # two passes of the sort
    threads = torch.get_num_threads()
    try:
        code = probe.main(
            ["--ids", "2", "--batch", "9", "--dim", "16", "--rows", "60", "--rounds", "1"]
        )
    finally:
        torch.set_num_threads(threads)
    assert code in (0, 1)
    assert "| 9     | 16  | 2   |" in capsys.readouterr().out
