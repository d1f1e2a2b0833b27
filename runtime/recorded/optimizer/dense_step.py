"""The optimizer step of dense parameters inside a recording: torch's formulas, rates on the device.

Torch's SGD and Adagrad take the learning rate as a host number, which a replay would repeat for
ever; Adam does so with the number of steps, too. Here they are tensors, updated before a replay
only if they changed: a schedule costs nothing. Float32 parameters of SGD, Adagrad, Adam and AdamW
are stepped by one launch per group (:mod:`.dense_cuda`). For others the operations are those of
``torch.optim``'s foreach steps, in their order; optimizers that can be captured
(``capturable=True``, or SGD and Adagrad with ``fused=True``) step by their own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded.optimizer import dense_cuda
from recast.runtime.recorded.optimizer.dense_cuda import Rule, Target
from recast.runtime.recorded.optimizer.dense_foreach import adagrad, sgd, step_with
from recast.runtime.recorded.recording import Unrecordable
from recast.runtime.rows import kernel as row_kernel
from recast.runtime.rows.rules import step_of

Group = Mapping[str, Any]

_OWN = (torch.optim.SGD, torch.optim.Adagrad)
_TENSOR_RATE = (torch.optim.Adam, torch.optim.AdamW)


def why_not(optimizer: Optimizer) -> str | None:
    """Why a step of ``optimizer`` by torch's own operations cannot be recorded, or None."""
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
        elif not type(optimizer).step.__module__.startswith("torch.optim."):
            return f"{name} has a step() of its own, whose work on the host a replay would not do"
        elif not group["capturable"]:
            return (
                f"{name} counts its steps on the host, and not all of its parameters are plain"
                " float32; make it with capturable=True"
            )
    return None


def _is_own(optimizer: Optimizer) -> bool:
    own = step_of(type(optimizer))
    return any(isinstance(optimizer, k) and own is step_of(k) for k in _OWN)


def _decays(group: Group) -> bool:
    """Whether the rate of a group depends on the number of steps, without torch handling it."""
    return bool(group.get("lr_decay")) and not group.get("fused")


def baked(optimizer: Optimizer) -> tuple[object, ...]:
    """The numbers that a recording bakes in: when one changes, a new recording is needed."""
    return tuple(
        (key, _identity(value))
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params" and not (key == "lr" and _renews(optimizer, group))
    )


def _identity(value: object) -> object:
    if isinstance(value, tuple | list):  # a list may be modified
        return tuple(map(_identity, value))
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.is_cpu and value.numel() == 1 else id(value)


def _renews(optimizer: Optimizer, group: Group) -> bool:
    """Whether each replay copies the learning rate to the device: by us, or with the tables."""
    return not _on_device(group["lr"]) and ("capturable" not in group or _takes_rate(optimizer))


def _takes_rate(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, _TENSOR_RATE)


def written(optimizer: Optimizer) -> tuple[tuple[int, int, float], ...]:
    """For each step count that the rate depends on: its version minus its value, if that differs
    from the first of its group, as (group, parameter, difference). Counting a step adds one to
    both, so a change shows that something else wrote to the count.
    """
    found: list[tuple[int, int, float]] = []
    for k, group in enumerate(optimizer.param_groups):
        if not _needs_steps(optimizer, group):
            continue
        first: float | None = None
        for place, parameter in enumerate(group["params"]):
            count = optimizer.state.get(parameter, {}).get("step")
            if isinstance(count, Tensor):
                writes = count._version - float(count)
                first = writes if first is None else first
                if writes != first:
                    found.append((k, place, writes - first))
    return tuple(found)


class _Part(NamedTuple):
    """The part of a group that one launch steps."""

    gpu: Gpu
    rule: Rule
    targets: list[Target]


