"""Compiles, without a GPU, what gpu_check.py and gpu_bench.py need on one: no time is lost there.

    python benchmarks/gpu_ahead.py                                # for sm_90; make gpu-ahead
    python benchmarks/gpu_ahead.py --arch sm_100 --jobs 8
    python benchmarks/gpu_ahead.py --python /path/to/python3.12   # the version on that machine

All items run on the CPU, on a device that compiles each kernel and launches none; the CPU
extension is compiled for the Python that is named. Everything is kept in ``build/gpu-cache``: take
that folder along with the checkout. The two scripts use it if it is there, unless ``RECAST_CACHE``
names another. A second call compiles only what has changed. The exit status is 1 if something does
not compile.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "models"))

from gpu import requirements  # noqa: F401 (first: it says what is missing)

# isort: split
from gpu.ahead.command import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
