"""The step of an optimizer on its tables where nothing is out of the ordinary: two calls of C++.

The kernels go through the optimizer's own lists of parameters and states, so that no line of Python
is run for a table: of a step of 26 tables on 128 rows, that was more than the update. Where
anything asks for more (loss scaling, rounding at random, a state to begin, a number of steps in the
formula, ids that are wrong, kernels that are not there) nothing is done, and ``step.Step`` does it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recast.runtime import device
from recast.runtime.recorded import recording
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.count import count
from recast.runtime.rows.grad import RowGrad
from recast.runtime.rows.rules import Rule

Groups = list[dict[str, Any]]


def step(optimizer: Optimizer, rule: Rule | None) -> Groups | None:
    """Step the tables with row gradients; the groups of what is left to torch. None: nothing was
    done, and no table changed.
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
        if rule.counts(group) or type(params) is not list:
            return None
        if params and row_cuda.serving(params[0]) is not None:
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
    # As any operation in place: a graph that saved the table must refuse to go on.
    written: list[Tensor] = whole.written
    torch.autograd.graph.increment_version(written)
    count("fused-step", times=whole.count)
    return left
