"""How fast on this GPU, compared with eager PyTorch, torch.compile, and the machine's floor.

    python benchmarks/gpu_bench.py                       # within 8 minutes; make gpu-bench
    python benchmarks/gpu_bench.py --groups tiny dlrm
    python benchmarks/gpu_bench.py --resume              # what the last call did not get to
    python benchmarks/gpu_bench.py --dry-run             # the same code on the emulator, tiny

First, processes side by side compile all that has to be compiled, into the caches on disk (not with
``--no-prepare``, nor in a dry run); ``gpu_ahead.py`` does much of it where there is no GPU. Then
each group has a process and the GPU to itself, the judged models first. Peers run in the same
process and take turns; times are medians of CUDA events. float32 products are TF32, for all. The
variants of Small, whose tables fill the memory, are measured one after the other, each freed before
the next. Writes ``<date>-<gpu>-gpu-bench.json`` and ``.md`` as it goes; an incomplete record says
so in its first line. The exit status is 1 if anything failed or a judged case has no verdict.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "models"))

from gpu import requirements  # noqa: F401 (first: it says what is missing)

# isort: split
from gpu.bench.command import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
