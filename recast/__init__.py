"""Recast: a compiler for recommendation models.

    fast, optimizer = recast.optimize(model, optimizer, example=batch)
    print(fast.report)                                  # what was rewritten, what not, and why
    recast.diff(model, fast, batch).check()             # are the numbers the same? raises if not

A plain PyTorch model goes in; the same model comes out, faster: same numbers, same names, and it is
used in the same way.

optimize        rewrite a model; its arguments are explained there
explain         the report alone
diff            compare a model and its optimised twin
checkpoint      save and load on any number of ranks
optim           RowWiseAdagrad, stochastic rounding
dynamic         embeddings for any int64 id: Dynamic, MinCount, Device, Host, Disk
planner         where tables live on many ranks: Plan
TrainingStep    a whole training step as one CUDA graph; prefetch copies the next batch meanwhile
checked         ids and offsets on a GPU are checked before a call returns
auc             the AUC of a model, and whether a rewrite changes it

Errors are RecastErrors, and what plain torch would raise; warnings are RecastWarnings.
"""

import sys

try:
    from recast.errors import (
        CaptureError,
        CheckpointError,
        DiffError,
        DtypeError,
        IdError,
        InputError,
        NotBuiltError,
        PlanError,
        RankError,
        RecastError,
        RecastWarning,
        TierError,
        UsageError,
        VerifyError,
    )
    from recast.rewriter.api import explain, optimize
    from recast.rewriter.api_diff import diff
    from recast.rewriter.compiled.module import Compiled
    from recast.rewriter.diff.equivalence import DiffReport
    from recast.rewriter.report.report import Report
    from recast.runtime.checked import checked
    from recast.runtime.dynamic.settings import Dynamic, MinCount
    from recast.runtime.plan import Plan
    from recast.runtime.recorded.prefetch import prefetch
    from recast.runtime.recorded.training_step import TrainingStep
    from recast.runtime.tiers.settings import Device, Disk, Host

    from . import auc, checkpoint, dynamic, optim, planner
except KeyboardInterrupt:  # torch takes seconds to load; the command ends without a traceback
    if sys.argv[0] != "-m" and not sys.argv[0].endswith("/recast"):
        raise
    raise SystemExit(130) from None

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Compiled",
    "Device",
    "DiffError",
    "DiffReport",
    "Disk",
    "DtypeError",
    "Dynamic",
    "Host",
    "IdError",
    "InputError",
    "MinCount",
    "NotBuiltError",
    "Plan",
    "PlanError",
    "RankError",
    "RecastError",
    "RecastWarning",
    "Report",
    "TierError",
    "TrainingStep",
    "UsageError",
    "VerifyError",
    "__version__",
    "auc",
    "checked",
    "checkpoint",
    "diff",
    "dynamic",
    "explain",
    "optim",
    "optimize",
    "planner",
    "prefetch",
]
