"""Dot interaction of feature vectors: dot products of all pairs, and the gather that keeps some.

    T = stack of F vectors: (B, F, D)        cat + view, stack, unsqueeze + cat, or given
    Z = T T^t: (B, F, F)                     bmm, matmul, @, einsum
    P = Z[:, li, lj]: (B, P)                 index tensors, lists, tril/triu_indices, a mask
    [dense, P, zeros]                        optional cat in front and zero columns behind

Indices that are pure constants are folded; those held in buffers are read at each call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, is_method, note, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule, apply

from .leaf import argument, einsum_of, human, plural, rank, spec_of, unpaid
from .pairs import Index, Pairs, read_pairs
from .stacks import Piece, features, pieces_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True, slots=True)
class Found:
    """The parts of a dot interaction."""

    stack: Node  # T
    pieces: tuple[Piece, ...]
    pairs: Pairs
    dense: Node | None
    pad: int


# ---------------------------------------------------------------- Z = T T^t


def _product(node: Node, root: nn.Module) -> tuple[Node, tuple[Node, ...]] | None:
    """``(T, nodes)`` when ``node`` is the product of T with itself, transposed."""
    if is_call(node, torch.einsum):
        return _einsum(node)
    if not is_call(node, torch.bmm, torch.matmul, operator.matmul):
        return None
    left, right = argument(node, 0, "input"), argument(node, 1, "mat2", node.kwargs.get("other"))
    turned = _turned(right)
    if turned is None or not _same(left, turned) or rank(left) not in (3, None):
        return None
    if rank(left) is None and node.target is not torch.bmm:
        return None
    return left, (node, right)


def _einsum(node: Node) -> tuple[Node, tuple[Node, ...]] | None:
    found = einsum_of(node)
    if found is None or len(found.operands) != 2:
        return None
    (first, second), (left, right) = found.terms, found.operands
    if left is not right or not isinstance(left, Node):
        return None
    plain = len(first) == len(second) == 3 and (first + second).isalpha()
    if not plain or first[0] != second[0] or first[2] != second[2] or first[1] == second[1]:
        return None
    good = len({*first, *second}) == 4 and found.output == first[:2] + second[1]
    return (left, (node,)) if good else None


def _turned(node: Any) -> Node | None:
    """X when ``node`` is X with its last two dimensions swapped."""
    if is_call(node, torch.transpose):
        dims = {argument(node, 1, "dim0"), argument(node, 2, "dim1")}
        return argument(node, 0, "input") if dims in ({1, 2}, {-1, -2}) else None
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two values are the same: one node, or the same view of one node."""
    if a is b:
        return isinstance(a, Node)
    views = (torch.reshape, torch.transpose, torch.unsqueeze, torch.flatten)
    if not (is_call(a, *views) and is_call(b, *views) and a.target is b.target):
        return False
    return bool(a.args[1:] == b.args[1:] and a.kwargs == b.kwargs and _same(a.args[0], b.args[0]))


# ---------------------------------------------------------------- dense in front, zeros behind


def _joined(gather: Node) -> tuple[tuple[Node, ...], Node | None, int]:
    """``(nodes, dense, pad)`` of ``cat([dense, gather, zeros], 1)``; empty when there is none."""
    cat = sole_user(gather)
    if not is_call(cat, torch.cat) or argument(cat, 1, "dim", 0) not in (1, -1):
        return (), None, 0
    parts = list(argument(cat, 0, "tensors"))
    at = parts.index(gather) if parts.count(gather) == 1 else -1
    dense = parts[0] if at == 1 else None
    behind = parts[at + 1 :]
    widths = [_zeros(part, gather) for part in behind]
    if at not in (0, 1) or None in widths:
        return (), None, 0
    if dense is not None and not _joins(dense, gather):
        return (), None, 0
    pads = tuple(n for n in behind if sole_user(n) is cat)
    return (cat, *pads), dense, sum(w for w in widths if w)


def _joins(dense: Node, gather: Node) -> bool:
    """Whether concatenating the two keeps the dtype (the narrower one would be promoted)."""
    a, b = spec_of(dense), spec_of(gather)
    return a is None or b is None or (a.dtype == b.dtype and len(a.shape) == 2)


def _zeros(node: Any, gather: Node) -> int | None:
    """Number of columns when ``node`` is (B, k) zeros of the dtype of ``gather``."""
    spec, other = spec_of(node), spec_of(gather)
    if spec is None or other is None or len(spec.shape) != 2 or spec.dtype != other.dtype:
        return None
    made = is_call(node, torch.zeros, torch.zeros_like) or is_method(node, "new_zeros")
    width = spec.shape[1]
    return width if made and isinstance(width, int) else None


