"""The optimizer step of dense parameters inside a recording: torch's formulas, rates on the device.

Torch's SGD and Adagrad take the learning rate as a number of the host, which a replay would repeat
for ever. Here it is a tensor of one number, renewed before a replay only where it changed: a
schedule costs nothing. The operations are those of ``torch.optim``'s foreach steps, in their order;
optimizers that can be captured (``capturable=True``, or SGD and Adagrad with ``fused=True``) take
such a tensor themselves, and step by their own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from recast.runtime.recording import Unrecordable
from recast.runtime.rows.rules import step_of

Group = Mapping[str, Any]

_OWN = (torch.optim.SGD, torch.optim.Adagrad)
_TENSOR_RATE = (torch.optim.Adam, torch.optim.AdamW)


def why_not(optimizer: Optimizer) -> str | None:
    """Why a step of ``optimizer`` on dense parameters cannot be recorded, or None."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return f"{name} is made with differentiable=True"
        if _is_own(optimizer):
            if isinstance(group["weight_decay"], Tensor):
                return f"the weight_decay of {name} is a tensor"
            if isinstance(group["lr"], Tensor) and _decays(group):
                return f"the lr of {name} is a tensor, and lr_decay is not 0"
        elif "capturable" not in group:
            return f"{name} on dense parameters; SGD, Adagrad and those with capturable=True can be"
        elif not group["capturable"]:
            return f"{name} counts its steps on the host; make it with capturable=True"
    return None


def _is_own(optimizer: Optimizer) -> bool:
    own = step_of(type(optimizer))
    return any(isinstance(optimizer, k) and own is step_of(k) for k in _OWN)


def _decays(group: Group) -> bool:
    """Whether the rate of a group depends on the number of steps, and torch does not see to it."""
    return bool(group.get("lr_decay")) and not group.get("fused")


def baked(optimizer: Optimizer) -> tuple[object, ...]:
    """The numbers that a recording repeats as they are: another one asks for a new recording."""
    return tuple(
        (key, _identity(value))
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params" and not (key == "lr" and _renews(optimizer, group))
    )


def _identity(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.is_cpu and value.numel() == 1 else id(value)


def _renews(optimizer: Optimizer, group: Group) -> bool:
    """Whether the learning rate is brought to the device anew: by us, or with the tables."""
    return not _on_device(group["lr"]) and ("capturable" not in group or _takes_rate(optimizer))


def _takes_rate(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, _TENSOR_RATE)


class DenseStep:
    """The rates of one optimizer on ``device``, and its step.

    Made before the recording, whose replays read the rates.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._held = [self._rate(group) for group in optimizer.param_groups]
        self._rates = [torch.full((), held, device=device) for held in self._held]
        self._counts: list[Tensor] = []  # steps counted on the host

    @torch.no_grad()
    def renew(self) -> None:
        """Before a replay: rates as the groups have them now, and one step more counted."""
        for k, group in enumerate(self._optimizer.param_groups):
            rate = self._rate(group)
            if rate != self._held[k]:
                self._held[k] = rate
                self._rates[k].fill_(rate)
        _count(self._counts)

    @torch.no_grad()
    def run(self, groups: list[dict[str, Any]]) -> None:
        """Step the parameters of ``groups``, which are those of the optimizer less its tables.

        Raises Unrecordable.
        """
        optimizer = self._optimizer
        if not any(p.grad is not None for group in groups for p in group["params"]):
            return
        why = why_not(optimizer)
        if why is not None:
            raise Unrecordable(why)
        if not _is_own(optimizer) or any(group.get("fused") for group in groups):
            rates = self._rates if _takes_rate(optimizer) or _is_own(optimizer) else None
            _step_with(optimizer, groups, rates)
            return
        for group, rate in zip(groups, self._rates, strict=True):
            lr = group["lr"] if _on_device(group["lr"]) else rate
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.layout is not torch.strided for p in params):
                raise Unrecordable("a gradient is sparse; give its table to recast.optimize")
            if params:
                states = [optimizer.state.get(p, {}) for p in params]
                step = _sgd if isinstance(optimizer, torch.optim.SGD) else _adagrad
                step(params, [p.grad for p in params], states, group, lr)
                self._counts += [s["step"] for s in states if "step" in s]
        _count(self._counts)

    def _rate(self, group: Group) -> float:
        lr = group["lr"]
        if _on_device(lr):
            return 0.0  # read where it is
        if not _decays(group) or not _is_own(self._optimizer):
            return float(lr)
        steps = {float(s["step"]) for p in group["params"] if (s := self._optimizer.state.get(p))}
        if len(steps) > 1:
            raise Unrecordable("lr_decay, and parameters with different numbers of steps")
        return float(lr) / (1 + next(iter(steps), 0.0) * group["lr_decay"])


def _on_device(lr: object) -> bool:
    return isinstance(lr, Tensor) and not lr.is_cpu


def _step_with(
    optimizer: Optimizer, groups: list[dict[str, Any]], rates: list[Tensor] | None
) -> None:
    """The optimizer's own step on ``groups``, with tensors in place of numbers for their rates."""
    if rates is not None:
        groups = [
            group if isinstance(group["lr"], Tensor) else {**group, "lr": rate}
            for group, rate in zip(groups, rates, strict=True)
        ]
    stand_in: Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = groups
    if not any(group.get("fused") for group in groups):
        # What loss scaling tells a step: only fused ones ask, the others refuse to be told.
        stand_in.__dict__.pop("found_inf", None)
    # Below the hooks: those of the tables have run, and others are refused.
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(stand_in)


def _count(steps: list[Tensor]) -> None:
    if steps:  # a tensor and alpha: a Python number would be wrapped once for each
        torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)


def _signed(grads: list[Tensor], params: list[Tensor], group: Group) -> list[Tensor]:
    """Gradients with ``maximize`` and ``weight_decay`` in them; the given ones are not changed."""
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if group["weight_decay"] != 0:
        grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
    return grads


def _sgd(
    params: list[Tensor], grads: list[Tensor], states: list[Any], group: Group, lr: Tensor
) -> None:
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


def _adagrad(
    params: list[Tensor], grads: list[Tensor], states: list[Any], group: Group, lr: Tensor
) -> None:
    sums = [state["sum"] for state in states]
    grads = _signed(grads, params, group)
    torch._foreach_addcmul_(sums, grads, grads, value=1)
    roots = torch._foreach_sqrt(sums)
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(params, torch._foreach_mul(grads, -lr), roots)
