"""Sums and means of looked-up sequences under a mask: one pooled lookup.

rows = w[ids]                            (B, L, D)
mask = ids != 0, or arange(L) < length   (B, L), then unsqueezed, turned, expanded, repeated, cast
sum(rows * mask, 1)                      also bmm(mask (B, 1, L), rows), and where a mask leaves out
                                         one id: where(mask, rows, 0), masked_fill(rows, ~mask, 0)
sum(rows, 1), mean(rows, 1)              of all
mean(rows * mask, 1)                     the sum, divided by L
sum(rows * w.unsqueeze(2), 1)            weights w (B, L); also bmm(w (B, 1, L), rows), and
                                         einsum("bld,bl->bd", rows, w)

A mask that leaves out one id makes that id the padding; any other mask becomes per-sample weights.
A padding_idx of the table that no mask leaves out is summed and not trained (see bags.py).
What follows, such as a division by counts plus an epsilon, is left alone. (B, L, D) is never
written.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, is_method
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.layers.as_product import as_product

from .bags import Padding, bag, padding_of, told_of
from .dynamic import is_dynamic
from .embeddings import Lookup
from .embeddings import read as read_lookup
from .leaf import (
    argument,
    bytes_of,
    einsum_of,
    human,
    plural,
    rank,
    reduction_of,
    spec_of,
)
from .masks import Mask, excluded_id, inserted_at, read_mask
from .nested_pooling import NESTED
from .pairs import constant_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True, slots=True)
class Found:
    """One pooled sequence."""

    lookup: Lookup
    mode: str
    padding: Padding
    mask: Node | None  # else: (B, L), or with one size of 1 ...
    single: int | None  # ... and where
    keeps: bool  # the result is (B, 1, D)
    product: bool  # made by a matrix product
    averages: bool  # the sum is divided by the number of ids


# ---------------------------------------------------------------- the rule


@dataclass(frozen=True, slots=True)
class _Pooled:
    rows: Node
    mask: Any  # a node, or None
    wants: str  # the axes the mask must have
    mode: str
    nodes: tuple[Node, ...]
    keeps: bool
    chooses: str = ""  # "kept" or "dropped" rows by the mask, rather than multiplies by it
    product: bool = False
    averages: bool = False  # the sum, over the number of rows


def _pooled(node: Node, root: nn.Module) -> _Pooled | None:
    """What ``node`` sums over the middle one of three dimensions."""
    if is_call(node, torch.bmm):
        mask, rows = argument(node, 0, "input"), argument(node, 1, "mat2")
        return _Pooled(rows, mask, "b1l", "sum", (node,), True, product=True)
    if is_call(node, torch.einsum):
        return _contracted(node)
    found = reduction_of(node, "sum", "mean")
    if found is None or rank(found.source) != 3 or found.dim % 3 != 1:
        return None
    name, source, keeps = found.name, found.source, bool(found.keepdim)
    chosen, averages = _chosen(source, root), name == "mean"
    if chosen is not None:
        rows, mask, chooses, inner = chosen
        nodes = (*inner, source, node)
        return _Pooled(rows, mask, "bl1", "sum", nodes, keeps, chooses, averages=averages)
    if not is_call(source, operator.mul):
        return _Pooled(source, None, "", name, (node,), keeps)
    one, two = source.args
    rows, mask = (two, one) if _looks_up(two) else (one, two)
    return _Pooled(rows, mask, "bl1", "sum", (source, node), keeps, averages=averages)  # type: ignore[arg-type]


def _contracted(node: Node) -> _Pooled | None:
    """``einsum("bld,bl->bd", rows, weights)``, in any letters and order."""
    found = einsum_of(node)
    if found is None or len(found.operands) != 2 or not "".join(found.terms).isalpha():
        return None
    pairs = list(zip(found.terms, found.operands, strict=True))
    for (rows, held), (weights, mask) in (pairs, pairs[::-1]):
        plain = len({*rows}) == 3 == len(rows) and weights == rows[:2]
        if plain and found.output == rows[0] + rows[2] and isinstance(mask, Node):
            return _Pooled(held, mask, "bl", "sum", (node,), False, product=True)
    return None


def _chosen(node: Node, root: nn.Module) -> tuple[Any, Any, str, tuple[Node, ...]] | None:
    """Rows, the mask, whether it keeps or drops them, and the zeros, where ``node`` puts zeros."""
    if is_call(node, torch.masked_fill) or is_method(node, "masked_fill"):
        rows, mask = argument(node, 0, "input"), argument(node, 1, "mask")
        return (
            (rows, mask, "dropped", ()) if _zeros(argument(node, 2, "value"), rows, root) else None
        )
    if not is_call(node, torch.where) or len(node.args) != 3:
        return None
    mask, one, two = node.args
    for rows, zeros, chooses in ((one, two, "kept"), (two, one, "dropped")):
        if _zeros(zeros, rows, root):
            return rows, mask, chooses, (zeros,) if isinstance(zeros, Node) else ()
    return None


def _zeros(value: Any, rows: Any, root: nn.Module) -> bool:
    """Whether ``value`` is 0, or as many zeros as there are numbers in ``rows``."""
    if is_call(value, torch.zeros_like):
        return value.args == (rows,) and not value.kwargs
    if isinstance(value, Node):
        held = constant_of(value, root)
        return held is not None and held.dim() == 0 and not held.any()
    return isinstance(value, (int, float)) and value == 0


def _looks_up(node: Any) -> bool:
    return isinstance(node, Node) and (node.op == "call_module" or is_call(node, F.embedding))


def _match(node: Node, root: nn.Module) -> Answer:
    pooled = _pooled(node, root)
    if pooled is None or not isinstance(pooled.rows, Node):
        return None
    lookup = read_lookup(pooled.rows, root)
    if not isinstance(lookup, Lookup) or lookup.mode != "none":
        return None
    if is_dynamic(lookup, root):
        return Miss(node, "its table is dynamic, so its ids are no rows yet")
    ids = spec_of(lookup.ids)
    if ids is None or len(ids.shape) != 2 or not isinstance(ids.shape[1], int):
        return None
    mask, weighed = None, False
    if pooled.mask is not None:
        mask = read_mask(pooled.mask, ids.shape[1])
        if mask is None and not pooled.chooses:
            mask, weighed = _weights(pooled), True
        if mask is None or mask.axes != pooled.wants or ids.shape[1] == 1:
            return None
    spelled = () if mask is None else mask.nodes
    inner = [pooled.rows, *_only_here(spelled, pooled.nodes), *pooled.nodes]
    others = [u for u in pooled.rows.users if u not in inner]
    if others and weighed:
        return None  # as a gated sum, then
    if others:
        return Miss(
            node,
            f"the rows it pools are also read by {others[0].name}, so they are written anyway",
        )
    if pooled.chooses and (
        mask is None or excluded_id(mask.base, lookup.ids, pooled.chooses) is None
    ):
        return Miss(
            node,
            "its mask leaves out other rows than those of one id: as weights, 0 times NaN or"
            " infinity would get into the sum",
            ("rows * mask.unsqueeze(2)", "a mask of the ids, (ids != 0)"),
        )
    left_out = None if mask is None else excluded_id(mask.base, lookup.ids, pooled.chooses)
    padding = padding_of(lookup, left_out, root)
    if pooled.chooses and padding.counts:
        return Miss(
            node,
            f"its mask leaves out the rows of id {left_out}, and another one is its padding_idx",
            ("rows * mask.unsqueeze(2)",),
        )
    weights = mask if padding.counts or padding.row is None else None
    at = None if weights is None else inserted_at(weights.base, ids.shape[1])
    base = None if weights is None else weights.base
    averages = pooled.averages or (pooled.mode == "mean" and padding.counts)
    mode = "sum" if averages else pooled.mode
    found = Found(lookup, mode, padding, base, at, pooled.keeps, pooled.product, averages)
    return Match(inner, [node], found)


def _weights(pooled: _Pooled) -> Mask | None:
    """The weights of one number a row that ``pooled`` multiplies by, of the dtype of the rows."""
    node, rows = pooled.mask, spec_of(pooled.rows)
    spec = spec_of(node)
    if rows is None or spec is None or spec.dtype != rows.dtype or len(rows.shape) != 3:
        return None
    sizes = {"b": rows.shape[0], "l": rows.shape[1], "1": 1}
    if spec.shape != tuple(sizes[axis] for axis in pooled.wants) or rows.shape[2] == 1:
        return None
    at = pooled.wants.find("1")
    if is_call(node, torch.unsqueeze) and argument(node, 1, "dim") % 3 == at:
        return Mask(argument(node, 0, "input"), pooled.wants, (node,))
    return Mask(node, pooled.wants, ())


def _only_here(spelled: Sequence[Node], nodes: Sequence[Node]) -> list[Node]:
    """The nodes of a mask that only this sum uses."""
    inside = set(nodes)
    kept: list[Node] = []
    for node in spelled:
        if not set(node.users) <= inside:
            break
        inside.add(node)
        kept.append(node)
    return kept


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    weights = found.mask
    if weights is not None and found.single is not None:
        weights = build.call(torch.squeeze, weights, found.single)
    out = bag(build, found.lookup, found.lookup.ids, weights, found.mode, found.padding)
    if found.product:
        out = build.call(as_product, out)
    if found.averages:
        out = build.call(torch.div, out, build.call(torch.Tensor.size, found.lookup.ids, 1))
    return [build.call(torch.unsqueeze, out, 1) if found.keeps else out]


def _describe(match: Match) -> str:
    found: Found = match.found
    spec = spec_of(found.lookup.ids)
    length = f"{spec.shape[1]} ids" if spec is not None else "ids"
    mode = "mean" if found.averages else found.mode
    return f"{mode} of {length}{told_of(found.padding, found.mask)} as one pooled lookup"


def _worth(match: Match) -> str:
    found: Found = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    size = bytes_of(found.lookup.node)
    if size is None:
        return launches
    return f"{launches}, {human(2 * (len(match.nodes) - 1) * size)} a sample"


POOL = Rule(
    name="pool-sequences",
    equation="sum(w[ids] * (ids != 0).unsqueeze(2), 1) => bag(w, ids, sum, padding_idx=0)",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


@dataclass(frozen=True)
class PoolSequences:
    """sum(w[ids] * (ids != 0).unsqueeze(2), 1) => bag(w, ids, sum, padding_idx=0)

    Sums and means over sequences of one length, under a mask of ids, of lengths, or none, also of
    several fields (:mod:`.nested_pooling`). Where the table has a padding_idx that the mask lets
    through, its row counts and gets no gradient, as in the model.
    """

    name: ClassVar[str] = "pool-sequences"

    def run(self, graph: Graph, context: Context) -> int:
        """Pool the sequences of ``graph``; returns their number."""
        return apply(graph, [POOL, NESTED], context)
