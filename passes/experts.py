"""Sums of vectors under gates: expert mixtures, attention pooling.

T = stack(hs, 1)                      (B, E, D): stacked from vectors, or given; also (B, D, E)
w = softmax(gate, 1), or any (B, E)   also (B, E, 1) or (B, 1, E) as it is
sum(w.unsqueeze(2) * T, 1)            also with expand, or einsum("be,bed->bd")
matmul(w.unsqueeze(1), T).squeeze(1)  also matmul(T.transpose(1, 2), w.unsqueeze(2)).squeeze(2)
w[:, 0:1] * h_0 + w[:, 1:2] * h_1 ..  see added_gates.py

Several gates over the same experts become one call, which computes an expert's gradient in one go.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, is_method, items, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply, legal

from .added_gates import gates_of, terms_of
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
from .pair_vectors import closed, places_of
from .stacks import Piece, features, pieces_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_SOFTMAX = ("input", "dim", "dtype", "_stacklevel")
_OP = torch.ops.recast.gated_sums.default


@dataclass(frozen=True, slots=True)
class Found:
    """Everything a gated sum is made of."""

    stack: Node | None  # T; None for vectors that are added one by one
    pieces: tuple[Piece, ...]
    gate: Node  # w, or what it is the softmax of
    wide: int | None  # where it has a size of 1
    chosen: tuple[int, ...]  # which of the vectors each gate weighs
    softmax: bool
    product: bool  # made by a matrix product
    keeps: int | None  # where the result keeps a dimension of size 1


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


@dataclass(frozen=True, slots=True)
class _Weights:
    """w (B, E), or with a size of 1 at ``wide``; and the nodes that spread it."""

    node: Node
    nodes: tuple[Node, ...]
    wide: int | None = None


def _weights(node: Any, dim: int) -> _Weights | None:
    """What ``node`` is with a size of 1 at ``dim``, put in or there already, or expanded."""
    opened = _expanded(node)
    if opened is None:
        return None
    source, nodes = opened
    spec = spec_of(source)
    if spec is None or len(spec.shape) != 3 or spec.shape[dim] != 1:
        return None
    if is_call(source, torch.unsqueeze) and argument(source, 1, "dim") % 3 == dim:
        return _Weights(argument(source, 0, "input"), (*nodes, source))
    return _Weights(source, nodes, dim)


def _softmax(
    node: Node, wide: int | None, root: nn.Module, readers: set[Node] | None = None
) -> Node | None:
    """The logits when ``node`` is their softmax over E, and one node or ``readers`` read it."""
    alone = sole_user(node) is not None if readers is None else set(node.users) <= readers
    if not alone or rank(node) != (2 if wide is None else 3):
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
    over = (1, -1) if wide is None else (3 - wide, -wide)
    return source if dim in over and isinstance(source, Node) else None


@dataclass(frozen=True, slots=True)
class _Sum:
    """One weighted sum: w, T, and along which dimension of T the vectors lie."""

    weights: _Weights
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
            return _Sum(weights, stack, dim, (*weights.nodes, product, node), False, keeps)
    return None


def _multiplied(node: Node) -> _Sum | None:
    """bmm(w.unsqueeze(1), T), bmm(T, w.unsqueeze(2))"""
    if not is_call(node, torch.bmm):
        return None
    left, right = argument(node, 0, "input"), argument(node, 1, "mat2")
    row, column = _weights(left, 1), _weights(right, 2)
    if row is not None and isinstance(right, Node):
        return _Sum(row, right, 1, (*row.nodes, node), True, 1)
    if column is not None and isinstance(left, Node):
        return _Sum(column, left, 2, (*column.nodes, node), True, 2)
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
            held = _Weights(weights, ())
            return _Sum(held, stack, t.index(w[1]), (node,), True, None)
    return None


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    found = _added(node) or _multiplied(node) or _contracted(node)
    if found is None:
        return None
    weights, wide = found.weights.node, found.weights.wide
    spec, given = spec_of(found.stack), spec_of(weights)
    if spec is None or given is None or len(spec.shape) != 3 or given.dtype != spec.dtype:
        return None
    logits = _softmax(weights, wide, root)
    if wide is not None and (spec.shape[3 - found.along] == 1 or (found.product and not logits)):
        return None  # of one column, or a product of matrices one of which has one row
    sizes = tuple(size for d, size in enumerate(given.shape) if d != wide)
    if sizes != (spec.shape[0], spec.shape[found.along]):
        return None
    if not spec.dtype.is_floating_point or not isinstance(sizes[1], int):
        return None
    opened = _stack_of(found.stack, found.along)
    if opened is None and found.product:
        return None
    if opened is None:
        return Miss(
            node,
            f"the vectors it weighs lie along dimension 2 of {found.stack.name}",
            ("stack them along dimension 1: (batch, vectors, width)",),
        )
    stack, turned, pieces, stacking = opened
    readers = set(found.nodes) | set(turned)
    if set(stack.users) - readers and pieces == ((stack, 0),):
        stacking = ()
    tail, keeps = _tail(node, found.keeps)
    head = () if logits is None else (weights,)
    inner = [*stacking, *turned, *head, *found.nodes, *tail]
    # T may be needed elsewhere too; its parts exist anyway
    if not _only_inside(inner, [*stacking, *turned]):
        inner = [*head, *found.nodes, *tail]
    nodes = list(dict.fromkeys(inner))
    gate = weights if logits is None else logits
    chosen = tuple(range(sizes[1]))
    what = Found(stack, pieces, gate, wide, chosen, logits is not None, found.product, keeps)
    return unpaid("gated_sums", node, root) or Match(nodes, [nodes[-1]], what)


def _match_added(node: Node, root: nn.Module) -> Answer:
    """The same sum, one vector after the other."""
    found = terms_of(node)
    if found is None:
        return None
    terms, adds = found
    weights = terms[0].gate.source
    spec, given, count = spec_of(node), spec_of(weights), gates_of(weights)
    if spec is None or given is None or {spec_of(t.product) for t in terms} != {spec}:
        return None
    if not spec.dtype.is_floating_point or given.dtype != spec.dtype:
        return None
    terms = sorted(terms, key=lambda t: t.gate.index)
    places = [t.gate.index for t in terms]
    if len({*places}) < len(places):
        return None
    if len(places) != count:
        return Miss(
            node,
            f"it weighs {plural(len(places), 'vector')} by {count} gates of {weights.name}",
            ("add a term for each gate",),
        )
    sources = tuple(dict.fromkeys(t.vector.source for t in terms))
    if any(rank(source) not in (2, 3) for source in sources):
        return None
    chosen = tuple(places_of([t.vector for t in terms], sources).tolist())
    core = [*adds, *(t.product for t in terms)]
    inside = closed(core, [n for t in terms for n in t.picks])
    wide = 2 if len(given.shape) == 3 else None
    logits = _softmax(weights, wide, root, inside)
    gate = weights if logits is None else logits
    inside |= set() if logits is None else {weights}
    pieces: list[Piece] = []
    for source in sources:
        parts, stacking = pieces_of(source)
        pieces += parts
        inside |= {*stacking} if set(source.users) <= inside else set()
    nodes = [n for n in node.graph.nodes if n in inside]
    what = Found(None, tuple(pieces), gate, wide, chosen, logits is not None, False, None)
    return unpaid("gated_sums", node, root) or Match(nodes, [node], what)


class _Stack(NamedTuple):
    """A stack (B, E, D), the node that turned it, what it is stacked from, and by which nodes."""

    stack: Node
    turned: tuple[Node, ...]
    pieces: tuple[Piece, ...]
    stacking: tuple[Node, ...]


def _stack_of(stack: Node, along: int) -> _Stack | None:
    """The vectors ``along`` dimension 1 of ``stack``, or 2: then None where it is not known how
    they lie along the other.
    """
    if along != 2:
        return _Stack(stack, (), *pieces_of(stack))
    if is_call(stack, torch.stack) and argument(stack, 1, "dim", 0) in (2, -1):
        pieces = tuple((n, 0) for n in argument(stack, 0, "tensors"))
        return _Stack(stack, (), pieces, (stack,))
    if is_call(stack, torch.transpose):
        dims = {argument(stack, 1, "dim0"), argument(stack, 2, "dim1")}
        if dims in ({1, 2}, {-1, -2}):
            inner = argument(stack, 0, "input")
            return _Stack(inner, (stack,), *pieces_of(inner))
    return None


def _only_inside(inner: Sequence[Node], parts: Sequence[Node]) -> bool:
    """Whether only ``inner`` uses the values of ``parts``."""
    inside = set(inner)
    return all(set(n.users) <= inside for n in parts)


def _tail(node: Node, keeps: int | None) -> tuple[tuple[Node, ...], int | None]:
    """The node that drops the dimension of size 1 from the result, and whether that one remains."""
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
    gate = found.gate
    if found.wide is not None:
        gate = build.call(torch.squeeze, gate, found.wide)
    call = build.call(
        _OP,
        features(found.pieces, build), [gate], list(found.chosen),
        found.softmax, found.product,
        name="gated_sums",
    )  # fmt: skip
    out = build.item(call, 0)
    if found.keeps is None:
        return [out]
    return [build.call(torch.unsqueeze, out, found.keeps)]


def _describe(match: Match) -> str:
    found: Found = match.found
    softmax = "the softmax of " if found.softmax else ""
    return f"{len(found.chosen)} vectors under {softmax}a gate in one call"


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


ADDED = replace(
    GATED,
    equation="w[:, 0:1] * h_0 + w[:, 1:2] * h_1 .. => gated_sums(hs, w)",
    match=_match_added,
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

    The weights may come from anywhere; a softmax over the vectors is fused too when nothing else
    reads it. Gates over the same experts, none computed from another, then become one call.
    """

    name: ClassVar[str] = "fuse-gated-sums"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the gated sums of ``graph``; returns how many rewrites there were."""
        return apply(graph, [GATED, ADDED], context) + apply(graph, [MERGED], context)
