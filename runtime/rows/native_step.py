"""The optimizer's step on its tables in the ordinary case: two calls of C++.

The kernels walk through the optimizer's own lists of parameters and states, so that no Python runs
per table: in a step of 26 tables on 128 rows, that took longer than the update itself. If anything
else is needed (loss scaling, stochastic rounding, a state to initialise, moments to settle, a
gradient times NaN, an error for wrong ids, kernels that are missing) nothing is done here, and
``step.Step`` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from recast.runtime import device
from recast.runtime.recorded import recording
from recast.runtime.rows import ages as row_ages
from recast.runtime.rows import cuda_shared_sorts as row_sorts
from recast.runtime.rows import whole as row_whole
from recast.runtime.rows.ages import Moment, Setting
from recast.runtime.rows.count import count
from recast.runtime.rows.fading import Fading
from recast.runtime.rows.grad import RowGrad, spoiled
from recast.runtime.rows.rules import Numbers, Rule

Groups = list[dict[str, Any]]


class Way(NamedTuple):
    """How the tables of a group are stepped.

    action, states: the formula, and the names of the states that it reads and writes.
    numbers: those of a table after so many steps; ``counts``: whether they depend on that.
    sign: -1 to maximise.
    betas: of tables whose other rows move too; None: they do not.
    setting: that of their ages; None: those are not to be used in this step.
    whole: up to which ``whole.size`` such a table is stepped whole.
    """

    action: str
    states: tuple[str, ...]
    numbers: Callable[[float], Numbers]
    counts: bool
    sign: float
    betas: tuple[float, ...] | None = None
    setting: Setting | None = None
    whole: int = 0


def step(optimizer: Optimizer, rule: Rule | None, moving: Fading | None) -> Groups | None:
    """Step the tables with row gradients; returns groups of the parameters left to torch. None:
    nothing was done, and no table changed.
    """
    extension = device.extension()
    if extension is None or recording.current() is not None or (rule is None and moving is None):
        return None
    if rule is not None and rule.sparse:
        return None
    if getattr(optimizer, "grad_scale", None) is not None:
        return None
    if getattr(optimizer, "found_inf", None) is not None:
        return None
    step = extension.GroupStep(RowGrad, Moment)
    left: Groups = []
    stepped: list[tuple[int, tuple[float, ...]]] = []
    for index, group in enumerate(optimizer.param_groups):
        params = group["params"]
        if type(params) is not list or spoiled(params):
            return None
        if params and row_sorts.serving(params[0]) is not None:
            return None
        way = _way(optimizer, index, rule, moving)
        before = step.count
        others = step.add(params, optimizer.state, way)
        if others is None:
            return None
        if way is not None and way.betas is not None and step.count > before:
            if _any_dynamic(params):
                return None
            stepped.append((index, way.betas))
        left.append({**group, "params": others})
    if not step.count or not step.run(device.threads()):
        return None
    # As after any in-place operation: backward through a graph that saved the table must raise.
    written: list[Tensor] = step.written
    torch.autograd.graph.increment_version(written)
    step.end()
    for index, betas in stepped:
        row_ages.remember(optimizer, index, betas)
    count("fused-step", times=step.count)
    count("native-step")
    return left


def _way(optimizer: Optimizer, index: int, rule: Rule | None, moving: Fading | None) -> Way | None:
    """How row gradients of group ``index`` are used; None: not here."""
    group = optimizer.param_groups[index]
    sign = -1.0 if group["maximize"] else 1.0
    if rule is not None and rule.why_not(group) is None:
        return Way(rule.action, rule.states, partial(rule.numbers, group), rule.counts(group), sign)
    if moving is None:
        return None
    setting, steady = row_ages.setting_of(optimizer, index, moving)
    if setting is None:
        return None
    return Way(
        moving.action,
        moving.states[: len(setting.betas)],
        partial(moving.numbers, group),
        moving.counts(group),
        sign,
        setting.betas,
        setting if steady else None,
        row_whole.limit(moving, group, steady),
    )


def _any_dynamic(params: list[Tensor]) -> bool:
    from recast.runtime.dynamic import table  # here: it imports this package

    return table.any_tables() and any(table.of(parameter) is not None for parameter in params)
