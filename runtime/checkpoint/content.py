"""What a checkpoint holds: the tensors of a model and of its optimizer, and facts about them.

Facts (for the manifest) and values (everything but tensors) are nested dicts, which ``merge`` joins
over the ranks: those of a table's state come from ranks that own a part of it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recast.errors import CheckpointError, UsageError
from recast.runtime.checkpoint import dynamic
from recast.runtime.checkpoint.blocks import Blocks, part, whole
from recast.runtime.dynamic.table import of as dynamic_of
from recast.runtime.embedding.precision_table import StoredTable
from recast.runtime.ranks import shards
from recast.runtime.ranks.shards_state import Local, as_dtensor, state_in

_NOT_SAVED = ("params", "param_names")


@dataclass
class Content:
    """What one rank contributes."""

    tensors: dict[str, Blocks] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def merge(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge nested dicts; if two have a value for one key, the first wins."""
    merged: dict[str, Any] = {}
    for one in found:
        for key, value in one.items():
            if key not in merged:
                merged[key] = value
            elif isinstance(value, dict) and isinstance(merged[key], dict):
                merged[key] = merge([merged[key], value])
    return merged


def serialise(value: Any) -> bytes:
    """``value`` as bytes by torch.save, readable by ``torch.load(weights_only=True)``.

    Raises:
        UsageError: it contains something other than tensors and plain values.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise UsageError(
            "the checkpoint cannot hold what is neither a tensor nor a plain value",
            why=next(
                (line.strip() for line in lines if "GLOBAL" in line), lines[0] if lines else ""
            ),
            tries=("extra={...} of numbers, strings, tensors, lists, tuples and dicts",),
        ) from error
    return buffer.getvalue()


# --- saving --------------------------------------------------------------------------------------


def collect(
    model: nn.Module, optimizer: Optimizer | None, parts: Mapping[str, dynamic.Part]
) -> Content:
    """What this rank must write. ``parts``: those of dynamic tables, by their module's path."""
    kept = Content(facts={"model": {}}, values={"model": {}})
    names: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            kept.values["model"][name] = value
            continue
        path, entry = dynamic.split(name)
        if path in parts:
            shape, block = parts[path].of(entry, value)
            kept.facts["model"][name] = _fact(value, shape)
            if block is not None:
                kept.tensors[f"model/{name}"] = block
            continue
        key = names.setdefault(id(value), name)
        kept.facts["model"][name] = _fact(value, _whole_shape(value, value))
        if key != name:
            kept.facts["model"][name]["same_as"] = key
        else:
            rows = value.whole() if isinstance(value, StoredTable) else value
            kept.tensors[f"model/{name}"] = _blocks(f"model/{name}", value, rows)
    if optimizer is not None:
        _collect_state(kept, model, optimizer, parts)
    return kept


def _collect_state(
    kept: Content, model: nn.Module, optimizer: Optimizer, parts: Mapping[str, dynamic.Part]
) -> None:
    facts: dict[str, Any] = {}
    values: dict[str, Any] = {}
    # State is taken from state_dict(), whose hooks may change it; local parts of tables are taken
    # as they are.
    told = optimizer.state_dict()["state"]
    for number, (name, parameter) in enumerate(_numbered(model, optimizer)):
        own = _cut(parameter)
        if own is not None and not own.shards:
            continue
        state = told.get(number, {}) if own is None else optimizer.state.get(parameter, {})
        for key, value in state.items():
            if not isinstance(value, Tensor):
                values.setdefault(name, {})[key] = value
                continue
            hashed = parts.get(dynamic.split(name)[0])
            if hashed is not None and value.dim():
                shape, block = hashed.by_row(value)
                facts.setdefault(name, {})[key] = _fact(value, shape)
                kept.tensors[f"optimizer/{name}/{key}"] = block
                continue
            facts.setdefault(name, {})[key] = _fact(value, _whole_shape(parameter, value))
            if _whole_shape(parameter, value) != tuple(value.shape) or _is_first(own):
                at = f"optimizer/{name}/{key}"
                kept.tensors[at] = _blocks(at, parameter, value)
    groups = [
        {
            "names": [name for name, _ in members],
            "options": {k: v for k, v in group.items() if k not in _NOT_SAVED},
        }
        for group, members in _groups(model, optimizer)
    ]
    kept.facts["optimizer"] = {"kind": type(optimizer).__name__, "state": facts}
    kept.values["optimizer"] = {"groups": groups, "state": values}


def _cut(parameter: Tensor) -> shards.ShardedTable | None:
    """The table that ``parameter`` is some rows or columns of; None if whole or dynamic."""
    own = shards.of(parameter)
    return None if own is None or own.hashed else own


