"""Is everything right on this GPU? The groups of ``gpu_check.py``.

``command``             its groups, options and report
``op_checks``           every op on every sample and dtype (``op_samples``: sizes that fill a GPU)
``model_checks``        whole models, diffed (``example_models``, ``common_models``: which)
``optimizer_checks``    tables updated by rows
``batch_checks``        prefetching; ids out of range
``recorded_checks``     recorded steps (``recorded_models``: of what; ``recorded_run``: how they are
                        compared; ``recorded_optimizers``: of dense parameters)
``graph_mode_checks``   ``mode="graph"``
``dynamic_checks``      tables of raw ids; ranks that share a GPU
``external_tools``      compute-sanitizer, pytest
``kernel_coverage``     which kernels were launched, and which never
"""

from __future__ import annotations

from gpu import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_check.py"
