"""Sums and means over the ids of each of several fields: one pooled lookup.

rows = w[ids]                            (B, F, L, D)
sum(rows, 2), mean(rows, 2)              of all
sum(rows * (ids != 0).unsqueeze(3), 2)   without one id
sum(rows * weights.unsqueeze(3), 2)      weights (B, F, L), or any other mask

These are the sequences of :mod:`.pooling` with a field in front: B F bags of L ids.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recast.rewriter.ir import Node, Spec, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule

from .bags import Padding, bag, padding_of, told_of
from .dynamic import is_dynamic
from .embeddings import Lookup
from .embeddings import read as read_lookup
from .leaf import argument, rank, reduction_of, spec_of
from .masks import excluded_id

_CASTS = ("float", "double", "to", "type", "type_as")


@dataclass(frozen=True, slots=True)
class Found:
    """One pooled lookup. weights: (B, F, L), or None; averages: the sum is divided by L."""

    lookup: Lookup
    fields: int
    mode: str
    padding: Padding
    weights: Node | None
    averages: bool
    keeps: bool


def _match(node: Node, root: nn.Module) -> Answer:
    found = reduction_of(node, "sum", "mean")
    if found is None or rank(found.source) != 4 or found.dim % 4 != 2:
        return None
    rows, mask = _weighed(found.source)
    lookup = read_lookup(rows, root) if isinstance(rows, Node) else None
    if not isinstance(lookup, Lookup) or lookup.mode != "none" or is_dynamic(lookup, root):
        return None
    ids = spec_of(lookup.ids)
    if ids is None or len(ids.shape) != 3 or not all(isinstance(n, int) for n in ids.shape[1:]):
        return None
    if sole_user(rows) not in (node, found.source):
        return None
    fields = ids.shape[1]
    inner = [rows, *([] if mask is None else [found.source]), node]
    if mask is not None and sole_user(found.source) is not node:
        return None
    base = None if mask is None else _base(mask)
    if mask is not None and not _fits(base, mask, rows, ids):
        return None
    left_out = None if base is None else excluded_id(base, lookup.ids, "kept")
    padding = padding_of(lookup, left_out, root)
    weights = base if padding.counts or padding.row is None else None
    averages = found.name == "mean" and (mask is not None or padding.counts)
    mode = "sum" if averages or mask is not None else found.name
    told = Found(lookup, int(fields), mode, padding, weights, averages, bool(found.keepdim))
    return Match(inner, [node], told)


def _weighed(source: Any) -> tuple[Any, Any]:
    """``(rows, mask)`` of ``rows * mask``; the mask is None if there is none."""
    if not is_call(source, operator.mul):
        return source, None
    one, two = source.args
    sizes = [
        spec.shape[3] if (spec := spec_of(x)) and len(spec.shape) == 4 else 0 for x in (one, two)
    ]
    if sizes[1] == 1 != sizes[0]:
        return one, two
    return (two, one) if sizes[0] == 1 != sizes[1] else (None, None)


def _base(mask: Any) -> Node | None:
    """The (B, F, L) tensor that a mask (B, F, L, 1) is made of, by an unsqueeze and casts that keep
    its values.
    """
    while isinstance(mask, Node) and rank(mask) == 4:
        before = argument(mask, 0, "input")
        if is_call(mask, torch.unsqueeze):
            if argument(mask, 1, "dim") not in (3, -1):
                return None
        elif not is_method(mask, *_CASTS) or not _widens(before, mask):
            return None
        mask = before
    while is_method(mask, *_CASTS) and _widens(mask.args[0], mask):
        mask = mask.args[0]
    return mask if isinstance(mask, Node) else None


def _widens(before: Any, after: Node) -> bool:
    """Whether a cast keeps all values: from bool, or to a wider dtype of the same kind."""
    one, two = spec_of(before), spec_of(after)
    if one is None or two is None:
        return False
    kind = one.dtype == torch.bool or one.dtype.is_floating_point == two.dtype.is_floating_point
    return kind and torch.promote_types(one.dtype, two.dtype) == two.dtype


def _fits(base: Node | None, mask: Any, rows: Any, ids: Spec) -> bool:
    """Whether ``base`` has a number for each id, and the product the dtype of the rows."""
    spec, own, given = spec_of(base), spec_of(rows), spec_of(mask)
    if spec is None or own is None or given is None or spec.shape != ids.shape:
        return False
    return torch.promote_types(own.dtype, given.dtype) == own.dtype


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    lookup, weights = found.lookup, found.weights
    if weights is not None:
        weights = build.call(torch.flatten, weights, 0, 1)
    ids = build.call(torch.flatten, lookup.ids, 0, 1)
    out = bag(build, lookup, ids, weights, found.mode, found.padding)
    out = build.call(torch.reshape, out, (-1, found.fields, lookup.table.shape[1]))
    if found.averages:
        out = build.call(torch.div, out, build.call(torch.Tensor.size, lookup.ids, 2))
    return [build.call(torch.unsqueeze, out, 2) if found.keeps else out]


def _describe(match: Match) -> str:
    found: Found = match.found
    spec = spec_of(found.lookup.ids)
    length = spec.shape[2] if spec is not None else "the"
    left = told_of(found.padding, found.weights)
    mode = "mean" if found.averages else found.mode
    return f"{mode} of {length} ids{left} in each of {found.fields} fields as one pooled lookup"


NESTED = Rule(
    name="pool-sequences",
    equation="sum(w[ids], 2) => bag(w, ids.flatten(0, 1), sum).reshape(-1, F, D)",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
)
