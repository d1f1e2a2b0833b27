"""Optimizer steps on row gradients: the user's own optimizer, told to skip what is done here.

A pre-hook that runs after all others updates the tables whose gradient is a ``RowGrad``; torch's
step then runs on a stand-in for the optimizer that shares its state but lists only the other
parameters. So no gradient is moved, and there is nothing to restore when a step raises. One global
pre-hook keeps ours in last place in every optimizer, also in copies and in those built later.
``rules`` says which optimizers can be stepped on looked-up rows only, ``fading`` which of them move
the others without a dense gradient; any other optimizer gets one.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import SGD
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from recast.errors import RecastWarning, UsageError
from recast.runtime.recorded import recording
from recast.runtime.rows import ages as row_ages
from recast.runtime.rows import dense_step, fading, native_step, settings
from recast.runtime.rows import rules as row_rules
from recast.runtime.rows.count import count
from recast.runtime.rows.fading import Fading
from recast.runtime.rows.grad import RowGrad, claim
from recast.runtime.rows.rules import Rule
from recast.runtime.rows.step import HALVES, Step

_HOOKS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
before_update: list[Callable[[Optimizer], None]] = []  # called before tables are updated
after_update: list[Callable[[Optimizer], None]] = []  # called after that
instead: list[Callable[[Optimizer], bool]] = []  # may do the whole step, and then return True
# Adds to an out-of-memory error of a step how much memory each table takes.
_EXPLAIN: WeakKeyDictionary[Optimizer, Callable[[Exception], None]] = WeakKeyDictionary()
# The gradients of sharded tables that are dense for the time of a step, and whose they are.
_LENT: WeakKeyDictionary[Optimizer, list[tuple[Tensor, RowGrad]]] = WeakKeyDictionary()

Groups = list[dict[str, Any]]


def attach(optimizer: Optimizer, *, lazy: bool = False) -> None:
    """Let ``optimizer`` update tables from row gradients.

    From now on its tables with ``sparse=True`` get row gradients too, in groups that are supported.
    ``lazy``: Adam and AdamW step looked-up rows only, by the formulas of ``rules``. Parameters on
    the CPU that keep a dense gradient are stepped by torch's fused kernels (``dense_step``).

    Raises:
        UsageError: not a torch optimizer.
    """
    _check(optimizer)
    settings.change(optimizer, lazy=lazy, fused=True)
    _place_hook(optimizer)
    for group in optimizer.param_groups:
        if support(optimizer, group) is None:
            for parameter in group["params"]:
                claim(parameter, optimizer)


def when_full(optimizer: Optimizer, explain: Callable[[Exception], None]) -> None:
    """Let ``explain`` extend the error if there is not enough memory to update tables.

    Such a step has changed no table: all memory is allocated before the first row is written.
    """
    _EXPLAIN[optimizer] = explain


def stochastic_rounding(optimizer: Optimizer, on: bool = True) -> None:
    """Let ``optimizer`` use stochastic rounding for tables in fp16 and bf16.

    Rounding to nearest loses a step that is smaller than half the distance to the next number.
    Stochastic rounding takes it with a probability that makes the expected value right. It applies
    to tables that are stepped on looked-up rows only (see ``recast.optimize``); all other
    parameters are rounded to nearest. The choices depend on ``torch.manual_seed``, but draw nothing
    from its generator. ``on=False`` turns it off again.

    Raises:
        UsageError: not a torch optimizer, or one that steps every table as a whole.
    """
    _check(optimizer)
    if on:
        reasons = [support(optimizer, group) for group in optimizer.param_groups]
        if all(reasons):
            raise _cannot_round(optimizer, str(reasons[0]))
    settings.change(optimizer, at_random=on)


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


def is_lazy(optimizer: Optimizer) -> bool:
    """Whether Adam steps only looked-up rows of its tables."""
    return settings.of(optimizer).lazy


def support(optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
    """None if only looked-up rows of the tables in ``group`` are updated; else the reason."""
    return row_rules.reason(optimizer, group, is_lazy(optimizer))


def why_dense(optimizer: Optimizer, group: Mapping[str, Any], table: Tensor) -> str | None:
    """Why the gradient of ``table`` becomes dense at each step; None if it does not."""
    why_not_rows, rule = support(optimizer, group), _fading(optimizer)
    if why_not_rows is None:
        return None
    if rule is not None:
        return rule.why_not(group) or row_ages.why_not_table(table, rule)
    if _rule(optimizer) is None:
        name = type(optimizer).__name__
        return f"{name} is not fused; SGD, the Adagrads, Adam, SparseAdam and RMSprop are"
    return why_not_rows


def rounds_at_random(optimizer: Optimizer) -> bool:
    """Whether stochastic rounding is on for tables in fp16 and bf16."""
    return settings.of(optimizer).at_random


def notes(optimizer: Optimizer) -> list[str]:
    """What ``sparse_semantics`` means here, and how dense parameters are stepped: sentences for the
    report.
    """
    rule, name = _rule(optimizer), type(optimizer).__name__
    told = []
    if is_lazy(optimizer) and rule is not None and not rule.exact:
        told.append(
            f'sparse_semantics="lazy": {name} steps looked-up rows only, as SparseAdam does; a'
            " dense gradient, as of a batch on the plain forward and under DDP, steps all rows of a"
            " table"
        )
    elif is_lazy(optimizer):
        told.append(f'sparse_semantics="lazy" is for Adam and AdamW; {name} is exact')
    if (moving := _fading(optimizer)) is not None:
        whole = [group for group in optimizer.param_groups if _steps_whole(optimizer, group)]
        told += dict.fromkeys(f"{name}: {moving.note(group)}" for group in whole)
    return told + dense_step.notes(optimizer)


def _steps_whole(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a matrix of the group is stepped as a whole, without a dense gradient."""
    if support(optimizer, group) is None:
        return False
    return any(p.dim() == 2 and why_dense(optimizer, group, p) is None for p in group["params"])