class DenseStep:
    """The rates of one optimizer on ``device``, and its step. Made before the recording, whose
    replays read the rates.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        self._counted = [_needs_steps(optimizer, group) for group in groups]
        self._steps = [self._most_steps(group) for group in groups]
        self._held = [self._rate(g, n) for g, n in zip(groups, self._steps, strict=True)]
        self._rates = [
            torch.full((), held[0], device=device) if len(held) == 1
            else torch.tensor(held, device=device) for held in self._held
        ]  # fmt: skip
        self._lrs: list[object] = [group["lr"] for group in groups]
        self._leading: list[Tensor | None] = [None] * len(groups)  # for each group, a step count
        self._counts: list[Tensor] = []  # steps counted on the host
        for k, group in enumerate(groups):
            rule = self._rule(k, group)
            if rule is not None and any(p.dtype == torch.float32 for p in group["params"]):
                dense_cuda.warm(rule, device)

    def renew(self) -> None:
        """Called before a replay: copy the present rates of the groups, and count one more step."""
        for k, group in enumerate(self._optimizer.param_groups):
            lr = group["lr"]
            if lr is self._lrs[k] and type(lr) is float and not self._counted[k]:
                continue  # a change of anything else that a rate depends on needs another recording
            self._lrs[k] = lr
            leading = self._leading[k]
            rate = self._rate(group, 0.0 if leading is None else float(leading))
            if rate != self._held[k]:
                self._held[k] = rate
                with torch.no_grad():
                    for place, number in zip(self._rates[k].view(-1).unbind(), rate, strict=True):
                        place.fill_(number)
        row_kernel.count_steps(self._counts)

    @torch.no_grad()
    def run(self, groups: list[dict[str, Any]]) -> None:
        """Step the parameters of ``groups``: those of the optimizer without its tables. Raises
        Unrecordable.
        """
        optimizer = self._optimizer
        parts = [self._part(k, group) for k, group in enumerate(groups)]
        ours = {t.parameter for part in parts if part is not None for t in part.targets}
        groups = [{**g, "params": [p for p in g["params"] if p not in ours]} for g in groups]
        left = any(p.grad is not None for group in groups for p in group["params"])
        why = why_not(optimizer) if left else None
        if why is not None:
            raise Unrecordable(why)
        for k, (group, part) in enumerate(zip(groups, parts, strict=True)):
            if part is not None:
                self._in_one(k, group, part)
        if left:
            self._by_torch(groups)
        row_kernel.count_steps(self._counts)

    def leaves_out(self, groups: list[dict[str, Any]]) -> set[Tensor]:
        """The parameters of ``groups``, with their states, that :meth:`run` does not change if the
        device finds ``optimizer.found_inf`` set.
        """
        parts = [self._part(k, group) for k, group in enumerate(groups)]
        return {t.parameter for part in parts if part is not None for t in part.targets}

    # ---------------------------------------------------------------- in one launch

    def _part(self, k: int, group: Group) -> _Part | None:
        """The part of group ``k`` that the kernel steps; None if none."""
        rule = self._rule(k, group)
        if rule is None:
            return None
        found, gpu = [], None
        for p in group["params"]:
            serving = None if p.grad is None else dense_cuda.serving(p)
            if serving is None:
                continue
            state = self._optimizer.state.get(p, {})
            states = [state.get(name) for name in rule.states]
            if not dense_cuda.takes(p, (p.grad, *states)) or not self._fits(group, state, p):
                continue
            gpu = serving
            found.append(Target(p, p.grad, [t for t in states if t is not None], state.get("step")))
        return None if gpu is None else _Part(gpu, rule, found)

    def _rule(self, k: int, group: Group) -> Rule | None:
        """How the kernel steps group ``k``; None if torch has to."""
        optimizer, lr = self._optimizer, group["lr"]
        if group.get("fused") or group.get("differentiable"):
            return None
        numbers = [v for key, v in group.items() if key not in ("params", "lr")]
        if any(isinstance(number, Tensor) for number in (*numbers, *group.get("betas", ()))):
            return None
        if _on_device(lr) and _needs_steps(optimizer, group):
            return None
        if (lr if _on_device(lr) else self._rates[k]).dtype != torch.float32:
            return None
        found = _found(optimizer)
        if found is not None and found.dtype != torch.float32:
            return None
        if _is_adam(optimizer):
            decoupled = group.get("decoupled_weight_decay", False)
            return dense_cuda.adam(group, decoupled, not group["capturable"])
        if not _is_own(optimizer):
            return None
        is_sgd = isinstance(optimizer, torch.optim.SGD)
        return dense_cuda.sgd(group) if is_sgd else dense_cuda.adagrad(group)

    def _fits(self, group: Group, state: Mapping[str, Any], parameter: Tensor) -> bool:
        """Whether the step count of a parameter is where the kernel expects it."""
        steps = state.get("step")
        if not _is_adam(self._optimizer):
            return True
        if not isinstance(steps, Tensor):
            return False
        if not group["capturable"]:
            return steps.is_cpu
        return steps.device == parameter.device and steps.dtype == torch.float32

    def _in_one(self, k: int, group: Group, part: _Part) -> None:
        counts = [t.steps for t in part.targets if t.steps is not None]
        targets = part.targets
        found = _found(self._optimizer)
        if group.get("capturable"):
            if found is None:
                torch._foreach_add_(counts, 1)
            else:  # without alpha torch treats a 0-dim tensor as a number, and reads it
                torch._foreach_add_(counts, (found == 0).float().view(()), alpha=1)
        else:
            self._count_on_host(k, group, counts)
            targets = [target._replace(steps=None) for target in targets]
        rate = group["lr"] if _on_device(group["lr"]) else self._rates[k]
        dense_cuda.step(part.gpu, part.rule, targets, rate, found)

    # ---------------------------------------------------------------- by torch's operations

    def _by_torch(self, groups: list[dict[str, Any]]) -> None:
        optimizer = self._optimizer
        if not _is_own(optimizer) or any(group.get("fused") for group in groups):
            rates = self._rates if _takes_rate(optimizer) or _is_own(optimizer) else None
            step_with(optimizer, groups, rates)
            return
        for k, (group, rate) in enumerate(zip(groups, self._rates, strict=True)):
            lr = group["lr"] if _on_device(group["lr"]) else rate
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.layout is not torch.strided for p in params):
                raise Unrecordable("a gradient is sparse; give its table to recast.optimize")
            if params:
                states = [optimizer.state.get(p, {}) for p in params]
                step = sgd if isinstance(optimizer, torch.optim.SGD) else adagrad
                step(params, [p.grad for p in params], states, group, lr)
                self._count_on_host(k, group, [s["step"] for s in states if "step" in s])

    # ---------------------------------------------------------------- steps that the host counts

    def _most_steps(self, group: Group) -> float:
        """The step counts of the parameters of ``group`` so far, if the rate depends on them."""
        if not _needs_steps(self._optimizer, group):
            return 0.0
        states = [self._optimizer.state.get(p, {}) for p in group["params"]]
        return max((float(s["step"]) for s in states if "step" in s), default=0.0)

    def _count_on_host(self, k: int, group: Group, counts: list[Tensor]) -> None:
        """Count one more step in ``counts`` of group ``k``, now and before each replay."""
        self._counts += counts
        if counts and _needs_steps(self._optimizer, group):
            if any(float(count) != self._steps[k] for count in counts):
                raise Unrecordable(
                    f"{type(self._optimizer).__name__} on parameters with different numbers of"
                    " steps, on which the rate depends"
                )
            self._leading[k] = counts[0]

    def _rate(self, group: Group, steps: float) -> tuple[float, ...]:
        """The numbers that the device reads in the step after ``steps``."""
        lr = group["lr"]
        if _on_device(lr):
            return (0.0,)  # read where it is
        if not _needs_steps(self._optimizer, group):
            return (float(lr),)
        if _is_adam(self._optimizer):
            return dense_cuda.adam_numbers(group, steps + 1)
        return (float(lr) / (1 + steps * group["lr_decay"]),)


def _needs_steps(optimizer: Optimizer, group: Group) -> bool:
    """Whether these numbers depend on the number of steps, which the host counts."""
    if _is_adam(optimizer):
        return not group["capturable"] and not group.get("fused")
    return _is_own(optimizer) and _decays(group)


def _is_adam(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` uses the step of torch's Adam, which AdamW shares."""
    return isinstance(optimizer, torch.optim.Adam) and step_of(type(optimizer)) is step_of(
        torch.optim.Adam
    )


def _found(optimizer: Optimizer) -> Tensor | None:
    """Whether loss scaling found an infinite gradient: (1,) on the device; None without scaling."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found


def _on_device(lr: object) -> bool:
    return isinstance(lr, Tensor) and not lr.is_cpu
