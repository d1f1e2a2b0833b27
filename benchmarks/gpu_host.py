"""What a training step costs the host, with a device that does nothing.

    python benchmarks/gpu_host.py                  # ms of CPU time per step, in each mode
    python benchmarks/gpu_host.py --profile graph  # where the time of one mode goes

A fast GPU waits for its host. Here launches are prepared but not made, and replays launch nothing,
so what is timed is Python, autograd and torch's own calls, which at a batch of 8 are little more
than their overhead. The models are those of ``gpu_bench`` with small tables.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "models"))

from gpu import requirements  # noqa: F401 (first: it says what is missing)

# isort: split
from gpu.bench.host_time import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
