"""What ``make sanitize`` needs before it can find anything: libraries in which the compiled code
finds all that it calls, and planted faults that reach the kernels. In seconds, without its builds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recast.runtime import device

sys.path.insert(0, str(Path(__file__).resolve().parent))
import planted_faults
import run_sanitizers

CODE = """
#include <cstdint>
extern "C" __attribute__((visibility("default"))) int64_t faulty(int64_t* p, int64_t i, float x) {
  p[i] += i * i << 3;
  return p[i] / (i + 1) + static_cast<int64_t>(x);
}
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
@pytest.mark.parametrize("name", run_sanitizers.SANITIZERS)
def test_the_libraries_hold_all_that_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linked as the kernels are: without the sanitizers, whose libraries a process loads first."""
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "f.cpp").write_text(CODE)
    environment = run_sanitizers.watched(name)
    monkeypatch.setenv("RECAST_SANITIZER", name)
    flags = device._flags()
    for more in (("-c", "f.cpp", "-o", "f.o", *flags), ("-shared", "f.o", "-o", "f.so")):
        subprocess.run(["g++", *more], cwd=tmp_path, check=True)
    load = "import ctypes, os; ctypes.CDLL('./f.so', os.RTLD_NOW).faulty; print('loaded')"
    said = subprocess.run(
        [sys.executable, "-c", load], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert said.stdout == "loaded\n", said.stderr


@pytest.mark.skipif(device.extension() is None, reason="no kernels")
def test_the_overflow_reaches_the_kernel() -> None:
    """Unwatched, the kernel computes some number of rows, which no tensor has."""
    with pytest.raises(ValueError, match="gru: a tensor does not fit"):
        planted_faults.overflow()


@pytest.mark.skipif(device.extension() is None, reason="no kernels")
def test_what_is_no_fault_comes_to_its_end() -> None:
    torch.manual_seed(0)
    planted_faults.clean()
