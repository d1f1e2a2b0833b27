"""Sums of vectors under gates: expert mixtures, attention pooling.

T = stack(hs, 1)                      (B, E, D): stacked from vectors, or given; also (B, D, E)
w = softmax(gate, 1), or any (B, E)
sum(w.unsqueeze(2) * T, 1)            also with expand, or einsum("be,bed->bd")
matmul(w.unsqueeze(1), T).squeeze(1)  also matmul(T.transpose(1, 2), w.unsqueeze(2)).squeeze(2)

Gates over the same experts then become one call, which makes the gradient of an expert at once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, is_method, items, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply, legal

from .leaf import (
    argument,
    bytes_of,
    differs,
    einsum_of,
    extra,
    human,
    module_of,
    plural,
    rank,
    reduction_of,
    spec_of,
    unpaid,
)
from .stacks import Piece, features, pieces_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_SOFTMAX = ("input", "dim", "dtype", "_stacklevel")
_OP = torch.ops.recast.gated_sums.default


@dataclass(frozen=True, slots=True)
class Found:
    """Everything a gated sum is made of."""

    stack: Node  # T
    pieces: tuple[Piece, ...]
    gate: Node  # w, or what it is the softmax of
    softmax: bool
    product: bool  # made by a matrix product
    keeps: int | None  # where the result has a size of 1 that nothing takes out


# ---------------------------------------------------------------- parts


def _sum(node: Node) -> tuple[Node, int, bool] | None:
    """``(x, dim, keepdim)`` when ``node`` sums x of three dimensions over one of them."""
    found = reduction_of(node, "sum")
    if found is None or rank(found.source) != 3:
        return None
    return found.source, found.dim % 3, bool(found.keepdim)


def _expanded(node: Any) -> tuple[Node, tuple[Node, ...]] | None:
    """``(x, nodes)``: x itself, or what ``node`` expands along sizes of 1."""
    if not isinstance(node, Node):
        return None
    if is_method(node, "expand", "expand_as", "broadcast_to"):
        source = node.args[0]
        return (source, (node,)) if isinstance(source, Node) else None
    return node, ()


def _weights(node: Any, dim: int) -> tuple[Node, tuple[Node, ...]] | None:
    """``(w, nodes)`` when ``node`` is w (B, E) with a size of 1 put in at ``dim``, or expanded."""
    opened = _expanded(node)
    if opened is None:
        return None
    source, nodes = opened
    if not is_call(source, torch.unsqueeze) or rank(source) != 3:
        return None
    if argument(source, 1, "dim") % 3 != dim:
        return None
    return argument(source, 0, "input"), (*nodes, source)


def _softmax(node: Node, root: nn.Module) -> Node | None:
    """The logits when ``node`` is their softmax over the last of two dimensions."""
    if sole_user(node) is None or rank(node) != 2:
        return None
    module = module_of(node, root)
    if module is not None:
        plain = type(module) is nn.Softmax and differs(node, module, nn.Softmax) is None
        source, dim = argument(node, 0, "input"), module.dim if plain else None
    elif is_call(node, torch.softmax, F.softmax) or is_method(node, "softmax"):
        if argument(node, 3, "dtype") is not None or extra(node, 2, *_SOFTMAX):
            return None
        source, dim = argument(node, 0, "input"), argument(node, 1, "dim")
    else:
        return None
    return source if dim in (1, -1) and isinstance(source, Node) else None


@dataclass(frozen=True, slots=True)
class _Sum:
    """One weighted sum: w (B, E), T, and along which dimension of T the vectors lie."""

    weights: Node
    stack: Node
    along: int  # 1: T is (B, E, D); 2: (B, D, E)
    nodes: tuple[Node, ...]
    product: bool
    keeps: int | None


def _added(node: Node) -> _Sum | None:
    """sum(w.unsqueeze * T, dim)"""
    found = _sum(node)
    if found is None:
        return None
    product, dim, keepdim = found
    if dim == 0 or not is_call(product, operator.mul):
        return None
    for gate, stack in (product.args, product.args[::-1]):
        weights = _weights(gate, 3 - dim)
        if weights is not None and isinstance(stack, Node) and rank(stack) == 3:
            keeps = dim if keepdim else None
            return _Sum(weights[0], stack, dim, (*weights[1], product, node), False, keeps)
    return None


def _multiplied(node: Node) -> _Sum | None:
    """bmm(w.unsqueeze(1), T), bmm(T, w.unsqueeze(2))"""
    if not is_call(node, torch.bmm):
        return None
    left, right = argument(node, 0, "input"), argument(node, 1, "mat2")
    row, column = _weights(left, 1), _weights(right, 2)
    if row is not None and isinstance(right, Node):
        return _Sum(row[0], right, 1, (*row[1], node), True, 1)
    if column is not None and isinstance(left, Node):
        return _Sum(column[0], left, 2, (*column[1], node), True, 2)
    return None


def _contracted(node: Node) -> _Sum | None:
    """einsum("be,bed->bd", w, T), in any letters and order"""
    found = einsum_of(node)
    if found is None or found.output is None or len(found.operands) != 2:
        return None
    terms, output, operands = found
    if not all(isinstance(t, Node) for t in operands) or not "".join(terms).isalpha():
        return None
    pairs = list(zip(terms, operands, strict=True))
    for (w, weights), (t, stack) in (pairs, pairs[::-1]):
        if len(w) != 2 or len(set(t)) != 3 or len(t) != 3 or w[0] != t[0] or w[0] == w[1]:
            continue
        if w[1] in t[1:] and output == t.replace(w[1], ""):
            return _Sum(weights, stack, t.index(w[1]), (node,), True, None)
    return None


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    found = _added(node) or _multiplied(node) or _contracted(node)
    if found is None:
        return None
    spec, given = spec_of(found.stack), spec_of(found.weights)
    if spec is None or given is None or len(given.shape) != 2 or len(spec.shape) != 3:
        return None
    if given.shape != (spec.shape[0], spec.shape[found.along]) or given.dtype != spec.dtype:
        return None
    if not spec.dtype.is_floating_point or not isinstance(given.shape[1], int):
        return None
    stack = found.stack
    turned: tuple[Node, ...] = ()
    if found.along == 2:
        opened = _upright(stack)
        if opened is None and found.product:
            return None
        if opened is None:
            return Miss(
                node,
                f"the vectors it weighs lie along dimension 2 of {stack.name}",
                ("stack them along dimension 1: (batch, vectors, width)",),
            )
        stack, turned, pieces, stacking = opened
    else:
        pieces, stacking = pieces_of(stack)
    readers = set(found.nodes) | set(turned)
    if set(stack.users) - readers and pieces == ((stack, 0),):
        stacking = ()
    logits = _softmax(found.weights, root)
    tail, keeps = _tail(node, found.keeps)
    head = () if logits is None else (found.weights,)
    inner = [*stacking, *turned, *head, *found.nodes, *tail]
    kept = _only_inside(inner, [*stacking, *turned])
    if kept is None:  # T is needed elsewhere too; its parts are there all the same
        inner = [*head, *found.nodes, *tail]
    nodes = list(dict.fromkeys(inner))
    gate = found.weights if logits is None else logits
    what = Found(stack, pieces, gate, logits is not None, found.product, keeps)
    return unpaid("gated_sums", node, root) or Match(nodes, [nodes[-1]], what)


def _upright(
    stack: Node,
) -> tuple[Node, tuple[Node, ...], tuple[Piece, ...], tuple[Node, ...]] | None:
    """What of a (B, D, E) stack is (B, E, D), or what it was stacked from."""
    if is_call(stack, torch.stack) and argument(stack, 1, "dim", 0) in (2, -1):
        return stack, (), tuple((n, 0) for n in argument(stack, 0, "tensors")), (stack,)
    if is_call(stack, torch.transpose):
        dims = {argument(stack, 1, "dim0"), argument(stack, 2, "dim1")}
        if dims in ({1, 2}, {-1, -2}):
            inner = argument(stack, 0, "input")
            pieces, stacking = pieces_of(inner)
            return inner, (stack,), pieces, stacking
    return None


def _only_inside(inner: Sequence[Node], parts: Sequence[Node]) -> bool | None:
    """True when the values of ``parts`` are used by ``inner`` alone."""
    inside = set(inner)
    return True if all(set(n.users) <= inside for n in parts) else None


def _tail(node: Node, keeps: int | None) -> tuple[tuple[Node, ...], int | None]:
    """What takes the size of 1 out of the result, and whether it is left."""
    user = sole_user(node)
    if keeps is None or user is None:
        return (), keeps
    spec = spec_of(user)
    if spec is None or len(spec.shape) != 2:
        return (), keeps
    if is_call(user, torch.squeeze) and argument(user, 1, "dim") % 3 == keeps:
        return (user,), None
    wide = spec_of(node)
    flat = None if wide is None else wide.shape[3 - keeps]
    if is_call(user, torch.reshape, torch.flatten) and spec.shape[1] == flat:
        return (user,), None
    return (), keeps


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    width = spec_of(found.gate)
    assert width is not None
    call = build.call(
        _OP,
        features(found.pieces, build), [found.gate], list(range(int(width.shape[1]))),
        found.softmax, found.product,
        name="gated_sums",
    )  # fmt: skip
    out = build.item(call, 0)
    if found.keeps is None:
        return [out]
    return [build.call(torch.unsqueeze, out, found.keeps)]


def _describe(match: Match) -> str:
    found: Found = match.found
    spec = spec_of(found.gate)
    count = f"{spec.shape[1]} vectors" if spec is not None else "vectors"
    return f"{count} under {'the softmax of ' if found.softmax else ''}a gate in one call"


def _worth(match: Match) -> str:
    found: Found = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    size = bytes_of(found.stack)
    if size is None:
        return launches
    saved = 2 * ((len(found.pieces) > 1) + (not found.product)) * size  # the stack, the product
    return f"{launches}, {human(saved)} of traffic a sample" if saved else launches


GATED = Rule(
    name="fuse-gated-sums",
    equation="sum(softmax(g, 1).unsqueeze(2) * stack(hs, 1), 1) => gated_sums(hs, g)",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


# ---------------------------------------------------------------- gates over the same experts


def _matches_many(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, _OP):
        return None
    group = [node]
    for other in list(node.graph.nodes):
        if not is_call(other, _OP) or other is node or other.args[3:] != node.args[3:]:
            continue
        shares = any(set(other.args[0]) & set(n.args[0]) for n in group)  # type: ignore[arg-type]
        if shares and legal(node.graph, _as_match([*group, other]), root) is None:
            group.append(other)
    return _as_match(group) if len(group) > 1 else None


def _as_match(group: Sequence[Node]) -> Match:
    outputs = [item for call in group for _, item in items(call)]
    return Match([*group, *outputs], outputs, list(group))


def _rewrite_many(match: Match, build: Build) -> list[Node]:
    group: Sequence[Node] = match.found
    experts: dict[Node, int] = {}  # where the vectors of each tensor start
    count = 0
    for call in group:
        for expert in call.args[0]:  # type: ignore[union-attr]
            if expert not in experts:
                experts[expert] = count  # type: ignore[index]
                count += _vectors(expert)
    chosen: list[int] = []
    for call in group:
        numbers = [
            experts[expert] + k  # type: ignore[index]
            for expert in call.args[0]  # type: ignore[union-attr]
            for k in range(_vectors(expert))
        ]
        chosen += [numbers[k] for k in call.args[2]]  # type: ignore[union-attr, index]
    gates = [gate for call in group for gate in call.args[1]]  # type: ignore[union-attr]
    made = build.call(_OP, list(experts), gates, chosen, *group[0].args[3:], name="gated_sums")
    first = 0
    results: list[Node] = []
    for call in group:
        results += [build.item(made, first + int(k)) for k, _ in items(call)]
        first += len(call.args[1])  # type: ignore[arg-type]
    return results


def _vectors(expert: Any) -> int:
    spec = spec_of(expert)
    if spec is None:
        return 1
    return int(spec.shape[1]) if len(spec.shape) == 3 else 1


def _worth_many(match: Match) -> str:
    group: Sequence[Node] = match.found
    experts: list[Any] = [expert for call in group[1:] for expert in call.args[0]]  # type: ignore[union-attr]
    added = plural(len(experts), "sum")
    return f"{plural(len(group) - 1, 'launch')}, up to {added} of gradients of experts a step"


MERGED = Rule(
    name="merge-gated-sums",
    equation="gated_sums(hs, g1), gated_sums(hs, g2) ... => gated_sums(hs, [g1, g2 ...])",
    match=_matches_many,
    rewrite=_rewrite_many,
    describe=lambda match: f"{len(match.found)} gates over the same experts in one call",
    worth=_worth_many,
)


@dataclass(frozen=True)
class FuseGatedSums:
    """sum(softmax(g, 1).unsqueeze(2) * stack(hs, 1), 1) => gated_sums(hs, g)

    The weights may come from anywhere; a softmax over the vectors is taken in where nothing else
    reads it. Gates over the same experts, none computed from another, then become one call.
    """

    name: ClassVar[str] = "fuse-gated-sums"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the gated sums of ``graph``; returns how many rewrites there were."""
        return apply(graph, [GATED], context) + apply(graph, [MERGED], context)
