"""The optimizer of a dynamic table: the state of new rows, its own steps, and its checkpoints.

State has a row for each row of the slab, under torch's names in ``optimizer.state``. If it has the
shape and dtype of the weights, both share one record in memory (Adagrad at 16 columns: 1.7 times as
fast). A row that was given to an id since the last step starts with the optimizer's initial state.
After the step, rows may be given to other ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim.optimizer import Optimizer

from recast.errors import CheckpointError, UsageError
from recast.runtime.dynamic import tiers as dynamic_tiers
from recast.runtime.dynamic.slab import hold, reserve
from recast.runtime.dynamic.table import DynamicTable, any_tables, of
from recast.runtime.rows import optimizer as row_optimizer
from recast.runtime.rows import rules as row_rules
from recast.runtime.rows import state_hooks


def tables(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor, DynamicTable]]:
    """(group, weight, table) of each dynamic table that ``optimizer`` steps."""
    if not any_tables():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            table = of(parameter)
            if table is not None:
                yield group, parameter, table


def check(optimizer: Optimizer, weight: Tensor, name: str, *, lazy: bool, sparse: bool) -> None:
    """Raise UsageError if ``optimizer`` would change rows that were not looked up."""
    group = _group(optimizer, weight)
    if group is None:
        return
    reason, kind = row_rules.reason(optimizer, group, lazy), type(optimizer).__name__
    rule = row_rules.rule_of(optimizer, lazy)
    if reason is None and rule is not None and rule.sparse and not sparse:
        reason = f"{kind} wants sparse=True of the module, as with a plain table"
    if reason is not None:
        raise UsageError(
            f"tables: {name}: {kind} cannot step a dynamic table",
            why=reason,
            tries=(
                "torch.optim.SGD without momentum, Adagrad, recast.optim.RowWiseAdagrad",
                "SparseAdam, or Adam with sparse_semantics='lazy'",
            ),
        )


def bytes_of_state(optimizer: Optimizer | None, weight: Tensor, *, lazy: bool) -> int:
    """Bytes of state that ``optimizer`` keeps for one row of ``weight``."""
    if optimizer is None:
        return 0
    rule, group = row_rules.rule_of(optimizer, lazy), _group(optimizer, weight)
    if rule is None or group is None:
        return 0
    start = rule.start(optimizer, group, _one_row(weight))
    return sum(start[name].numel() * start[name].element_size() for name in rule.states)


def _one_row(weight: Tensor) -> Tensor:
    return weight.detach().new_zeros(1, weight.shape[1])


def adopt(
    optimizer: Optimizer, weight: Tensor, table: DynamicTable, spare: dict[str, Tensor], *,
    lazy: bool,
) -> None:  # fmt: skip
    """Replace the state that ``optimizer`` has for the plain table by state for the slab.

    ``spare``: the memory of states that share a record with the weights, by name.
    """
    rule = row_rules.rule_of(optimizer, lazy)
    if rule is not None and rule.states and _group(optimizer, weight) is not None:
        state = optimizer.state[weight]
        begun = _begin(optimizer, weight, table, rule)
        kept = {name: value for name, value in state.items() if name not in rule.states}
        state.update({**begun, **spare, **kept})
    _hook(optimizer)


def states_in_record(optimizer: Optimizer | None, weight: Tensor, *, lazy: bool) -> list[str]:
    """Names of the states with the shape and dtype of the weights. A row's record contains them
    all, so that an update touches memory in one place.
    """
    rule = None if optimizer is None else row_rules.rule_of(optimizer, lazy)
    group = None if optimizer is None else _group(optimizer, weight)
    if optimizer is None or rule is None or group is None:
        return []
    one = _one_row(weight)
    start = rule.start(optimizer, group, one)
    same = one.shape, one.dtype
    return [name for name in rule.states if (start[name].shape, start[name].dtype) == same]


def _group(optimizer: Optimizer, weight: Tensor) -> dict[str, Any] | None:
    groups = optimizer.param_groups
    return next((g for g in groups if any(p is weight for p in g["params"])), None)


def _begin(
    optimizer: Optimizer, weight: Tensor, table: DynamicTable, rule: row_rules.Rule
) -> dict[str, Any]:
    """The state of a table before its first step, reserved for all rows."""
    group = _group(optimizer, weight)
    assert group is not None
    start = dict(rule.start(optimizer, group, _one_row(weight)))
    for name in rule.states:
        one = start[name]
        start[name] = reserve((table.slab_rows, *one.shape[1:]), one.dtype, weight.device)
        hold(table, start[name], [start[name]])
    return start


def prepare(optimizer: Optimizer) -> None:
    """Called before rows are updated: initialise the state of new rows."""
    lazy = row_optimizer.is_lazy(optimizer)
    rule = None
    for _, weight, table in tables(optimizer):
        table.check_gradient(weight)
        if weight.grad is not None:  # the optimizer may have been made after ``optimize``
            check(optimizer, weight, table.name, lazy=lazy, sparse=True)
        if not state_hooks.has(optimizer, _only_stored):
            _check_loaded(optimizer, weight, table)
        _hook(optimizer)
        rule = rule or row_rules.rule_of(optimizer, lazy)
        if rule is not None and rule.states:
            dynamic_tiers.check_states(table, rule.states, optimizer)
            state = optimizer.state[weight]
            if not state:
                state.update(_begin(optimizer, weight, table, rule))
        _begin_fresh(optimizer, weight, table)


def _begin_fresh(optimizer: Optimizer, weight: Tensor, table: DynamicTable) -> None:
    """Initialise the state of new rows, in all optimizers that have stepped the table: in a row
    that was another id's, each has the state of that one.
    """
    steppers = _STEPPERS.setdefault(table, WeakSet())
    steppers.add(optimizer)
    fresh = table.take_fresh()
    if not len(fresh):
        return
    for one in steppers:
        rule = row_rules.rule_of(one, row_optimizer.is_lazy(one))
        group, state = _group(one, weight), one.state.get(weight)
        if rule is None or group is None or not state:
            continue
        start = rule.start(one, group, _one_row(weight))
        for name in rule.states:
            state[name][fresh] = start[name].to(state[name].dtype)


# The optimizers that have stepped a table, or saved its state.
_STEPPERS: WeakKeyDictionary[DynamicTable, WeakSet[Optimizer]] = WeakKeyDictionary()


def hook_state(optimizer: Optimizer) -> None:
    """Let ``optimizer``, perhaps made after ``optimize``, save and load its state by row."""
    if next(tables(optimizer), None) is not None:
        _hook(optimizer)


def _check_loaded(optimizer: Optimizer, weight: Tensor, table: DynamicTable) -> None:
    """Raise CheckpointError for state that was loaded when its rows were not known."""
    for name, value in optimizer.state.get(weight, {}).items():
        if isinstance(value, Tensor) and value.dim() and not _of_rows(value, table.slab_rows):
            raise CheckpointError(
                f"{table.name}: {name!r} was loaded into {type(optimizer).__name__} before it was"
                " known to step a dynamic table",
                why="its rows are those that were stored when it was saved, in their order",
                tries=("optimize(model, optimizer), then load_state_dict",
                       "recast.checkpoint.load(path, model, optimizer)"),
            )  # fmt: skip


def finish(optimizer: Optimizer) -> None:
    """Called after rows were updated: now they may be given to other ids."""
    for _, weight, table in tables(optimizer):
        table.advance(weight)


row_optimizer.before_update.append(prepare)
row_optimizer.after_update.append(finish)


# ---------------------------------------------------------------- checkpoints


def _hook(optimizer: Optimizer) -> None:
    state_hooks.add(optimizer, _only_stored, _into_slabs)


def _numbered(
    optimizer: Optimizer, saved: dict[str, Any]
) -> Iterator[tuple[Any, Tensor, DynamicTable]]:
    """(key in ``saved``, weight, table) of each dynamic table; a key is a number, or a name if
    ``torch.distributed.checkpoint.state_dict`` made ``saved``.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for key, parameter in zip(keys, held, strict=False):  # torch raises if they do not match
        table = of(parameter)
        if table is not None:
            yield key, parameter, table