def _is_first(own: shards.ShardedTable | None) -> bool:
    """Whether this rank writes what all owners of a table have in common."""
    return own is None or own.rank == min(s.rank for s in own.placement.shards)


def _whole_shape(parameter: Tensor, value: Tensor) -> tuple[int, ...]:
    own = shards.of(parameter)
    cut = own.whole_shape(value) if own is not None and value.dim() else None
    return tuple(value.shape) if cut is None else cut


def _blocks(name: str, parameter: Tensor, value: Tensor) -> Blocks:
    if value.is_meta:
        raise CheckpointError(f"{name} is on meta: it has no values yet")
    if type(value.data) is not Tensor:
        raise CheckpointError(
            f"{name} is a {type(value.data).__name__}, not a plain tensor",
            tries=("torch.distributed.checkpoint",),
        )
    own = shards.of(parameter)
    if own is None or (
        value is not parameter and (not value.dim() or own.whole_shape(value) is None)
    ):
        return whole(value)
    return part(value, own)


def _fact(value: Tensor, shape: Sequence[int]) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": str(value.dtype).removeprefix("torch.")}


def _groups(
    model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[dict[str, Any], list[tuple[str, Tensor]]]]:
    names = {id(p): name for name, p in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise UsageError(
                    f"parameter {place} of group {number} of {type(optimizer).__name__} is not of"
                    " the model: it has no name to be saved under",
                    tries=("the model that holds all parameters of the optimizer",),
                )
        yield group, [(names[id(p)], p) for p in group["params"]]


def _numbered(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """The parameters of the optimizer in torch's order, with their names in the model."""
    return [member for _, members in _groups(model, optimizer) for member in members]


# --- loading -------------------------------------------------------------------------------------


@dataclass
class Aim:
    """The memory that this rank reads into, and what to do afterwards."""

    tensors: dict[str, Blocks]
    finish: list[Callable[[], Any]]
    wanted: list[dynamic.Wanted] = field(default_factory=list)  # to be read after the tensors
    ids: dict[str, Callable[[], Tensor]] = field(default_factory=dict)  # of wanted rows, by module


def aim(
    model: nn.Module, optimizer: Optimizer | None, facts: Mapping[str, Any],
    values: Mapping[str, Any],
) -> Aim:  # fmt: skip
    """Memory to read a checkpoint into: the model's own memory wherever possible.

    Raises:
        CheckpointError: it belongs to another model or optimizer; nothing was written to.
    """
    found = Aim({}, [])
    _aim_model(found, model, facts["model"], values["model"])
    if optimizer is not None:
        if "optimizer" not in facts:
            raise CheckpointError(
                "the checkpoint has no optimizer state",
                why="it was saved without an optimizer",
                tries=("load(path, model)",),
            )
        _aim_state(found, model, optimizer, facts, values["optimizer"])
    return found


def _aim_model(
    found: Aim, model: nn.Module, facts: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    state = model.state_dict(keep_vars=True)
    _check_names(set(state), {*facts, *values})
    held = {id(t) for t in (*model.parameters(), *model.buffers())}
    computed: dict[str, Any] = {}  # values that their module computes in state_dict()
    wrong: list[str] = []
    spread = dynamic.spread(model)
    named = model.named_parameters(remove_duplicate=False)
    packed = {name for name, p in named if isinstance(p, StoredTable)}  # their rows are given whole
    for name, value in state.items():
        if name in values:
            computed[name] = values[name]
            continue
        fact = facts[name]
        into = value
        path, entry = dynamic.split(name)
        if path in spread and entry == "weight" and 0 not in fact["shape"]:
            later = _wanted(f"model/{name}", fact, spread[path], computed, name)
            found.wanted.append(later)
            found.ids[path] = later.ids
            continue
        key = f"model/{fact.get('same_as', name)}"
        if isinstance(value, StoredTable):
            _aim_packed(found, key, name, value, fact, computed, wrong)
            continue
        fits = list(_whole_shape(value, value)) == fact["shape"]
        if id(value) not in held and (fits or name not in packed):
            into = computed[name] = torch.empty(fact["shape"], dtype=getattr(torch, fact["dtype"]))
        elif not fits:
            shape = _whole_shape(value, value)
            wrong.append(f"{name} is {tuple(fact['shape'])} there and {shape} here")
            continue
        if 0 in fact["shape"]:
            continue  # empty tensors are not written
        if key not in found.tensors:
            found.tensors[key] = _blocks(key, into, into)
        else:  # by another of its names
            first = key.removeprefix("model/")
            source = computed.get(first, state[first])
            if into is not source:
                found.finish.append(partial(_copy, source, into))
    if wrong:
        raise CheckpointError(
            "the checkpoint is of another model", why="; ".join(wrong[:4]) + _more(wrong)
        )
    if computed:
        found.finish.append(lambda: model.load_state_dict(computed, strict=False))


def _aim_packed(
    found: Aim, key: str, name: str, parameter: Tensor, fact: Mapping[str, Any],
    computed: dict[str, Any], wrong: list[str],
) -> None:  # fmt: skip
    """Read this rank's part of a table stored in fewer bits; ``load_state_dict`` packs it."""
    own = _cut(parameter)
    assert own is not None
    if list(own.shape) != fact["shape"]:
        wrong.append(f"{name} is {tuple(fact['shape'])} there and {own.shape} here")
    elif key not in found.tensors and 0 not in fact["shape"]:  # else by another of its names
        local = torch.empty(own.local_shape)
        found.tensors[key] = part(local, own)
        computed[name] = as_dtensor(local, own)


def _wanted(
    name: str, fact: Mapping[str, Any], table: Any, computed: dict[str, Any], key: str
) -> dynamic.Wanted:
    ids = f"{dynamic.split(key)[0]}.ids"
    return dynamic.Wanted(
        name, tuple(fact["shape"]), getattr(torch, fact["dtype"]), table,
        lambda: computed[ids], partial(computed.__setitem__, key),
    )  # fmt: skip


def _copy(source: Tensor, into: Tensor) -> None:
    into.data.copy_(source.data)


def _check_names(here: set[str], there: set[str]) -> None:
    missing, more = sorted(here - there), sorted(there - here)
    if missing or more:
        parts = [("it has no", missing), ("the model has no", more)]
        why = "; ".join(f"{a} {', '.join(b[:4])}{_more(b)}" for a, b in parts if b)
        raise CheckpointError("the checkpoint is of another model", why=why)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 4} more" if len(names) > 4 else ""


def _aim_state(
    found: Aim, model: nn.Module, optimizer: Optimizer, facts: Mapping[str, Any],
    values: Mapping[str, Any],
) -> None:  # fmt: skip
    facts = facts["optimizer"]
    kind, groups = type(optimizer).__name__, values["groups"]
    if facts["kind"] != kind:
        raise CheckpointError(f"the checkpoint holds the state of {facts['kind']}, not of {kind}")
    here = [[name for name, _ in members] for _, members in _groups(model, optimizer)]
    if [sorted(g["names"]) for g in groups] != [sorted(names) for names in here]:
        raise CheckpointError(
            f"the parameters of {kind} are grouped otherwise than those of the checkpoint",
            why=f"{[len(g['names']) for g in groups]} parameters there, "
            f"{[len(names) for names in here]} here",
        )
    members = _numbered(model, optimizer)
    state: dict[int, dict[str, Any]] = {}
    for number, (name, parameter) in enumerate(members):
        new: dict[str, Any] = dict(values["state"].get(name, {}))
        for key, fact in facts["state"].get(name, {}).items():
            ids = found.ids.get(dynamic.split(name)[0])
            table = dynamic_of(parameter)
            if ids is not None and table is not None and fact["shape"]:
                later = dynamic.Wanted(
                    f"optimizer/{name}/{key}", tuple(fact["shape"]), getattr(torch, fact["dtype"]),
                    table, ids, partial(new.__setitem__, key),
                )  # fmt: skip
                found.wanted.append(later)
                continue
            value = _place_for(optimizer, parameter, key, fact)
            at = f"optimizer/{name}/{key}"
            if 0 not in fact["shape"]:
                found.tensors[at] = _blocks(at, parameter, value)
            new[key] = value if _cut(parameter) is None else Local(value)
        if new:
            state[number] = new
    first = 0
    param_groups: list[dict[str, Any]] = []
    for saved, names in zip(groups, here, strict=True):
        param_groups.append({**saved["options"], "params": [*range(first, first + len(names))]})
        first += len(names)
    saved_state = {"state": state, "param_groups": param_groups}
    found.finish.append(lambda: optimizer.load_state_dict(saved_state))


def _place_for(
    optimizer: Optimizer, parameter: Tensor, key: str, fact: Mapping[str, Any]
) -> Tensor:
    """The state's own tensor if it has one that fits, else a new one; this rank's part."""
    shape, dtype = tuple(fact["shape"]), getattr(torch, fact["dtype"])
    own = _cut(parameter)
    if own is not None and shape in (own.shape, own.shape[:1]):
        shape = own.local_shape[: len(shape)]
    hooks = optimizer._optimizer_load_state_dict_pre_hooks.values()
    alone = all(hook is state_in for hook in hooks)  # another hook may read the old state
    there = optimizer.state.get(parameter, {}).get(key) if alone else None
    if isinstance(there, Tensor) and tuple(there.shape) == shape and there.dtype == dtype:
        return there
    return torch.empty(shape, dtype=dtype, device=parameter.device if shape else "cpu")
