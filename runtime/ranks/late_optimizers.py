"""Optimizers over parts of tables: all save and load them as wholes, whenever they were made.

``optimize`` knows the one that it was given. Any other (one of several, one made afterwards, or a
copy) is noticed when it first steps: it is refused if its numbers would not be those of one
process, and whole state that was loaded into it before is cut as its tables are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recast.errors import UsageError
from recast.runtime import optim
from recast.runtime.ranks import dense_reduce, shards, step_record

# They look at a gradient as a whole, so on a part of a table they would compute something else.
NOT_BY_PART = tuple(
    getattr(torch.optim, name)
    for name in ("Adafactor", "Muon", "LBFGS")
    if hasattr(torch.optim, name)
)
_PREPARED: WeakSet[Optimizer] = WeakSet()
_STARTED: list[bool] = []


def start() -> None:
    """From now on, call :func:`prepare` for every optimizer here before its first step."""
    if not _STARTED:
        _STARTED.append(True)
        register_optimizer_step_pre_hook(_before_any_step)


def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    if optimizer not in _PREPARED:
        prepare(optimizer)
    dense_reduce.check_step(optimizer)
    step_record.note_step(optimizer)


def hooks() -> tuple[Callable[..., Any], ...]:
    """The step hook of this module, so that others can tell it from the user's."""
    return (_before_any_step,)


def prepare(optimizer: Optimizer) -> None:
    """Let ``optimizer`` save and load whole states of tables; what it holds now becomes local.

    Raises:
        UsageError: on parts of tables it would compute other numbers than on whole ones.
    """
    if optimizer in _PREPARED:
        return
    held = [(p, shards.of(p)) for group in optimizer.param_groups for p in group["params"]]
    parts = [(p, own) for p, own in held if own is not None and not own.hashed]
    if parts:
        _check(optimizer, [own for _, own in parts])
        for parameter, own in parts:
            state = optimizer.state.get(parameter)
            if state:
                state.update({key: _cut(value, own) for key, value in state.items()})
        from recast.runtime.ranks import shards_state  # here: importing DTensor takes two seconds

        shards_state.hook_optimizer(optimizer)
        _PREPARED.add(optimizer)


def _check(optimizer: Optimizer, parts: list[shards.ShardedTable]) -> None:
    name = type(optimizer).__name__
    if name == "ZeroRedundancyOptimizer":  # by name, so as not to import it
        raise UsageError(
            f"{name} cannot step {parts[0].table.name}, of which every rank has a part",
            why="it has each parameter stepped by one rank, and gives the result to all",
            tries=("the optimizer itself: the state of spread tables is spread already",
                   "optimize(..., world_size=1), for whole tables on every rank"),
        )  # fmt: skip
    if isinstance(optimizer, NOT_BY_PART):
        raise UsageError(
            f"{name} cannot step {parts[0].table.name}, of which every rank has a part",
            why=f"{name} steps a table as a whole",
            tries=(f"optimize(model, optimizer), which keeps tables whole for {name}",
                   "another optimizer for the tables"),
        )  # fmt: skip
    cut = next((own for own in parts if own.by_column), None)
    if cut is not None and isinstance(optimizer, optim.RowWiseAdagrad):
        raise UsageError(
            f"{name} cannot step {cut.table.name}, whose columns are on several ranks",
            why=f"{name} needs the gradient of whole rows",
            tries=("optimize(model, optimizer), which cuts no columns then",
                   f"sharding={{{cut.table.name!r}: 'row_wise'}}"),
        )  # fmt: skip


def _cut(value: Any, own: shards.ShardedTable) -> Any:
    """This rank's part of a whole tensor that was loaded; anything else unchanged."""
    if not isinstance(value, Tensor) or tuple(value.shape) not in (own.shape, own.shape[:1]):
        return value
    if own.whole and type(value) is Tensor:
        return value
    from recast.runtime.ranks import shards_state

    return shards_state.to_local(value, own)
