"""Optimizer steps on row gradients: the user's own optimizer, told to skip what is done here.

A pre-hook that runs after all others updates the tables whose gradient is a ``RowGrad``; torch's
step then runs on a stand-in for the optimizer that shares all of it but lists the other parameters
only. So no gradient is moved, and there is nothing to put back when a step raises. One global
pre-hook keeps ours in its place in every optimizer, also in copies of one and in one built later.
``rules`` says which optimizers can be stepped on touched rows; any other gets the plain dense
gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from recast.errors import RecastWarning, UsageError
from recast.runtime.rows import group as row_group
from recast.runtime.rows import rules as row_rules
from recast.runtime.rows.count import count
from recast.runtime.rows.grad import RowGrad, claim
from recast.runtime.rows.rules import Rule
from recast.runtime.rows.step import HALVES, Step

_HOOKS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
before_update: list[Callable[[Optimizer], None]] = []  # called before tables are looked at
after_update: list[Callable[[Optimizer], None]] = []  # called when they are done with
instead: list[Callable[[Optimizer], bool]] = []  # may do the whole step; whether it was done
# What adds to an out-of-memory error of a step which tables take how much.
_EXPLAIN: WeakKeyDictionary[Optimizer, Callable[[Exception], None]] = WeakKeyDictionary()

# Of ``optimizer.defaults``: they go with copies of an optimizer, and into no checkpoint.
_SEMANTICS, _ROUNDING = "sparse_semantics", "table_rounding"

Groups = list[dict[str, Any]]


def attach(optimizer: Optimizer, *, lazy: bool = False) -> None:
    """Let ``optimizer`` update tables from row gradients.

    Its tables with ``sparse=True`` get row gradients too from now on, in the groups it can fuse.
    ``lazy``: Adam and AdamW step touched rows only, by the formulas of ``rules``.

    Raises:
        UsageError: not a torch optimizer.
    """
    _check(optimizer)
    _set(optimizer, _SEMANTICS, "lazy" if lazy else None)
    _place_hook(optimizer)
    for group in optimizer.param_groups:
        if support(optimizer, group) is None:
            for parameter in group["params"]:
                claim(parameter, optimizer)


def when_full(optimizer: Optimizer, explain: Callable[[Exception], None]) -> None:
    """Let ``explain`` add to an out-of-memory error in which tables cannot be updated.

    Such a step has changed no table: memory is asked for before the first row is written.
    """
    _EXPLAIN[optimizer] = explain


def stochastic_rounding(optimizer: Optimizer, on: bool = True) -> None:
    """Let ``optimizer`` round tables of fp16 and bf16 up or down at random, rather than to nearest.

    A step smaller than half the distance to the next number would be lost by rounding to nearest;
    so it is taken now and then, such that the expected value is right. For tables that are stepped
    on touched rows (see ``recast.optimize``); all other parameters are rounded as ever. The choices
    follow ``torch.manual_seed`` and take no number from its generator.

    Raises:
        UsageError: not a torch optimizer, or one that steps no table on touched rows.
    """
    _check(optimizer)
    if on:
        reasons = [support(optimizer, group) for group in optimizer.param_groups]
        if all(reasons):
            raise _cannot_round(optimizer, str(reasons[0]))
    _set(optimizer, _ROUNDING, "stochastic" if on else None)


def _cannot_round(optimizer: Optimizer, reason: str) -> UsageError:
    return UsageError(
        f"stochastic_rounding: {type(optimizer).__name__} rounds its tables to nearest",
        why=f"{reason}; only what is stepped on touched rows is rounded here",
        tries=(
            "torch.optim.SGD without momentum, Adagrad, recast.optim.RowWiseAdagrad or SparseAdam",
            'Adam and AdamW: recast.optimize(..., sparse_semantics="lazy") first',
            "stochastic_rounding(optimizer, False)",
        ),
    )


def _check(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer",
            why="tables are updated by its step hooks",
            tries=("pass the torch optimizer that it wraps",),
        )


def _set(optimizer: Optimizer, key: str, value: str | None) -> None:
    optimizer.defaults.pop(key, None)
    if value is not None:
        optimizer.defaults[key] = value


def is_lazy(optimizer: Optimizer) -> bool:
    """Whether Adam's tables are stepped on touched rows only."""
    return optimizer.defaults.get(_SEMANTICS) == "lazy"


