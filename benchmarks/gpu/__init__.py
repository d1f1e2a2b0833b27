"""Everything right on this GPU, and how fast: what ``gpu_check.py``, ``gpu_bench.py``,
``gpu_ahead.py`` and ``gpu_host.py`` beside this folder are made of.

``requirements``  imported first: says what is missing and how to install it
``harness``       groups of items in processes of their own, within a time budget
``check``         correctness: ops, models, optimizers, recorded steps, dynamic tables, ranks
``bench``         speed: whole steps, their parts, ops alone, the host
``ahead``         what both need, compiled on a machine without a GPU

The commands put the checkout on the path: nothing has to be installed but torch and numpy.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
