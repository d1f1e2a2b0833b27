"""The quadratic form of all pairs of fields: sum((x M) * x, 1), with a block of M for each pair."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recast.rewriter.ir import Node
from recast.rewriter.rule import Build, Match, Rule
from recast.runtime.layers.as_product import as_product

from .leaf import human, plural, spec_of
from .pair_vectors import Side, Vector, closed, count_of, operands
from .pairs import Index

_FEWEST = 3  # pairs; for fewer, the form is larger than its parts
_EMPTY = 4  # blocks per pair, at most; a triangle of many fields has 2


@dataclass(frozen=True, slots=True)
class Found:
    """A quadratic form: its vectors, and how its matrix is made."""

    sources: tuple[Node, ...]  # (B, D) or (B, f, D) each
    fields: int
    dim: int
    pairs: int
    matrix: Callable[[Build], Node]  # (F, F, D, D): v_i @ matrix[i, j] @ v_j
    keeps: bool  # the result is (B, 1)
    made: str = ""  # by a matrix product: its "terms", which are then summed, or the "sum" itself
    mask: Node | None = None  # else: what they are multiplied with, which gives them its dtype


def form_of(
    li: Index, lj: Index, fields: int, dim: int, weights: Callable[[Build], Node]
) -> Callable[[Build], Node]:
    """(F, F, D, D) from (P, D, D) and the pairs that they belong to."""

    def made(build: Build) -> Node:
        held = weights(build)
        zeros = build.call(torch.Tensor.new_zeros, held, (fields, fields, dim, dim))
        at = tuple(
            index if isinstance(index, Node) else build.constant(index, hint)
            for index, hint in ((li, "rows"), (lj, "columns"))
        )
        return build.call(torch.index_put, zeros, at, held, True)

    return made


def places(vectors: Sequence[Vector]) -> tuple[tuple[Node, ...], dict[Vector, int], int]:
    """The sources of ``vectors``, the index of each vector among those of all sources, and their
    number.
    """
    sources = tuple(dict.fromkeys(v.source for v in vectors))
    start: dict[Node, int] = {}
    total = 0
    for source in sources:
        start[source] = total
        total += count_of(source) or 1
    return sources, {v: start[v.source] + v.index for v in vectors}, total


def _width(node: Any) -> int | None:
    spec = spec_of(node)
    size = spec.shape[-1] if spec is not None and len(spec.shape) in (2, 3, 4) else None
    return size if isinstance(size, int) else None


def dim_of(sources: Sequence[Node]) -> int | None:
    """D, if the vectors of all ``sources`` have one length and dtype; else None."""
    kinds = {(spec.dtype, _width(n)) for n in sources if (spec := spec_of(n)) is not None}
    if len(kinds) != 1:
        return None
    ((dtype, dim),) = kinds
    return dim if dtype.is_floating_point else None


def _all_read(li: Index, lj: Index, total: int) -> bool:
    """Whether every vector is in some pair; as far as known, for indices may change."""
    if isinstance(li, Node) or isinstance(lj, Node):
        return True
    return len({*li.tolist(), *lj.tolist()}) == total


def pays(fields: int, pairs: int) -> bool:
    """Whether the form is worth its blocks of zeros."""
    return pairs >= _FEWEST and fields * fields <= _EMPTY * pairs


def gathered(
    node: Node,
    core: Sequence[Node],
    sides: tuple[Side, Side],
    weight: Node,
    order: Sequence[int],
    keeps: bool,
    made: str = "",
) -> Match | None:
    """The form of vectors selected by indices, and matrices (P, D, E) reordered by ``order``."""
    spec, found = spec_of(weight), operands(*sides)
    if spec is None or found.right or None in {count_of(source) for source in found.left}:
        return None
    pairs, dim, wide = (int(spec.shape[k]) for k in order)
    total = sum(count_of(source) or 1 for source in found.left)
    if not _all_read(found.li, found.lj, total):
        return None
    if not dim == wide == dim_of(found.left) or not pays(total, pairs):
        return None

    def weights(build: Build) -> Node:
        plain = tuple(order) == (0, 1, 2)
        return weight if plain else build.call(torch.permute, weight, tuple(order))

    matrix = form_of(found.li, found.lj, total, dim, weights)
    inside = closed(core, [n for one in sides for n in one.nodes])
    nodes = [n for n in node.graph.nodes if n in inside]
    return Match(nodes, [node], Found(found.left, total, dim, pairs, matrix, keeps, made))


# ---------------------------------------------------------------- the rewrite


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    flat = [
        source if len(spec.shape) == 2 else build.call(torch.flatten, source, 1)
        for source in found.sources
        if (spec := spec_of(source)) is not None
    ]
    x = flat[0] if len(flat) == 1 else build.call(torch.cat, flat, 1)
    size = found.fields * found.dim
    blocks = build.call(torch.permute, found.matrix(build), (0, 2, 1, 3))
    form = build.call(torch.reshape, blocks, (size, size))
    product = build.call(operator.mul, build.call(torch.matmul, x, form), x)
    if found.made == "terms":
        product = build.call(as_product, product)
    if found.mask is not None:
        product = build.call(torch.Tensor.type_as, product, found.mask)
    out = build.call(torch.sum, product, 1, found.keeps)
    return [build.call(as_product, out) if found.made == "sum" else out]


def _describe(match: Match) -> str:
    found: Found = match.found
    return f"{plural(found.pairs, 'pair')} with a matrix each, in one product"


def _worth(match: Match) -> str:
    found: Found = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    spec = spec_of(found.sources[0])
    if spec is None:
        return launches
    return f"{launches}, {human(4 * found.pairs * found.dim * spec.dtype.itemsize)} a sample"


def form_rule(match: Any) -> Rule:
    return Rule(
        name="fuse-field-matrices",
        equation="sum over pairs of v_i W_ij v_j => sum((x M) * x, 1)",
        match=match,
        rewrite=_rewrite,
        describe=_describe,
        worth=_worth,
    )
