"""How fast on this GPU? The groups of ``gpu_bench.py``, and ``host_time``, of ``gpu_host.py``.

``command``           options, processes, report (``results_page``)
``groups``            what is measured, in which order
``compile_ahead``     compiles it all first, in processes side by side
``whole_steps``       training steps of ``judged_models`` (``synthetic_models``, MLPerf's DLRM)
``step_parts``        an MLP, tables and their optimizers, each op alone (``op_cases``)
``variants``          the ways to run a step: ours, eager, compiled
``timing``            variants in turns; medians; bars met or not
``roofline``          the least time a step can take on this machine
``memory_needs``      what a case needs, before anything is allocated
``host_time``         what a step costs the host
"""

from __future__ import annotations

from gpu import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_bench.py"
