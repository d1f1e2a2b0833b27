"""Optimizer steps on row gradients: the user's own optimizer, told to skip what is done here.

A pre-hook that runs after all others updates the tables whose gradient is a ``RowGrad``; torch's
step then runs on a stand-in for the optimizer that shares all of it but lists the other parameters
only. So no gradient is moved, and there is nothing to put back when a step raises. One global
pre-hook keeps ours in its place in every optimizer, also in copies of one and in one built later.
SGD and Adagrad are done on touched rows where a zero gradient changes nothing (``support``); any
other optimizer gets the plain dense gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from recast.errors import UsageError
from recast.runtime import row_update
from recast.runtime.row_count import count
from recast.runtime.row_grad import RowGrad, claim
from recast.runtime.row_update import Update

_HOOKS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()

Groups = list[dict[str, Any]]


def attach(optimizer: Optimizer) -> None:
    """Let ``optimizer`` update tables from row gradients.

    Its tables with ``sparse=True`` get row gradients too from now on, in the groups it can fuse.

    Raises:
        UsageError: not a torch optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer",
            why="tables are updated by its step hooks",
            tries=("pass the torch optimizer that it wraps",),
        )
    _place_hook(optimizer)
    for group in optimizer.param_groups:
        if support(optimizer, group) is None:
            for parameter in group["params"]:
                claim(parameter, optimizer)


def support(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """None where the tables of ``group`` are updated on touched rows only, else the reason."""
    if not _is_fused(optimizer):
        return f"{type(optimizer).__name__} is not fused; SGD and Adagrad are"
    if group.get("differentiable"):
        return "differentiable=True needs torch's own step"
    if isinstance(group["lr"], Tensor) and group["lr"].requires_grad:
        return "the learning rate requires grad"
    if isinstance(group["weight_decay"], Tensor) or group["weight_decay"] != 0:
        return "weight_decay changes every row at every step"
    if isinstance(optimizer, torch.optim.SGD):
        return "momentum moves every row at every step" if group["momentum"] != 0 else None
    if group["eps"] <= 2.0**-150:  # zero in fp32
        return "eps is 0, and 0/0 makes every untouched row NaN"
    return None


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether its step is torch's own of a kind that is done here."""
    kinds = (torch.optim.SGD, torch.optim.Adagrad)
    return any(isinstance(optimizer, k) and type(optimizer).step is k.step for k in kinds)


# --- the hooks -----------------------------------------------------------------------------------


def _place_hook(optimizer: Optimizer) -> None:
    """Ours behind every other pre-hook of the optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks
    handle = _HOOKS.get(optimizer)
    if handle is None or handle.id not in hooks:
        handle = _HOOKS[optimizer] = optimizer.register_step_pre_hook(_before_step)
    hooks.move_to_end(handle.id)  # type: ignore[attr-defined]


def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Global hooks run before an optimizer's own. A step being compiled is left to the compiler.
    if not torch.compiler.is_compiling():
        _place_hook(optimizer)


register_optimizer_step_pre_hook(_before_any_step)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        groups = _update(optimizer)
        return None if groups is None else ((_stand_in(optimizer, groups), *args[1:]), kwargs)

    # The gradients come to be inside the step, when it calls the closure.
    stand_in = _stand_in(optimizer, optimizer.param_groups) if _is_fused(optimizer) else optimizer

    def then_update() -> Any:
        loss = closure()
        groups = _update(optimizer)
        if groups is not None:
            stand_in.param_groups = groups
        return loss

    if "closure" in kwargs:
        return (stand_in, *args[1:]), {**kwargs, "closure": then_update}
    return (stand_in, then_update, *args[2:]), kwargs


def _stand_in(optimizer: Optimizer, groups: Groups) -> Optimizer:
    """The optimizer, state and all, with other groups."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = groups
    return stand_in


# As torch.optim does for its own steps: ``torch.compiler.disable`` would import the whole compiler,
# a second and a half, with this module.
@_disable_dynamo
def _update(optimizer: Optimizer) -> Groups | None:
    """Update tables from their row gradients; what is left to torch, or None if all of it."""
    updates: list[Update] = []
    done: set[Tensor] = set()
    scale, found_inf = _loss_scaling(optimizer)
    for group in optimizer.param_groups:
        found = [(p, p.grad) for p in group["params"] if type(p.grad) is RowGrad]
        if not found:
            continue
        reason = support(optimizer, group)
        for parameter, grad in found:
            if reason is not None or not grad.lazy:
                if grad.lazy:
                    count("dense-step", type(optimizer).__name__)
                parameter.grad = grad.promote()
                continue
            done.add(parameter)
            if not found_inf:
                updates.append(_update_of(optimizer, group, parameter, grad, scale))
    if not done:
        return None
    row_update.apply(updates)
    count("fused-step", times=len(updates))
    steps = [optimizer.state[u.weight]["step"] for u in updates if u.state is not None]
    if steps:  # a tensor and alpha: a Python number would be wrapped once for each step
        torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)
    if scale != 1.0:
        for update in updates:
            update.grad.rescale(scale)  # as torch's fused steps leave it: unscaled
    return [
        {**group, "params": [p for p in group["params"] if p not in done]}
        for group in optimizer.param_groups
    ]


def _loss_scaling(optimizer: Optimizer) -> tuple[float, bool]:
    """What GradScaler hands to an optimizer that scales by itself: (1 / scale, found inf)."""
    scale = getattr(optimizer, "grad_scale", None)
    found = getattr(optimizer, "found_inf", None)
    return 1.0 if scale is None else 1.0 / float(scale), found is not None and float(found) != 0


def _update_of(
    optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor, grad: RowGrad, factor: float
) -> Update:
    lr = float(group["lr"])
    sign = -1.0 if group["maximize"] else 1.0
    if isinstance(optimizer, torch.optim.SGD):
        return Update(weight, grad, None, sign * lr, factor=factor)
    state = _adagrad_state(optimizer, group, weight)
    steps = float(state["step"])  # before this one
    lr = lr / (1 + steps * group["lr_decay"])
    return Update(weight, grad, state["sum"], sign * lr, float(group["eps"]), factor)


def _adagrad_state(
    optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor
) -> dict[str, Tensor]:
    """The state torch keeps; made here, as torch would, for parameters added after construction."""
    state: dict[str, Tensor] = optimizer.state[weight]
    if not state:
        device = weight.device if group["fused"] else None
        dtype = torch.float32 if group["fused"] else torch.get_default_dtype()
        state["step"] = torch.zeros((), dtype=dtype, device=device)
        initial = optimizer.defaults["initial_accumulator_value"]
        state["sum"] = torch.full_like(weight, initial, memory_format=torch.preserve_format)
    return state
