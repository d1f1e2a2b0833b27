"""What ``gpu_check.py`` and ``gpu_bench.py`` need on a GPU, compiled on a machine without one.

``command``    options, processes, report
``compiling``  a device that compiles kernels and launches none
``extension``  the CPU extension, for the Python of another machine
"""

from __future__ import annotations

import os

from gpu import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_ahead.py"
CACHE = ROOT / "build" / "gpu-cache"


def use() -> None:
    """Take what was compiled ahead, if it is there and no other cache is named."""
    if CACHE.is_dir():
        os.environ.setdefault("RECAST_CACHE", str(CACHE))