def support(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """None where the tables of ``group`` are updated on touched rows only, else the reason."""
    return row_rules.reason(optimizer, group, is_lazy(optimizer))


def rounds_at_random(optimizer: Optimizer) -> bool:
    """Whether tables of fp16 and bf16 are rounded up or down at random."""
    return optimizer.defaults.get(_ROUNDING) == "stochastic"


def notes(optimizer: Optimizer) -> list[str]:
    """What ``sparse_semantics="lazy"`` comes to, in a sentence for the report."""
    if not is_lazy(optimizer):
        return []
    rule, name = _rule(optimizer), type(optimizer).__name__
    if rule is not None and not rule.exact:
        return [f'sparse_semantics="lazy": {name} steps looked-up rows only, as SparseAdam does']
    return [f'sparse_semantics="lazy" is for Adam and AdamW; {name} is exact']


def _rule(optimizer: Optimizer) -> Rule | None:
    return row_rules.rule_of(optimizer, is_lazy(optimizer))


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


def hooks() -> tuple[Callable[..., Any], ...]:
    """The step hooks of this module, for those who must know them from others'."""
    return _before_any_step, _before_step


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        other = _without_tables(optimizer)
        return None if other is None else ((other, *args[1:]), kwargs)

    # The gradients come to be inside the step, when it calls the closure.
    other = (
        stand_in(optimizer, optimizer.param_groups) if _rule(optimizer) is not None else optimizer
    )

    def then_update() -> Any:
        loss = closure()
        groups = update_tables(optimizer)
        if groups is not None:
            other.param_groups = groups
        return loss

    if "closure" in kwargs:
        return (other, *args[1:]), {**kwargs, "closure": then_update}
    return (other, then_update, *args[2:]), kwargs


@_disable_dynamo
def _without_tables(optimizer: Optimizer) -> Optimizer | None:
    """Update tables, or do the whole step; who steps what is left, None if all is."""
    done = any([do(optimizer) for do in instead])
    groups = [] if done else _update_tables(optimizer)
    return None if groups is None else _stand_in(optimizer, groups)


@_disable_dynamo  # the compiler of torch 2.11 falls over it
def stand_in(optimizer: Optimizer, groups: Groups) -> Optimizer:
    """The optimizer, state and all, with other groups."""
    return _stand_in(optimizer, groups)


def _stand_in(optimizer: Optimizer, groups: Groups) -> Optimizer:
    other: Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = groups
    return other


# As torch.optim does for its own steps: ``torch.compiler.disable`` would import the whole compiler,
# a second and a half, with this module.
@_disable_dynamo
def update_tables(optimizer: Optimizer) -> Groups | None:
    """Update tables from their row gradients; what is left to torch, or None if all of it."""
    return _update_tables(optimizer)


def _update_tables(optimizer: Optimizer) -> Groups | None:
    for prepare in before_update:
        prepare(optimizer)
    left = _update(optimizer)
    for finish in after_update:
        finish(optimizer)
    return left


def _update(optimizer: Optimizer) -> Groups | None:
    rule = _rule(optimizer)
    stochastic = rounds_at_random(optimizer)
    for group in optimizer.param_groups:
        group.pop(_SEMANTICS, None)  # a group added later was given all defaults
        group.pop(_ROUNDING, None)
    try:
        left = None if stochastic else row_group.step(optimizer, rule)
        return left if left is not None else _each(optimizer, rule, stochastic)
    except torch.OutOfMemoryError as error:
        if optimizer in _EXPLAIN:
            _EXPLAIN[optimizer](error)
        raise


def _each(optimizer: Optimizer, rule: Rule | None, stochastic: bool) -> Groups | None:
    """As ``_update``, one table after the other."""
    step = Step(optimizer, rule)
    done: set[int] = set()
    for index, group in enumerate(optimizer.param_groups):
        found = [(p, p.grad) for p in group["params"] if type(p.grad) is RowGrad]
        if not found:
            continue
        fits = all(grad.lazy and grad.cell.sparse for _, grad in found)
        if rule is not None and rule.sparse and not fits:
            return None  # torch's own step refuses it
        reason = support(optimizer, group)
        if reason is None:
            rows = [(parameter, grad) for parameter, grad in found if grad.lazy]
            done.update([id(parameter) for parameter, _ in rows])
            step.add(index, rows)
        elif stochastic and any(parameter.dtype in HALVES for parameter, _ in found):
            # A group of its own, or one that a scheduler gave momentum since.
            warnings.warn(str(_cannot_round(optimizer, reason)), RecastWarning, stacklevel=2)
        for parameter, grad in found:
            if id(parameter) not in done:
                if grad.lazy:
                    count("dense-step", type(optimizer).__name__)
                parameter.grad = grad.promote()
    if not done:
        return None
    step.run(stochastic=stochastic)
    return [
        {**group, "params": [p for p in group["params"] if id(p) not in done]}
        for group in optimizer.param_groups
    ]
