"""One product of a loop over pairs of feature vectors: v * w, its sum, and the weight of that.

    v_i * v_j        sum(v_i * v_j, -1)        r[i, j] * sum(v_i * v_j, -1)

A weight is one number: an element of a parameter, ``r[k]``, ``r[i, j]``, ``r[i][j]``, or a
parameter of its own from a list of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Build

from .leaf import argument, extra, spec_of
from .pair_vectors import Vector, vector

_PLACED = 3  # dimensions of the parameter that holds weights, at most


@dataclass(frozen=True, slots=True)
class Part:
    """One product of a loop."""

    left: Vector
    right: Vector
    core: tuple[Node, ...]  # the product, its sum, and the weighted sum
    picks: tuple[Node, ...]
    summed: bool
    shape: tuple[Any, ...]  # of the product
    weight: Weight | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """Element ``place`` of ``source``, which may be its only one."""

    node: Node
    source: Node
    place: tuple[int, ...]
    picks: tuple[Node, ...]


def summed(node: Any) -> tuple[Node, tuple[int, ...], bool] | None:
    """``(x, dims, keepdim)`` when ``node`` sums x over dimensions, counted from the front."""
    if not (is_call(node, torch.sum) or is_method(node, "sum")):
        return None
    if extra(node, 3, "input", "dim", "axis", "keepdim", "keepdims"):
        return None
    source, dim = argument(node, 0, "input"), argument(node, 1, "dim", node.kwargs.get("axis"))
    keep = argument(node, 2, "keepdim", node.kwargs.get("keepdims", False))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    spec = spec_of(source)
    if spec is None or not all(type(d) is int for d in dims) or not isinstance(keep, bool):
        return None
    return source, tuple(d % len(spec.shape) for d in dims), keep


def leaves(node: Node) -> tuple[list[Node], set[Node]]:
    """The terms of a tree of additions, in order and without zeros, and the additions."""
    leaves: list[Node] = []
    adds = {node}
    waiting = [node]
    while waiting:
        for operand in reversed(waiting.pop().args):
            if not isinstance(operand, Node):
                leaves.extend([] if operand == 0 else [operand])  # type: ignore[list-item]
            elif is_call(operand, operator.add) and len(operand.users) == 1:
                adds.add(operand)
                waiting.append(operand)
            else:
                leaves.append(operand)
    return leaves[::-1], adds


def part_of(node: Any) -> Part | None:
    """``v * w``, or its sum over the vector, which may be weighted."""
    return _plain(node) or _weighed(node)


def _plain(node: Any) -> Part | None:
    found = summed(node)
    product = found[0] if found is not None else node
    if not is_call(product, operator.mul):
        return None
    spec, a, b = spec_of(product), *product.args
    if not isinstance(a, Node) or not isinstance(b, Node) or spec is None:
        return None
    if spec_of(a) != spec_of(b) or spec_of(a) != spec:
        return None
    if found is not None and found[1] != (len(spec.shape) - 1,):
        return None
    left, right = vector(a), vector(b)
    if left is None or right is None or (found is not None and sole_user(product) is not node):
        return None
    core = (product,) if found is None else (product, node)
    picks = (*left[1], *right[1])
    return Part(left[0], right[0], core, picks, found is not None, spec.shape)


def _weighed(node: Any) -> Part | None:
    """``weight * sum(v * w, -1)``, of the shape of that sum."""
    if not is_call(node, operator.mul) or len(node.args) != 2:
        return None
    for inner, factor in (node.args, node.args[::-1]):
        if not isinstance(inner, Node) or spec_of(inner) != spec_of(node):
            continue
        weight = _weight(factor)
        part = _plain(inner) if weight is not None and sole_user(inner) is node else None
        if part is None or weight is None or not part.summed:
            continue
        if not _one_dtype(weight.node, node):
            return None
        return replace(
            part, core=(*part.core, node), picks=(*part.picks, *weight.picks), weight=weight
        )
    return None


def _one_dtype(a: Node, b: Node) -> bool:
    first, second = spec_of(a), spec_of(b)
    return first is not None and second is not None and first.dtype == second.dtype


def _weight(node: Any) -> Weight | None:
    """``node`` as a weight: one number, the same for all samples."""
    spec = spec_of(node)
    if spec is None or not isinstance(node, Node) or spec.shape not in ((), (1,)):
        return None
    place: tuple[int, ...] = ()
    picks: list[Node] = []
    source = node
    while is_call(source, operator.getitem) and len(place) < _PLACED:
        inner, key = source.args
        keys = key if isinstance(key, tuple) else (key,)
        if not all(type(k) is int for k in keys) or not isinstance(inner, Node):
            break
        held = spec_of(inner)
        if held is None or not all(isinstance(size, int) for size in held.shape):
            break
        place = (*keys, *place)
        picks.append(source)
        source = inner
    whole = spec_of(source)
    if whole is None or len(whole.shape) not in (len(place), len(place) + len(spec.shape)):
        return None
    return Weight(node, source, place, tuple(picks))


def is_number(weight: Weight | None) -> bool:
    """Whether ``weight`` has no dimensions: it then gives its dtype to no product."""
    spec = None if weight is None else spec_of(weight.node)
    return spec is not None and not spec.shape


def weights_of(parts: Sequence[Part], build: Build) -> Node | None:
    """The weights (P,) of all products; None if they have none."""
    weights = [part.weight for part in parts if part.weight is not None]
    if not weights:
        return None
    first = weights[0]
    if first.place and all(
        w.source is first.source and len(w.place) == len(first.place) for w in weights
    ):
        index = tuple(
            build.constant(torch.tensor(places), "places")
            for places in zip(*(w.place for w in weights), strict=True)
        )
        picked = build.call(operator.getitem, first.source, index if len(index) > 1 else index[0])
        return build.call(torch.flatten, picked)
    # Taken anew: the nodes that take them belong to what is replaced.
    each = [build.call(operator.getitem, w.source, w.place) if w.place else w.node for w in weights]
    return build.call(torch.cat, [build.call(torch.reshape, node, (-1,)) for node in each], 0)
