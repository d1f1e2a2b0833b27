"""Sums of vectors under gates, added one by one: as a loop or Python's ``sum`` writes them.

w[:, 0:1] * h_0 + w[:, 1:2] * h_1 + ..        stack([w[:, 0:1] * h_0, ..], d).sum(d)

with w (B, E) or (B, E, 1), its columns taken as slices, as ``w[:, k].unsqueeze(1)``, or as parts of
a split, chunk or unbind; each once, in any order. h_e: (B, D), or a vector of T (B, E, D).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from recast.rewriter.ir import Node, is_call, sole_user

from .leaf import argument, rank, reduction_of, spec_of
from .pair_parts import leaves
from .pair_vectors import Vector, one_place, part, vector
from .split_columns import read


@dataclass(frozen=True, slots=True)
class Term:
    """``w[:, k:k+1] * h``."""

    gate: Vector
    vector: Vector
    picks: tuple[Node, ...]  # what takes them out of w and T
    product: Node


def terms_of(node: Node) -> tuple[list[Term], set[Node]] | None:
    """The terms of a sum of products with gates, and the nodes that add them."""
    added = _added(node)
    if added is None:
        return None
    terms = [_term(product) for product in added[0]]
    first = terms[0]
    if len(terms) < 2 or first is None:
        return None
    same = [t for t in terms if t is not None and t.gate.source is first.gate.source]
    return (same, added[1]) if len(same) == len(terms) else None


def _added(node: Node) -> tuple[list[Node], set[Node]] | None:
    if is_call(node, operator.add):
        outer = sole_user(node)
        if is_call(outer, operator.add):
            return None  # the rule looks at the last addition
        return leaves(node)
    found = reduction_of(node, "sum")
    if found is None or found.keepdim or not is_call(found.source, torch.stack):
        return None
    dims = rank(found.source)
    if dims != 3 or (argument(found.source, 1, "dim", 0) - found.dim) % dims:
        return None
    return list(argument(found.source, 0, "tensors")), {found.source, node}


def _term(node: Any) -> Term | None:
    spec = spec_of(node)
    if not is_call(node, operator.mul) or spec is None or len(spec.shape) != 2:
        return None
    for gate, h in (node.args, node.args[::-1]):
        column = _column(gate)
        if column is None or not isinstance(h, Node) or spec_of(h) != spec:
            continue
        picked = vector(h)
        if picked is not None:
            return Term(column[0], picked[0], (*column[1], *picked[1]), node)
    return None


def _column(node: Any) -> tuple[Vector, tuple[Node, ...]] | None:
    """Which column (B, 1) of which w ``node`` is, and the nodes that take it."""
    spec = spec_of(node)
    if spec is None or len(spec.shape) != 2 or spec.shape[1] != 1:
        return None
    if is_call(node, torch.unsqueeze, torch.reshape):
        entry = argument(node, 0, "input")
        found = _entry(entry) if rank(entry) == 1 else None
        return None if found is None else (found[0], (node, *found[1]))
    return _entry(node) or _slice(node)


def _entry(node: Any) -> tuple[Vector, tuple[Node, ...]] | None:
    """``w[:, k]``, ``unbind(w, 1)[k]``"""
    column = read(node)
    size = None if column is None else gates_of(column.source)
    if column is None or size is None:
        return _part(node)
    return (Vector(column.source, column.place % size), (node,)) if column.dim == 1 else None


def _slice(node: Any) -> tuple[Vector, tuple[Node, ...]] | None:
    """``w[:, k:k+1]``, ``w[:, k, None]``, ``split(w, 1, 1)[k]``, ``chunk(w, E, 1)[k]``"""
    source: Any = None
    key: Any = None
    if is_call(node, operator.getitem):
        source, key = node.args
    size = gates_of(source)
    if size is None or not isinstance(key, tuple):
        return _part(node)
    if key[0] not in (slice(None), Ellipsis) or key[2:] not in ((), (None,)) or rank(source) != 2:
        return None
    place = one_place(key[1], size)
    return None if place is None else (Vector(source, place), (node,))


def _part(node: Any) -> tuple[Vector, tuple[Node, ...]] | None:
    found = part(node)
    if found is None or found.dim != 1 or gates_of(found.source) is None:
        return None
    return Vector(found.source, found.place), found.nodes


def gates_of(source: Any) -> int | None:
    """E of w (B, E) or (B, E, 1)."""
    spec = spec_of(source)
    if spec is None or len(spec.shape) not in (2, 3) or spec.shape[2:] not in ((), (1,)):
        return None
    return spec.shape[1] if isinstance(spec.shape[1], int) else None
