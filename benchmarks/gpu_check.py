"""Is everything right on this GPU? One command, for a bare machine with torch and no network.

    python benchmarks/gpu_check.py                       # within 8 minutes; make gpu-check
    python benchmarks/gpu_check.py --groups models zoo   # some of it
    python benchmarks/gpu_check.py --resume              # what the last call did not get to
    python benchmarks/gpu_check.py --dry-run             # the same code on the emulator, tiny

Every op x sample x dtype against float64, optimizers, whole models diffed with training steps,
recorded steps against plain ones, dynamic tables, ranks that share the GPU, prefetching, bad ids,
kernels under compute-sanitizer, and the tests marked ``gpu`` if pytest is installed. At the end, it
names the kernels that nothing has launched. Each group has its own processes (``gpu.harness``).
Writes ``<date>-<gpu>-gpu-check.json`` and ``.md`` as it goes; the exit status is 1 if anything
failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import requirements  # noqa: F401 (first: it says what is missing)

# isort: split
from gpu.check.command import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
