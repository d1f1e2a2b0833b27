"""Which optimizers may step only looked-up rows, when that is exact, and with which numbers.

A row without gradient has g = 0. If the optimizer's own formula leaves such a row and its state
unchanged, skipping it changes nothing: SGD without momentum and the Adagrads. SparseAdam skips it
by definition. Adam and AdamW move other rows too (``fading``); ``sparse_semantics="lazy"`` asks for
SparseAdam's numbers instead (t counts all steps of the table):

    Adam    g ← g + weight_decay·w         on touched rows, then SparseAdam's step
    AdamW   w ← w - lr·weight_decay·w      on touched rows, then SparseAdam's step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from recast.runtime.optim import RowWiseAdagrad
from recast.runtime.rows.update import Action

Group = Mapping[str, Any]
State = dict[str, Any]


class Numbers(NamedTuple):
    """The numbers of a table's update; see ``update.Update``."""

    lr: float
    eps: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    decay: float = 0.0
    l2: float = 0.0
    ahead: float = 0.0


class Rule:
    """How one kind of optimizer steps looked-up rows; the base class is for SGD.

    action: the formula.
    states: names of the tensors in ``optimizer.state`` that the formula reads and writes.
    exact: whether the optimizer's own formula leaves all other rows unchanged.
    sparse: whether the optimizer refuses the gradients of tables without ``sparse=True``.
    """

    kind: type[Optimizer] = torch.optim.SGD
    action: Action = "sgd"
    states: tuple[str, ...] = ()
    exact = True
    sparse = False

    def why_not(self, group: Group) -> str | None:
        """Why the tables of ``group`` still need a dense gradient; None if they do not."""
        reason = never(group) or moves_all(group)
        if reason is None and group["momentum"] != 0:
            return "momentum moves every row at every step"
        return reason

    def start(self, optimizer: Optimizer, group: Group, weight: Tensor) -> State:
        """The state of a table before its first step, as the optimizer would initialise it."""
        return {}

    def counts(self, group: Group) -> bool:
        """Whether ``numbers`` depend on the number of steps."""
        return False

    def numbers(self, group: Group, steps: float) -> Numbers:
        """The numbers for the next step after ``steps`` steps."""
        return Numbers(float(group["lr"]))


class Adagrad(Rule):
    kind: type[Optimizer] = torch.optim.Adagrad
    action: Action = "adagrad"
    states: tuple[str, ...] = ("sum",)

    def why_not(self, group: Group) -> str | None:
        return never(group) or moves_all(group) or no_eps(group)

    def start(self, optimizer: Optimizer, group: Group, weight: Tensor) -> State:
        initial = optimizer.defaults["initial_accumulator_value"]
        sums = torch.full_like(weight, initial, memory_format=torch.preserve_format)
        return {"step": step_count(group["fused"], weight), "sum": sums}

    def counts(self, group: Group) -> bool:
        return _nonzero(group["lr_decay"])

    def numbers(self, group: Group, steps: float) -> Numbers:
        lr = float(group["lr"]) / (1 + steps * float(group["lr_decay"]))
        return Numbers(lr, float(group["eps"]))


class _RowWiseAdagrad(Adagrad):
    kind: type[Optimizer] = RowWiseAdagrad
    action: Action = "row_wise_adagrad"

    def start(self, optimizer: Optimizer, group: Group, weight: Tensor) -> State:
        return RowWiseAdagrad.start(group, weight)


class _SparseAdam(Rule):
    kind: type[Optimizer] = torch.optim.SparseAdam
    action: Action = "adam"
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    sparse = True

    def why_not(self, group: Group) -> str | None:
        return never(group)

    def start(self, optimizer: Optimizer, group: Group, weight: Tensor) -> State:
        return {"step": 0, **_moments(weight)}

    def counts(self, group: Group) -> bool:
        return True

    def numbers(self, group: Group, steps: float) -> Numbers:
        beta1, beta2 = map(float, group["betas"])
        t = steps + 1
        lr = float(group["lr"]) * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        return Numbers(lr, float(group["eps"]), (beta1, beta2))


class LazyAdam(_SparseAdam):
    kind: type[Optimizer] = torch.optim.Adam  # AdamW is one too
    exact = False
    sparse = False

    def why_not(self, group: Group) -> str | None:
        if group["amsgrad"]:
            return "amsgrad keeps a maximum that SparseAdam does not have"
        return never(group)

    def start(self, optimizer: Optimizer, group: Group, weight: Tensor) -> State:
        return {
            "step": step_count(group["fused"] or group["capturable"], weight),
            **_moments(weight),
        }

    def numbers(self, group: Group, steps: float) -> Numbers:
        numbers = super().numbers(group, steps)
        decay = float(group["weight_decay"])
        if group["decoupled_weight_decay"]:
            return numbers._replace(decay=float(group["lr"]) * decay)
        return numbers._replace(l2=decay)


_RULES = (Rule(), Adagrad(), _RowWiseAdagrad(), _SparseAdam(), LazyAdam())


def rule_of(optimizer: Optimizer, lazy: bool) -> Rule | None:
    """The rule for an optimizer whose step is torch's own; ``lazy``: the rule may be inexact."""
    for rule in _RULES:
        if isinstance(optimizer, rule.kind) and (rule.exact or lazy):
            # A subclass that overrides ``step`` is left alone.
            return rule if step_of(type(optimizer)) is step_of(rule.kind) else None
    return None


def step_of(kind: type[Optimizer]) -> Any:
    """The ``step`` in the source of ``kind``, without torch's wrapper.

    Torch wraps it in the class of the first optimizer that is made: AdamW, if made before any Adam,
    gets its own wrapper around the step that it inherits.
    """
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def reason(optimizer: Optimizer, group: Group, lazy: bool) -> str | None:
    """Why the tables of ``group`` need a dense gradient; None if looked-up rows are updated."""
    rule, name = rule_of(optimizer, lazy), type(optimizer).__name__
    if rule is None:
        if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            return f'{name} moves every row at every step (sparse_semantics="lazy" does not)'
        return f"{name} is not fused; SGD, the Adagrads and SparseAdam are"
    return rule.why_not(group)


def never(group: Group) -> str | None:
    if group.get("differentiable"):
        return "differentiable=True needs torch's own step"
    if isinstance(group["lr"], Tensor) and group["lr"].requires_grad:
        return "the learning rate requires grad"
    params = group["params"]
    if len(set(map(id, params))) < len(params):  # torch warns of it
        return "a parameter that a group lists twice is stepped twice"
    return None


def moves_all(group: Group) -> str | None:
    """Why this step moves rows without gradient too."""
    if _nonzero(group["weight_decay"]):
        return "weight_decay changes every row at every step"
    lr = group["lr"]
    if (not isinstance(lr, Tensor) or lr.is_cpu) and not math.isfinite(lr):
        return "a learning rate of infinity or NaN makes every row NaN"
    return None


def no_eps(group: Group) -> str | None:
    if group["eps"] <= 2.0**-150:  # zero in fp32
        return "eps is 0, and 0/0 makes every untouched row NaN"
    return None


def _nonzero(number: Any) -> bool:
    """Whether it may be other than zero; a tensor is not read, so it may."""
    return isinstance(number, Tensor) or number != 0


def step_count(fused: bool | None, weight: Tensor) -> Tensor:
    if fused:
        return torch.zeros((), dtype=torch.float32, device=weight.device)
    return torch.zeros((), dtype=torch.get_default_dtype())


def _moments(weight: Tensor) -> State:
    return {
        "exp_avg": torch.zeros_like(weight, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
    }