def _padded(last: Node) -> tuple[tuple[Node, ...], int]:
    """``F.pad(x, (0, k))`` after ``last``: zero columns."""
    pad = sole_user(last)
    if not is_call(pad, F.pad):
        return (), 0
    widths, mode = argument(pad, 1, "pad"), argument(pad, 2, "mode", "constant")
    value = argument(pad, 3, "value", None)
    if not isinstance(widths, (tuple, list)) or len(widths) != 2 or mode != "constant" or value:
        return (), 0
    left, right = widths
    return ((pad,), right) if left == 0 and isinstance(right, int) and right >= 0 else ((), 0)


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    product = _product(node, root)
    if product is None:
        return None
    stack, product_nodes = product
    pairs = read_pairs(node, root)
    if not isinstance(pairs, Pairs):
        return pairs
    gather = pairs.nodes[-1]
    cat_nodes, dense, pad = _joined(gather)
    output = cat_nodes[0] if cat_nodes else gather
    pad_nodes, more = _padded(output) if not pad else ((), 0)
    output = pad_nodes[0] if pad_nodes else output
    inner = {n for n in product_nodes if n is node or set(n.users) <= {node}}
    pieces, stack_nodes = pieces_of(stack)
    if set(stack.users) - inner - {node}:  # T is needed elsewhere, so it exists anyway
        pieces, stack_nodes = ((stack, 0),), ()
    nodes = [*stack_nodes, *inner, *pairs.nodes, *cat_nodes, *pad_nodes]
    match = Match(nodes, [output], Found(stack, pieces, pairs, dense, pad + more))
    return unpaid("dot_interaction", node, root) or match


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    rows, columns = _places(found.pairs, build)
    return [
        build.call(
            torch.ops.recast.dot_interaction.default,
            features(found.pieces, build), found.dense, rows, columns, found.pad,
            name="dot_interaction",
        )
    ]  # fmt: skip


def _places(pairs: Pairs, build: Build) -> tuple[Node, Node]:
    """The nodes of the two index vectors."""
    if isinstance(pairs.mask, Node):
        places = build.call(torch.nonzero, pairs.mask)
        key = slice(None)
        return (
            build.call(operator.getitem, places, (key, 0)),
            build.call(operator.getitem, places, (key, 1)),
        )
    rows, columns = pairs.rows, pairs.columns
    if pairs.mask is not None:
        rows, columns = pairs.mask.nonzero().unbind(1)
    return _placed(rows, "rows", build), _placed(columns, "columns", build)


def _placed(index: Index | None, hint: str, build: Build) -> Node:
    if isinstance(index, Node):
        return index
    assert index is not None
    return build.constant(index.contiguous(), hint)


def _describe(match: Match) -> str:
    found: Found = match.found
    spec = note(match.outputs[0]).spec
    vectors = spec_of(found.stack)
    count = f"{vectors.shape[1]} vectors" if vectors is not None else "vectors"
    ends = [
        word
        for word, there in (("dense in front", found.dense), ("zero columns behind", found.pad))
        if there
    ]
    tail = f", with {' and '.join(ends)}" if ends else ""
    columns = (
        f", {spec.shape[1]} columns out" if spec is not None and not isinstance(spec, tuple) else ""
    )
    return f"pairwise dot products of {count}{tail}{columns} in one call"


def _worth(match: Match) -> str:
    found: Found = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    spec = spec_of(found.stack)
    size = spec.at(1) if spec is not None else None
    if spec is None or size is None:
        return launches
    _, features, width = size
    copied = features * width if len(found.pieces) > 1 else 0
    saved = 2 * (features * features + copied) * spec.dtype.itemsize
    return f"{launches}, {human(saved)} of traffic a sample"


DOT: Rule = Rule(
    name="fuse-dot-interaction",
    equation="cat([x, bmm(T, T^t)[:, i, j], 0]), T = stack(ts) => dot_interaction(ts, x, i, j)",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


@dataclass(frozen=True)
class FuseDotInteraction:
    """cat([x, bmm(T, T^t)[:, i, j], 0]), T = stack(ts) => dot_interaction(ts, x, i, j)

    Any triangle or other fixed set of pairs, with or without self; T from cat and view, from
    stack, from unsqueeze and cat, or given as (B, F, D).
    """

    name: ClassVar[str] = "fuse-dot-interaction"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the interactions of ``graph``; returns their number."""
        return apply(graph, [DOT], context)


__all__: Sequence[str] = ["DOT", "FuseDotInteraction"]
