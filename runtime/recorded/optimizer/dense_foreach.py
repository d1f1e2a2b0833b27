"""Optimizer steps by torch's own operations, with the learning rate as a one-element tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from recast.runtime.recorded.recording import Unrecordable

Group = Mapping[str, Any]


def step_with(
    optimizer: Optimizer, groups: list[dict[str, Any]], rates: list[Tensor] | None
) -> None:
    """Run the optimizer's own step on ``groups``, with tensors as their learning rates."""
    if rates is not None:
        groups = [
            group if isinstance(group["lr"], Tensor) else {**group, "lr": rate}
            for group, rate in zip(groups, rates, strict=True)
        ]
    stand_in: Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = groups
    if not any(group.get("fused") for group in groups):
        # Attributes that loss scaling sets for a step: only fused steps read them, others refuse
        # them.
        stand_in.__dict__.pop("found_inf", None)
    # Bypasses the hooks: those of the tables have run, and others are refused.
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(stand_in)


def _signed(grads: list[Tensor], params: list[Tensor], group: Group) -> list[Tensor]:
    """Gradients with ``maximize`` and ``weight_decay`` applied; the given ones are not changed."""
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if group["weight_decay"] != 0:
        grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
    return grads


def sgd(
    params: list[Tensor], grads: list[Tensor], states: list[Any], group: Group, lr: Tensor
) -> None:
    """The step of ``torch.optim.SGD``. Raises Unrecordable if a parameter has no momentum yet."""
    grads = _signed(grads, params, group)
    if group["momentum"] != 0:
        buffers = [state.get("momentum_buffer") for state in states]
        if any(buffer is None for buffer in buffers):
            raise Unrecordable("a parameter has no momentum yet")
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads, alpha=1 - group["dampening"])
        if group["nesterov"]:
            grads = list(torch._foreach_add(grads, buffers, alpha=group["momentum"]))
        else:
            grads = buffers
    torch._foreach_sub_(params, torch._foreach_mul(grads, lr))


def adagrad(
    params: list[Tensor], grads: list[Tensor], states: list[Any], group: Group, lr: Tensor
) -> None:
    """The step of ``torch.optim.Adagrad``."""
    sums = [state["sum"] for state in states]
    grads = _signed(grads, params, group)
    torch._foreach_addcmul_(sums, grads, grads, value=1)
    roots = torch._foreach_sqrt(sums)
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(params, torch._foreach_mul(grads, -lr), roots)