def _of_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _only_stored(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Keep the state of only those rows that the model's ``state_dict()`` has, in its order."""
    states = dict(state_dict["state"])
    for number, weight, table in _numbered(optimizer, state_dict):
        if number not in states:
            continue
        if optimizer.state.get(weight):
            _begin_fresh(optimizer, weight, table)  # as the next step would
        rows = table.stored()[1]
        states[number] = {
            name: table.take(name, value, rows) if _of_rows(value, table.slab_rows) else value
            for name, value in states[number].items()
        }
    return {**state_dict, "state": states}


def _into_slabs(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = dict(state_dict["state"])
    for number, weight, table in _numbered(optimizer, state_dict):
        if number not in states:
            continue
        loaded = dict(states[number])
        stored = len(table.ids())
        for name, value in loaded.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if table.parts > 1 and table.chosen is not None and len(value) == table.chosen[0]:
                value = value[table.chosen[1]]  # it has the rows of all ranks
            if value.shape[0] != stored:
                raise CheckpointError(
                    f"{table.name}: {name!r} of the optimizer has {value.shape[0]} rows, and"
                    f" {stored} are stored",
                    why="state goes to the rows that the model has loaded, in the same order",
                    tries=("load_state_dict of the model before that of the optimizer",),
                )
            slab = optimizer.state[weight].get(name)
            if slab is None or slab.shape != (table.slab_rows, *value.shape[1:]):
                slab = reserve((table.slab_rows, *value.shape[1:]), value.dtype, weight.device)
                hold(table, slab, [slab])
            table.put(name, slab, value)
            loaded[name] = slab
        states[number] = loaded
    return {**state_dict, "state": states}
