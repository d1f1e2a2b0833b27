"""Optimizers that torch does not have, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from recast.errors import UsageError


class RowWiseAdagrad(Optimizer):
    """Adagrad with one running sum for each row of a parameter, rather than for each element.

    For row r of a parameter of shape (rows, ...), with g its gradient:

        s_r ← s_r + mean of g_r²,    p_r ← p_r - lr·g_r / (√s_r + eps)

    where lr is ``lr / (1 + (step - 1)·lr_decay)``. The state of a table of (rows, D) is D times
    smaller than Adagrad's. A vector's rows are its elements, so it gets plain Adagrad. Gradients
    may be dense or sparse (COO with one sparse dimension). Tables of an optimized model are stepped
    on their touched rows only, to the same numbers.

    State of a parameter: ``step`` (a number, float32 or the default dtype), ``sum`` (rows,), or ()
    for a scalar, of the parameter's dtype.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, a number or a tensor of one element.
        lr_decay: how fast the learning rate falls.
        weight_decay: must be 0: it would change every row at every step.
        initial_accumulator_value: of ``sum``.
        eps: added to the root.
        maximize: ascend instead.

    Raises:
        UsageError: a number out of range, or a ``weight_decay``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @staticmethod
    def start(group: Any, parameter: Tensor) -> dict[str, Tensor]:
        """The state before the first step."""
        initial = group["initial_accumulator_value"]
        sums = parameter.new_full(parameter.shape[:1], initial)
        return {"step": torch.zeros((), dtype=torch.get_default_dtype()), "sum": sums}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; with a ``closure`` that computes the loss anew, its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, parameter.grad)
        return loss

    def _step(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.start(group, parameter))
        lr = float(group["lr"]) / (1 + float(state["step"]) * group["lr_decay"])
        state["step"] += 1
        rows: Any = ...
        values = grad
        if grad.is_sparse:
            grad = grad.coalesce()  # the update is not linear, so ids must be unique
            rows, values = grad.indices()[0], grad.values()
        values = -values if group["maximize"] else values
        squares = values.square()
        total = state["sum"][rows] + (squares.flatten(1).mean(1) if grad.dim() > 1 else squares)
        state["sum"][rows] = total
        root = total.sqrt().add_(group["eps"])
        root = root.view(root.shape + (1,) * (values.dim() - root.dim()))
        parameter[rows] = parameter[rows].addcdiv(values, root, value=-lr)


def _check(group: dict[str, Any]) -> None:
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise UsageError("RowWiseAdagrad: a tensor lr must have one element")
    for name in ("lr", "lr_decay", "initial_accumulator_value", "eps"):
        if not group[name] >= 0:
            raise UsageError(f"RowWiseAdagrad: {name} is {group[name]}, and must not be negative")
    if group["weight_decay"] != 0:
        raise UsageError(
            f"RowWiseAdagrad: weight_decay={group['weight_decay']} is not supported",
            why="it changes every row at every step, which an optimizer of touched rows cannot do",
            tries=("add a penalty on the rows of the batch to the loss", "torch.optim.Adagrad"),
        )
