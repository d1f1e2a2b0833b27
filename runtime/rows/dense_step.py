"""The step of dense parameters on a CPU: torch's fused kernels, where torch would loop.

By default torch steps CPU parameters one by one, with some five operations each. Its fused kernels
(``fused=True``) compute the same formula in one pass over all of a group's parameters: Adagrad,
Adam, AdamW and SGD with momentum take 0.2 to 0.8 of the time (120 parameters of 16 x 16, an MLP of
1024 x 416, a table of 100,000 x 16; torch 2.13, one thread). They read and write memory from end to
end, whatever its strides are, so all tensors must be contiguous. A group whose user has chosen
``foreach`` or ``fused`` keeps that choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

Groups = list[dict[str, Any]]

_STATES = {
    Adagrad: ("step", "sum"),
    Adam: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    AdamW: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    SGD: ("momentum_buffer",),
}


def fused(optimizer: Optimizer, groups: Groups) -> Groups | None:
    """``groups`` with ``fused=True`` where the fused kernels give the same numbers, to rounding;
    None: nowhere. Their step is to follow at once.
    """
    names = _STATES.get(type(optimizer))
    if names is None or torch.get_default_dtype() is not torch.float32:
        return None  # step counts are made in the default dtype, but for fused kernels in float32
    if getattr(optimizer, "grad_scale", None) is not None:
        return None
    if getattr(optimizer, "found_inf", None) is not None:
        return None
    fit = [_gains(optimizer, group) and _fits(optimizer, group, names) for group in groups]
    if not any(fit):
        return None
    # The fused kernels do not count as in-place operations, but backward through a graph that saved
    # a parameter must raise.
    written = [p for group, fits in zip(groups, fit, strict=True) if fits for p in group["params"]]
    torch.autograd.graph.increment_version([p for p in written if p.grad is not None])
    return [
        {**group, "fused": True} if fits else group for group, fits in zip(groups, fit, strict=True)
    ]


def notes(optimizer: Optimizer) -> list[str]:
    """A sentence for the report, if dense parameters will be stepped by the fused kernels."""
    if type(optimizer) not in _STATES:
        return []
    groups = [group for group in optimizer.param_groups if _gains(optimizer, group)]
    if not any(_plain(parameter) for group in groups for parameter in group["params"]):
        return []
    name = type(optimizer).__name__
    return [f"dense gradients: stepped by torch's fused {name}, as {name}(fused=True) does"]


def _gains(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    if any([group.get(name) is not None for name in ("foreach", "fused")]):
        return False
    if any([group.get(name) for name in ("differentiable", "capturable")]):
        return False
    if not all(
        [isinstance(number, float | int) for number in (group["lr"], *group.get("betas", ()))]
    ):
        return False
    # A plain SGD is one operation per parameter already.
    return type(optimizer) is not SGD or bool(group["momentum"] or group["weight_decay"])


def _fits(optimizer: Optimizer, group: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether all tensors are contiguous, in float32 and on the CPU, and have a state, or none; and
    whether they are of one shape, which the fused kernels take for granted, and write beyond.
    """
    params, started = group["params"], set()
    if len(set(map(id, params))) < len(params):
        return False  # torch warns of it, and steps such a parameter twice
    for parameter in params:
        grad = parameter.grad
        if grad is None:
            continue
        if not (_plain(parameter) and _plain(grad) and grad.shape == parameter.shape):
            return False
        state = optimizer.state.get(parameter, {})
        states = [state[name] for name in names if state.get(name) is not None]
        if not all([_plain(one) for one in states]):
            return False
        shape = parameter.shape
        for name in names:
            if name != "step" and (one := state.get(name)) is not None and one.shape != shape:
                return (
                    False  # as load_state_dict leaves it for a model of other sizes: torch raises
                )
        started.add(bool(states))
    return len(started) == 1  # momentum begins for all of a group at once, or for none


_KINDS = (Tensor, torch.nn.Parameter)


def _plain(tensor: Any) -> bool:
    return (
        type(tensor) in _KINDS
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )
