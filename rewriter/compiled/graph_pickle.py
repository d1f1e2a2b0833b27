"""Graphs as plain data, for pickling: functions by name, nodes by name, notes as they are."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from recast.rewriter.ir import KEY, Graph, Node, note

_PLACES = {
    "torch": torch, "torch.nn.functional": torch.nn.functional, "operator": operator, "math": math,
    "torch._C._nn": torch._C._nn, "torch.linalg": torch.linalg, "torch.special": torch.special,
    "torch.fft": torch.fft, "torch._VF": torch._VF, "torch.Tensor": torch.Tensor,
}  # fmt: skip


@dataclass(frozen=True)
class _Name:
    """A reference to a node, inside the arguments of another."""

    name: str


@dataclass(frozen=True)
class _Function:
    """A reference to a function or constant, by its module and name."""

    module: str
    name: str


@dataclass(frozen=True)
class _Operation:
    """``torch.ops.<namespace>.<name>.<overload>``."""

    namespace: str
    name: str
    overload: str


def pack(graph: Graph) -> list[tuple[Any, ...]]:
    """``graph`` as a list of plain tuples."""
    rows = []
    for node in graph.nodes:
        name: Any = lambda n: _Name(n.name)  # noqa: E731
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), name)
        target = _pack_target(node.target) if callable(node.target) else node.target
        rows.append((node.op, node.name, target, _plain(args), _plain(kwargs), note(node)))
    return rows


def unpack(rows: list[tuple[Any, ...]]) -> Graph:
    """The inverse of :func:`pack`."""
    graph = fx.Graph()
    made: dict[str, Node] = {}
    for op, name, target, args, kwargs, its_note in rows:
        target = _unpack_target(target)
        args, kwargs = _nodes(args, made), _nodes(kwargs, made)
        node = graph.create_node(op, target, args, kwargs, name=name)
        node.meta[KEY] = its_note
        made[name] = node
    return graph


def _plain(value: Any) -> Any:
    """Replace the immutable containers of fx by ordinary ones."""
    if isinstance(value, _Name):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_plain(v) for v in value))
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if isinstance(value, (torch.memory_format, torch.layout)):  # these do not pickle everywhere
        return _Function("torch", str(value).removeprefix("torch."))
    return _pack_target(value) if callable(value) and not isinstance(value, type) else value


def _nodes(value: Any, made: dict[str, Node]) -> Any:
    if isinstance(value, _Name):
        return made[value.name]
    if isinstance(value, (_Function, _Operation)):
        return _unpack_target(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_nodes(v, made) for v in value))
    if isinstance(value, tuple):
        return tuple(_nodes(v, made) for v in value)
    if isinstance(value, list):
        return [_nodes(v, made) for v in value]
    if isinstance(value, dict):
        return {k: _nodes(v, made) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(_nodes(v, made) for v in (value.start, value.stop, value.step)))
    return value


def _pack_target(target: Callable[..., Any]) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return _Operation(namespace, name, target._overloadname)
    name = getattr(target, "__name__", "")
    for module, place in _PLACES.items():
        if getattr(place, name, None) is target:
            return _Function(module, name)
    return target  # pickled by reference


def _unpack_target(target: Any) -> Any:
    if isinstance(target, _Operation):
        return getattr(getattr(getattr(torch.ops, target.namespace), target.name), target.overload)
    if isinstance(target, _Function):
        if target.module == "torch.Tensor":
            return getattr(torch.Tensor, target.name)
        place = _PLACES.get(target.module) or importlib.import_module(target.module)
        return getattr(place, target.name)
    return target