def _rule(optimizer: Optimizer) -> Rule | None:
    return row_rules.rule_of(optimizer, is_lazy(optimizer))


def _fading(optimizer: Optimizer) -> Fading | None:
    """The rule of tables for which there is a reason against the other one."""
    rule = fading.rule_of(optimizer)
    return None if is_lazy(optimizer) and isinstance(rule, fading.WholeAdam) else rule


# --- the hooks -----------------------------------------------------------------------------------


def _place_hook(optimizer: Optimizer) -> None:
    """Place our hook after every other step pre-hook of the optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks
    if type(hooks) is not OrderedDict:
        # A wrapper's own, made without torch's constructor: a handle needs what can be referred to
        # weakly, and the order is set below.
        hooks = optimizer._optimizer_step_pre_hooks = OrderedDict(hooks)
    handle = _HOOKS.get(optimizer)
    if handle is None or handle.id not in hooks:
        handle = _HOOKS[optimizer] = optimizer.register_step_pre_hook(_before_step)
    hooks.move_to_end(handle.id)


def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Global hooks run before an optimizer's own. A step being compiled is left to the compiler.
    if not torch.compiler.is_compiling():
        _place_hook(optimizer)


register_optimizer_step_pre_hook(_before_any_step)


def hooks() -> tuple[Callable[..., Any], ...]:
    """The step hooks of this module, so that others can tell them from the user's."""
    return _before_any_step, _before_step


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        other = _without_tables(optimizer)
        return None if other is None else ((other, *args[1:]), kwargs)

    # With a closure, gradients are computed inside the step.
    other = _for_closure(optimizer)

    def then_update() -> Any:
        loss = closure()
        _after_closure(optimizer, other)
        return loss

    if "closure" in kwargs:
        return (other, *args[1:]), {**kwargs, "closure": then_update}
    return (other, then_update, *args[2:]), kwargs


@_disable_dynamo
def _without_tables(optimizer: Optimizer) -> Optimizer | None:
    """Update tables, or do the whole step; returns a stand-in that steps the rest, or None if the
    optimizer itself is to step everything.
    """
    done = any([do(optimizer) for do in instead])
    groups = [] if done else _update_and_fuse(optimizer)
    return None if groups is None else _stand_in(optimizer, groups)


@_disable_dynamo
def _for_closure(optimizer: Optimizer) -> Optimizer:
    """What torch is to step: never an optimizer whose tables may be updated here. Any other is
    stepped itself, as a step of the user's own may set attributes.
    """
    if _rule(optimizer) is None and _fading(optimizer) is None:
        return optimizer
    return _stand_in(optimizer, optimizer.param_groups)


@_disable_dynamo
def _after_closure(optimizer: Optimizer, other: Optimizer) -> None:
    """Update tables; leaves the rest to ``other``, which is about to step."""
    if other is optimizer:
        _update_tables(optimizer)
        return
    groups = _update_and_fuse(optimizer)
    other.__dict__.update(optimizer.__dict__)  # the closure may have loaded a state
    if groups is not None:
        other.param_groups = groups


def _update_and_fuse(optimizer: Optimizer) -> Groups | None:
    """Update tables; returns the groups left to torch, by its fused kernels where they fit. None:
    all, as they are.
    """
    groups = _update_tables(optimizer)
    if not settings.of(optimizer).fused:
        return groups
    fused = dense_step.fused(optimizer, optimizer.param_groups if groups is None else groups)
    return groups if fused is None else fused


@_disable_dynamo  # torch 2.11 cannot compile it
def stand_in(optimizer: Optimizer, groups: Groups) -> Optimizer:
    """A copy of the optimizer that shares all its attributes, but has other groups."""
    return _stand_in(optimizer, groups)


def _stand_in(optimizer: Optimizer, groups: Groups) -> Optimizer:
    other: Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = groups
    return other


