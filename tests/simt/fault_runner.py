"""Launch kernels of faults.cu one after the other: ``python fault_runner.py name...``.

Runs in a process that a sanitizer watches but does not end: each launch is announced on stderr, so
that the reports after it are known to be its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import simt_build
import torch

kernels = simt_build.kernels(Path(__file__).parent / "faults.cu")
for name in sys.argv[1:]:
    out = torch.zeros(128)
    os.write(2, f"== {name}\n".encode())
    kernels.launch(name, 2, 64, 256, out)
