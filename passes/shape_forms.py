"""One form for shapes: transposes, reshapes, and which value to ask for sizes and devices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from recast.rewriter.ir import Node

from .form import Form, Reader, call
from .leaf import argument, extra, rank, spec_of


def transpose(node: Node) -> Form | None:
    """The swap of two dimensions, counted from the front if the rank is known."""
    if extra(node, 3, "input", "dim0", "dim1", "axis0", "axis1"):
        return None
    source = argument(node, 0, "input")
    first = argument(node, 1, "dim0", node.kwargs.get("axis0"))
    second = argument(node, 2, "dim1", node.kwargs.get("axis1"))
    return _exchanged(source, first, second)


def _exchanged(source: Any, first: Any, second: Any) -> Form | None:
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    known = rank(source)
    if known:
        first, second = sorted((first % known, second % known))
    return call(torch.transpose, source, first, second)


def permute(node: Node) -> Form | None:
    """A permutation of three dimensions that only swaps the last two."""
    dims = _sizes(node, "dims")
    if dims is None or rank(node.args[0]) not in (3, None) or len(dims) != 3:
        return None
    order = tuple(d % 3 for d in dims if isinstance(d, int))
    return _exchanged(node.args[0], 1, 2) if order == (0, 2, 1) else None


def t(node: Node) -> Form | None:
    """``x.t()`` of a matrix."""
    source = node.args[0]
    return _exchanged(source, 0, 1) if rank(source) == 2 and not extra(node, 1) else None


def attribute(node: Node) -> Form | None:
    """``x.mT``, and ``x.T`` of a matrix; else see :func:`_asked`."""
    source, name = node.args[:2]
    if name == "mT" or (name == "T" and rank(source) == 2):
        return _exchanged(source, -2, -1)
    return _asked(node)


def _sizes(node: Node, name: str) -> tuple[Any, ...] | None:
    """Sizes given one by one or as one tuple."""
    given = node.args[1:] or (node.kwargs.get(name),)
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    plain = all(isinstance(s, (int, Node)) and not isinstance(s, bool) for s in given)
    return tuple(given) if given and plain else None


def reshape(node: Node) -> Form | None:
    """``view`` and ``reshape`` get one name: where ``view`` works, the two do the same."""
    if set(node.kwargs) - {"shape", "size", "input"}:
        return None
    sizes = _sizes(node, "shape" if "shape" in node.kwargs else "size")
    source = argument(node, 0, "input")
    if sizes is None or not isinstance(source, Node):
        return None
    before, after = spec_of(source), spec_of(node)
    if len(sizes) == 1 and isinstance(sizes[0], Node):
        return None  # it may be a complete shape that was computed elsewhere
    widened = (
        before is not None
        and after is not None
        and len(before.shape) == 2
        and after.shape[1:] == (1, before.shape[1])
    )
    return call(torch.unsqueeze, source, 1) if widened else call(torch.reshape, source, sizes)


def flatten(node: Node) -> Form | None:
    """``flatten(1, -1)`` is ``flatten(1)``. It is not a reshape to the sizes of the example: for
    longer or shorter rows that would make more or fewer rows, where the model raises.
    """
    if extra(node, 3, "input", "start_dim", "end_dim"):
        return None
    source = argument(node, 0, "input")
    return flattened(source, argument(node, 1, "start_dim", 0), argument(node, 2, "end_dim", -1))


def flattened(source: Any, start: Any, end: Any) -> Form | None:
    """``flatten`` of ``source``, leaving out an end that is the last dimension."""
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    last = end == -1 or end + 1 == rank(source)
    return call(torch.flatten, source, start, *(() if last else (end,)))


def along(function: Callable[..., Any]) -> Reader:
    """``squeeze`` and ``unsqueeze``: a tensor and a dimension, both by position."""

    def read(node: Node) -> Form | None:
        dim = argument(node, 1, "dim")
        plain = isinstance(dim, int) and not extra(node, 2, "input", "dim")
        return call(function, argument(node, 0, "input"), dim) if plain else None

    return read


def item(node: Node) -> Form | None:
    """``x[:, None]``, ``x[:, None, :]``, ``x[..., None]``: an unsqueeze."""
    source, key = node.args
    if not isinstance(key, tuple) or sum(k is None for k in key) != 1:
        return None
    known = rank(source)
    if known is None:
        return None
    if ... in key:
        at, rest = key.index(...), known - (len(key) - 2)
        key = (*key[:at], *[slice(None)] * rest, *key[at + 1 :])
    if any(k is not None and k != slice(None) for k in key) or known < len(key) - 1:
        return None
    return call(torch.unsqueeze, source, key.index(None))


# ---------------------------------------------------------------- sizes and devices

_BATCHED = {torch.bmm, torch.stack, torch.cat, torch.unsqueeze, torch.transpose}


def _elder(source: Any) -> Node | None:
    """The earliest value with the same device and the same first size as ``source``."""
    elder = None
    while isinstance(source, Node) and source.op == "call_function" and source.target in _BATCHED:
        dims = [a for a in (*source.args[1:], *source.kwargs.values()) if isinstance(a, int)]
        if source.target in (torch.stack, torch.cat) and not dims:
            break
        if any(d == 0 or d < 1 - (rank(source) or 0) for d in dims):
            break
        first = source.args[0]
        source = first[0] if isinstance(first, (list, tuple)) and first else first
        elder = source if isinstance(source, Node) else elder
    return elder


def _asked(node: Node) -> Form | None:
    """``x.device``, ``x.shape[0]``: read from the value that x got them from. A product then has no
    users other than those of its numbers.
    """
    source, name = node.args[:2]
    elder = _elder(source)
    if elder is None or not (name == "device" or (name == "shape" and _first_only(node))):
        return None
    return call(getattr, elder, name)


def _first_only(node: Node) -> bool:
    """Whether only the first size of a shape is used."""
    return all(u.target is operator.getitem and u.args == (node, 0) for u in node.users)


def size(node: Node) -> Form | None:
    """``x.size(0)``: see :func:`_asked`."""
    elder = _elder(node.args[0])
    return call("size", elder, 0) if elder is not None and argument(node, 1, "dim") == 0 else None
