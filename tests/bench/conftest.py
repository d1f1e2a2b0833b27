"""The benchmark is no package: its folder goes on the path, and the models', as its commands do."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(ROOT / "examples" / "models")]
