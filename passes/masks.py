"""Masks of sequences, in the ways they are written, and the id that one leaves out.

mask = ids != 0, ids > 0, ~(ids == 0), arange(L) < length   (B, L)
       then unsqueezed, turned, expanded, repeated, cast
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from recast.rewriter.ir import Node, is_call, is_method

from .leaf import argument, spec_of

_CASTS = ("float", "long", "int", "double", "to", "type", "type_as", "bool")
_WIDENS = ("expand", "expand_as", "broadcast_to")


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask as the model writes it, and the (B, L) tensor that it is made from."""

    base: Node
    axes: str  # what each dimension is: b, l, or 1 for an inserted one
    nodes: tuple[Node, ...]  # from the mask down to the base, without the base


def read_mask(node: Any, length: int) -> Mask | None:
    """``node`` as a mask for sequences of ``length``; None when it is not one."""
    if not isinstance(node, Node):
        return None
    spec = spec_of(node)
    if spec is None:
        return None
    inner = read_mask(_source(node), length) if _spelling(node) else None
    axes = None if inner is None else _turned(node, inner.axes)
    if inner is not None and axes is not None:
        return Mask(inner.base, axes, (node, *inner.nodes))
    sizes = {"B": "b", length: "l", 1: "1"}
    axes = "".join(sizes.get(size, "?") for size in spec.shape)
    plain = sorted(axes.replace("1", "")) == ["b", "l"] and len(axes) <= 3
    return Mask(node, axes, ()) if plain and not spec.dtype.is_floating_point else None


def _source(node: Node) -> Any:
    first = argument(node, 0, "input", node.kwargs.get("tensors"))
    return first[0] if isinstance(first, (list, tuple)) else first


def _spelling(node: Node) -> bool:
    """Whether ``node`` may only put a mask in another shape or dtype."""
    if is_method(node, *_CASTS):
        before, after = spec_of(_source(node)), spec_of(node)
        if before is None or after is None:
            return False
        # A cast to bool compares with 0, and a cast to a narrower type may change numbers.
        narrows = before.dtype.itemsize > after.dtype.itemsize or after.dtype == torch.bool
        return before.dtype == torch.bool or not narrows or after.dtype.is_floating_point
    if is_call(node, torch.cat):
        return len(argument(node, 0, "tensors")) == 1
    return is_call(
        node,
        torch.unsqueeze,
        torch.transpose,
        torch.repeat_interleave,
        torch.reshape,
        torch.flatten,
    ) or is_method(node, "repeat", "repeat_interleave", *_CASTS, *_WIDENS)


def _turned(node: Node, axes: str) -> str | None:
    """The axes of ``node``, which is made of a mask of ``axes``."""
    spec = spec_of(node)
    if spec is None:
        return None
    if is_method(node, *_CASTS) or is_call(node, torch.cat):
        return axes
    if is_call(node, torch.unsqueeze):
        at = argument(node, 1, "dim") % len(spec.shape)
        return axes[:at] + "1" + axes[at:]
    if is_call(node, torch.transpose):
        one, two = (argument(node, k, f"dim{k - 1}") % len(axes) for k in (1, 2))
        swapped = list(axes)
        swapped[one], swapped[two] = swapped[two], swapped[one]
        return "".join(swapped)
    if is_method(node, *_WIDENS):
        return axes if len(spec.shape) == len(axes) else None
    if is_call(node, torch.reshape, torch.flatten):
        inner = spec_of(_source(node))
        same = inner is not None and [s for s in spec.shape if s != 1] == [
            s for s in inner.shape if s != 1
        ]
        letters = iter(axes.replace("1", ""))
        return "".join("1" if s == 1 else next(letters) for s in spec.shape) if same else None
    if is_method(node, "repeat"):
        sizes: Any = node.args[1:]
        given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        if len(given) != len(axes):
            return None
        stays = all(a == "1" or n == 1 for a, n in zip(axes, given, strict=True))
        return axes if stays else None
    dim = argument(node, 2, "dim")  # repeat_interleave
    return axes if isinstance(dim, int) and axes[dim % len(axes)] == "1" else None


def inserted_at(base: Node, length: int) -> int | None:
    """Where a mask (B, 1, L) has its size of 1; None for (B, L)."""
    spec = spec_of(base)
    assert spec is not None
    return None if len(spec.shape) == 2 else 1 if spec.shape[2] == length else 2


# ---------------------------------------------------------------- the id that is left out


def excluded_id(base: Node, ids: Any, how: str) -> int | None:
    """The one id whose rows the mask ``base`` leaves out."""
    if how != "dropped":
        return _left_out(base, ids)
    inner = _inverted(base, ids)
    return _compared(base, "eq", ids) if inner is None else _left_out(inner, ids)


def _inverted(base: Node, ids: Any) -> Node | None:
    """The mask that ``base`` negates, if it negates one."""
    spelled = is_call(base, operator.invert, torch.logical_not, torch.bitwise_not)
    if not spelled and not is_method(base, "logical_not", "bitwise_not"):
        return None
    spec, own = spec_of(ids), spec_of(base)
    if spec is None or own is None or own.dtype != torch.bool:  # of numbers: -1 and -2
        return None
    length: Any = spec.shape[-1]
    outer, inner = (read_mask(node, length) for node in (base, argument(base, 0, "input")))
    return inner.base if outer and inner and outer.axes == inner.axes else None


def _left_out(base: Node, ids: Any) -> int | None:
    """c when ``base`` is true for every valid id except ``c``."""
    inner = _inverted(base, ids)
    if inner is not None:
        return _compared(inner, "eq", ids)
    own = spec_of(base)
    if is_method(base, *_CASTS) and own is not None and own.dtype == torch.bool:
        return 0 if _same(base.args[0], ids) else None
    if _compared(base, "gt", ids) == 0 or _compared(base, "ge", ids) == 1:
        return 0
    return _compared(base, "ne", ids)


def _compared(node: Any, how: str, ids: Any) -> int | None:
    """c when ``node`` is ``ids`` compared with ``c``: "ne", "eq", "gt" or "ge"."""
    if is_call(node, getattr(operator, how), getattr(torch, how)) or is_method(node, how):
        of, value = argument(node, 0, "input"), argument(node, 1, "other")
        if _same(of, ids) and isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two values are the same, apart from a cast that changes nothing."""

    def bare(node: Any) -> Any:
        while is_method(node, "long", "int") and isinstance(node.args[0], Node):
            before, after = spec_of(node.args[0]), spec_of(node)
            if before is None or after is None or before.dtype != after.dtype:
                break
            node = node.args[0]
        return node

    return bare(a) is bare(b)
