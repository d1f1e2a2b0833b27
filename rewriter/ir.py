"""The graph: a plain ``fx.Graph`` whose nodes carry exactly one typed note.

Once capture has run, ``node.meta["recast"]`` is always a :class:`Note`. Read it with :func:`note`,
write it with :func:`annotate`; Recast keeps nothing else in ``meta``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import fx

from .autocast import Region

Graph: TypeAlias = fx.Graph
Node: TypeAlias = fx.Node
KEY = "recast"

# A string is symbolic: "B" the batch, "26*B" a multiple of it, "n" unknown.
Dim: TypeAlias = int | str

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


@dataclass(frozen=True, slots=True)
class Spec:
    """Dtype and shape of one tensor; symbolic dimensions are strings (see :data:`Dim`)."""

    dtype: torch.dtype
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        dtype = _SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(map(str, self.shape))}]"

    def at(self, batch: int) -> tuple[int, ...] | None:
        """The shape for a batch of ``batch`` rows; None when a dimension is unknown."""
        sizes = tuple(_size(d, batch) for d in self.shape)
        return None if None in sizes else sizes  # type: ignore[return-value]


def _size(dim: Dim, batch: int) -> int | None:
    if isinstance(dim, int):
        return dim
    factor, _, symbol = dim.rpartition("*")
    return batch * int(factor or 1) if symbol == "B" else None


def spec_of(first: object, second: object, batches: tuple[int, int]) -> Any:
    """The spec of a value seen at two batch sizes: a tuple for a tuple, None for a non-tensor."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.dim() != second.dim():
            return None
        dims = zip(first.shape, second.shape, strict=True)
        return Spec(first.dtype, tuple(_dim(a, b, batches) for a, b in dims))
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return tuple(spec_of(a, b, batches) for a, b in zip(first, second, strict=False))
    return None


def _dim(first: int, second: int, batches: tuple[int, int]) -> Dim:
    if first == second:
        return int(first)
    k = first // max(batches[0], 1)
    if k > 0 and first == k * batches[0] and second == k * batches[1]:
        return "B" if k == 1 else f"{k}*B"
    return "n"


@dataclass(frozen=True, slots=True)
class Note:
    """What is known about a node."""

    origin: tuple[str, ...] = ()  # module paths in the user's model: ("emb.3",), ("top.0", "top.1")
    where: str | None = None  # the user's line: "model.py:41"
    rule: str | None = None  # the rule that wrote this node; None when it is the user's own
    spec: Any = None  # Spec, a tuple of them, or None when unknown
    place: str | None = None  # how the value lies across ranks; None on one device
    autocast: Region | None = None  # the region of ``torch.autocast`` that it computes in
    no_grad: bool = False  # it calls code of the user that ran under ``torch.no_grad``


def note(node: Node) -> Note:
    """The note of ``node``; an empty one where capture left none."""
    return node.meta.get(KEY) or Note()


def annotate(node: Node, **changes: Any) -> Note:
    """Replace fields of the note of ``node``."""
    node.meta[KEY] = new = replace(note(node), **changes)
    return new


def merge(nodes: Iterable[Node], rule: str) -> Note:
    """The note of a node that replaces all of ``nodes``: their origins in order, the first line.

    Raises ValueError if they compute in several regions of autocast.
    """
    nodes = list(nodes)
    regions = autocast_regions(nodes)
    if len(regions) > 1:
        raise ValueError("calls in several regions of torch.autocast cannot be one")
    origin = tuple(dict.fromkeys(path for n in nodes for path in note(n).origin))
    where = next((note(n).where for n in nodes if note(n).where), None)
    return Note(origin=origin, where=where, rule=rule, autocast=next(iter(regions), None))


def autocast_regions(nodes: Iterable[Node]) -> set[Region]:
    """The regions of autocast that ``nodes`` compute in."""
    return {region for n in nodes if (region := note(n).autocast) is not None}


# ---------------------------------------------------------------- walking


def is_call(node: object, *targets: Callable[..., Any]) -> TypeGuard[Node]:
    """Whether ``node`` calls one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_method(node: object, *names: str) -> TypeGuard[Node]:
    """Whether ``node`` calls a tensor method with one of these names."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in names


def sole_user(node: Node) -> Node | None:
    """The one user of ``node``; None when there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def items(node: Node) -> Iterator[tuple[Any, Node]]:
    """``(key, user)`` of every ``node[key]``."""
    for user in node.users:
        if is_call(user, operator.getitem) and user.args[0] is node:
            yield user.args[1], user


def depends(node: Node, on: set[Node]) -> bool:
    """Whether ``node`` is, or is computed from, any of ``on``."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        n = stack.pop()
        if n in on:
            return True
        if n not in seen:
            seen.add(n)
            stack.extend(n.all_input_nodes)
    return False