# The decorator that torch.optim uses: ``torch.compiler.disable`` would import the whole compiler,
# and this module would take a second and a half to import.
@_disable_dynamo
def update_tables(optimizer: Optimizer) -> Groups | None:
    """Update tables from their row gradients; returns the groups left to torch, None: all."""
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
    stochastic, moving = rounds_at_random(optimizer), _fading(optimizer)
    try:
        if moving is None:
            return _locked(optimizer, rule, moving, stochastic)
        turns = row_ages.turns_of(optimizer)
        with turns.lock:  # another thread may be reading moments
            turns.begin_step()
            return _locked(optimizer, rule, moving, stochastic)
    except torch.OutOfMemoryError as error:
        if optimizer in _EXPLAIN:
            _EXPLAIN[optimizer](error)
        raise


def _locked(
    optimizer: Optimizer, rule: Rule | None, moving: Fading | None, stochastic: bool
) -> Groups | None:
    left = None if stochastic else native_step.step(optimizer, rule, moving)
    return left if left is not None else _each(optimizer, rule, moving, stochastic)


def _lend(optimizer: Optimizer, parameter: Tensor, grad: RowGrad) -> None:
    """Let torch step by the dense gradient of a sharded table. Afterwards ``grad`` is put back: the
    ranks are asked for its norm, also where ``zero_grad(set_to_none=False)`` keeps it.
    """
    if optimizer not in _LENT:
        _LENT[optimizer] = []
        optimizer.register_step_post_hook(_put_back)
    _LENT[optimizer].append((parameter, grad))


def _put_back(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for parameter, grad in _LENT[optimizer]:
        if parameter.grad is grad.cell.full:
            parameter.grad = grad
    _LENT[optimizer].clear()


def _place_states(optimizer: Optimizer) -> None:
    """Give the states that this step makes their places in ``optimizer.state``, in the order in
    which torch would make them: tables make theirs before torch steps the rest. What is empty is no
    state to torch.
    """
    state = optimizer.state
    for group in optimizer.param_groups:
        params = group["params"]
        if any([type(p.grad) is RowGrad and p not in state for p in params]):
            break
    else:
        return
    for group in optimizer.param_groups:
        if group.get("momentum", 1) == 0 and isinstance(optimizer, SGD):
            continue  # it makes none
        for parameter in group["params"]:
            if parameter.grad is not None:
                state[parameter]  # a defaultdict


def _takes_sparse(
    optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor, grad: RowGrad, rule: Rule | None
) -> bool:
    """Whether torch is to step a table by its own sparse gradient, as where nobody claims it: in a
    group whose settings have changed since, as a scheduler gives SGD momentum.
    """
    if rule is None or not rule.exact or not grad.cell.sparse or grad.cell.table is not None:
        return False
    if group.get("fused") or group.get("weight_decay"):
        return False  # which torch refuses
    if recording.current() is not None:
        return False  # to count the ids waits for the device
    # What a dense gradient has begun goes on with one: not all of torch's formulas mix the two.
    held = optimizer.state.get(weight, {}).get("momentum_buffer")
    return held is None or held.layout is torch.sparse_coo


def _each(
    optimizer: Optimizer, rule: Rule | None, moving: Fading | None, stochastic: bool
) -> Groups | None:
    """Like ``_update``, one table after the other."""
    if rule is not None or moving is not None:
        _place_states(optimizer)
    step, whole = Step(optimizer, rule), Step(optimizer, moving)
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
            rows = [(parameter, grad, None) for parameter, grad in found if grad.lazy]
            done.update([id(parameter) for parameter, _, _ in rows])
            step.add(index, rows)
        elif stochastic and any(parameter.dtype in HALVES for parameter, _ in found):
            # A group with settings of its own, or that a scheduler has given momentum.
            warnings.warn(str(_cannot_round(optimizer, reason)), RecastWarning, stacklevel=2)
        setting, steady = None, False
        if reason is not None and moving is not None:
            setting, steady = row_ages.setting_of(optimizer, index, moving)
        if setting is not None:
            row_ages.remember(optimizer, index, setting.betas)
        moved = []
        for parameter, grad in found:
            if id(parameter) in done:
                continue
            how = row_ages.of(optimizer, group, parameter, grad, setting, steady)
            if how is not None:
                done.add(id(parameter))
                moved.append((parameter, grad, how))
                continue
            if grad.lazy and _takes_sparse(optimizer, group, parameter, grad, rule):
                parameter.grad = grad.coalesce()
                continue
            if grad.lazy:
                count("dense-step", type(optimizer).__name__)
            parameter.grad = grad.promote(like=parameter)
            if grad.cell.table is not None:
                _lend(optimizer, parameter, grad)
        if moved:
            whole.add(index, moved)
    if not done:
        return None
    if step.updates or not whole.updates:
        step.run(stochastic=stochastic)
    if whole.updates:
        whole.run(stochastic=False)
    return [
        {**group, "params": [p for p in group["params"] if id(p) not in done]}
        for group in optimizer.param_groups
    ]
