"""Optimizer steps on row gradients: the user's own optimizer, told to skip what is done here.

A pre-hook that runs after all others updates the tables whose gradient is a ``RowGrad`` and takes
these gradients out of sight of torch's step; a post-hook that runs before all others puts them
back. One global pre-hook keeps the two in that place in every optimizer, also in copies of one and
in one built later. SGD and Adagrad are done on touched rows where a zero gradient changes nothing
(``support``); any other optimizer gets the plain dense gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from recast.errors import UsageError
from recast.runtime import row_update
from recast.runtime.row_count import count
from recast.runtime.row_grad import RowGrad, claim
from recast.runtime.row_update import Update

_HOOKS: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, RemovableHandle]] = WeakKeyDictionary()
_HIDDEN: WeakKeyDictionary[Optimizer, list[tuple[Tensor, RowGrad]]] = WeakKeyDictionary()


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
    _place_hooks(optimizer)
    for group in optimizer.param_groups:
        if support(optimizer, group) is None:
            for parameter in group["params"]:
                claim(parameter, optimizer)


def support(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """None where the tables of ``group`` are updated on touched rows only, else the reason."""
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        if isinstance(optimizer, kind) and type(optimizer).step is kind.step:
            break
    else:
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


# --- the hooks -----------------------------------------------------------------------------------


def _place_hooks(optimizer: Optimizer) -> None:
    """Ours behind every other pre-hook and before every other post-hook."""
    pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    handles = _HOOKS.get(optimizer)
    if handles is None or handles[0].id not in pre or handles[1].id not in post:
        handles = (
            optimizer.register_step_pre_hook(_before_step),
            optimizer.register_step_post_hook(_after_step),
        )
        _HOOKS[optimizer] = handles
    pre.move_to_end(handles[0].id)  # type: ignore[attr-defined]
    post.move_to_end(handles[1].id, last=False)  # type: ignore[attr-defined]


def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Global hooks run before an optimizer's own. A step being compiled is left to the compiler.
    if not torch.compiler.is_compiling():
        _place_hooks(optimizer)


register_optimizer_step_pre_hook(_before_any_step)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _update(optimizer)
        return None

    def then_update() -> Any:
        loss = closure()
        _update(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": then_update}
    return (args[0], then_update, *args[2:]), kwargs


@torch.compiler.disable
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for parameter, grad in _HIDDEN.pop(optimizer, ()):
        if parameter.grad is None:
            parameter.grad = grad


@torch.compiler.disable
def _update(optimizer: Optimizer) -> None:
    """Update tables from their row gradients, and hide these from torch's step."""
    hidden: list[tuple[Tensor, RowGrad]] = []
    updates: list[Update] = []
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
            hidden.append((parameter, grad))
            if not found_inf:
                updates.append(_update_of(optimizer, group, parameter, grad, scale))
    row_update.apply(updates)
    for update in updates:
        count("fused-step")
        if update.state is not None:
            optimizer.state[update.weight]["step"] += 1
        if scale != 1.0:
            update.grad.rescale(scale)  # as torch's fused steps leave it: unscaled
    for parameter, _ in hidden:
        parameter.grad = None
    _HIDDEN[optimizer] = hidden


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
