"""The optimizer's step on its tables in the ordinary case: two calls of C++.

The kernels walk through the optimizer's own lists of parameters and states, so that no Python runs
per table: in a step of 26 tables on 128 rows, that took longer than the update itself. If anything
else is needed (loss scaling, stochastic rounding, a state to initialise, a step count in the
formula, a gradient times NaN, an error for wrong ids, kernels that are missing) nothing is done
here, and ``step.Step`` does it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recast.runtime import device
from recast.runtime.recorded import recording
from recast.runtime.rows import cuda_shared_sorts as row_sorts
from recast.runtime.rows.count import count
from recast.runtime.rows.grad import RowGrad, spoiled
from recast.runtime.rows.rules import Rule

Groups = list[dict[str, Any]]


def step(optimizer: Optimizer, rule: Rule | None) -> Groups | None:
    """Step the tables with row gradients; returns groups of the parameters left to torch. None:
    nothing was done, and no table changed.
    """
    extension = device.extension()
    if rule is None or rule.sparse or extension is None or recording.current() is not None:
        return None
    if getattr(optimizer, "grad_scale", None) is not None:
        return None
    if getattr(optimizer, "found_inf", None) is not None:
        return None
    whole = extension.GroupStep(RowGrad)
    left: Groups = []
    for group in optimizer.param_groups:
        params = group["params"]
        if rule.counts(group) or type(params) is not list or spoiled(params):
            return None
        if params and row_sorts.serving(params[0]) is not None:
            return None
        numbers = rule.numbers(group, 0.0)
        update = (rule.action, *numbers, -1.0 if group["maximize"] else 1.0)
        before = whole.count
        others = whole.add(params, optimizer.state, rule.states, update)
        if others is None or (whole.count > before and rule.why_not(group) is not None):
            return None
        left.append({**group, "params": others})
    if not whole.count or not whole.run(device.threads()):
        return None
    # As after any in-place operation: backward through a graph that saved the table must raise.
    written: list[Tensor] = whole.written
    torch.autograd.graph.increment_version(written)
    count("fused-step", times=whole.count)
    return left
