"""Attention by silu instead of a softmax, as in HSTU, by hand: one call.

scores      Q @ K.transpose(-2, -1), bmm, or einsum("bnhd,bmhd->bhnm") and its like, times a
            constant or not, biases added or not
weights     silu(scores) / n, times masks; in any order
values      weights @ V, bmm, or einsum("bhnm,bmhd->bnhd")
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .attention_call import worth
from .chain_steps import Step, read_step
from .field_attention import einsum_operands, scores_of, sizes_of, unscaled, values_of
from .leaf import spec_of, unpaid

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_MOST = 256  # places
_LONGEST = 64  # elements of a head: with 128, torch's products train as fast (x0.92 to x1.11)


@dataclass(frozen=True, slots=True)
class Found:
    """``(factor · silu(scale · q kᵀ + biases) · masks) v``."""

    q: Node
    k: Node
    turned: bool  # k is given transposed
    v: Node
    places_first: bool  # q, k, v and the result are (B, N, H, d) instead of (B, H, N, d)
    scale: float
    factor: float
    biases: tuple[Node, ...]
    masks: tuple[Node, ...]


def _broadcasts(node: Any, scores: Node) -> bool:
    """Whether ``node`` has the scores' dtype or is bool, and is no wider than they are."""
    own, spec = spec_of(node), spec_of(scores)
    if own is None or spec is None or own.dtype not in (torch.bool, spec.dtype):
        return False
    pairs = zip(reversed(own.shape), reversed(spec.shape), strict=False)
    return len(own.shape) <= len(spec.shape) and all(a in (1, b) for a, b in pairs)


def _sum(node: Node) -> tuple[Node, tuple[Node, ...], list[Node]]:
    """``(scores, biases, nodes)`` of scores and what is added to them."""
    biases: tuple[Node, ...] = ()
    nodes: list[Node] = []
    while is_call(node, operator.add) and len(node.args) == 2:
        one, two = node.args
        if _are_scores(two) and not _are_scores(one):
            one, two = two, one
        spec = spec_of(two)
        if not isinstance(one, Node) or not isinstance(two, Node) or spec is None:
            break
        if not _broadcasts(two, node) or not spec.dtype.is_floating_point:
            break
        biases, nodes, node = (two, *biases), [*nodes, node], one
    return node, biases, nodes


def _are_scores(node: Any) -> bool:
    """Whether ``node`` is a product of queries and keys, scaled or with biases."""
    if not isinstance(node, Node):
        return False
    product, _, _ = unscaled(node)
    if is_call(product, operator.add):
        return any(_are_scores(a) for a in product.args)
    return scores_of(product) is not None or _places_first(product) is not None


def _places_first(node: Node) -> tuple[Node, Node] | None:
    return einsum_operands(node, "abcd,aecd->acbe")


def _weights(node: Node) -> tuple[Node, float, tuple[Node, ...], list[Node]]:
    """``(weights, factor, masks, nodes)``: what silu's result is multiplied by on its way."""
    factor = 1.0
    masks: tuple[Node, ...] = ()
    nodes: list[Node] = []
    while (user := sole_user(node)) is not None:
        if not is_call(user, operator.mul, operator.truediv) or len(user.args) != 2:
            break
        one, two = user.args
        other: Any = two if one is node else one
        quotient = user.target is operator.truediv
        if type(other) in (int, float) and other:
            if quotient and one is not node:
                break
            factor = factor / other if quotient else factor * other
        elif isinstance(other, Node) and not quotient and _broadcasts(other, node):
            masks = (*masks, other)
        else:
            break
        nodes.append(user)
        node = user
    return node, factor, masks, nodes


def _match(node: Node, root: nn.Module) -> Answer:
    step = read_step(node, root)
    if not isinstance(step, Step) or step.kind != "silu" or step.inplace:
        return None
    if not isinstance(step.source, Node):
        return None
    added, biases, adding = _sum(step.source)
    product, scale, scaling = unscaled(added)
    last_first = _places_first(product)
    if last_first is not None:
        q, k, turned, nodes = (*last_first, False, [product])
    elif (scores := scores_of(product)) is not None:
        q, k, turned, nodes = scores
    else:
        return None
    weights, factor, masks, factors = _weights(node)
    last = sole_user(weights)
    v = None if last is None else _read_values(last, weights, last_first is not None)
    if last is None or v is None:
        return None
    sizes = _sizes(q, k, v, turned, last_first is not None)
    if sizes is None:
        return None
    if max(sizes[:2]) > _MOST or max(sizes[2:]) > _LONGEST:
        return Miss(
            node,
            f"{sizes[0]} places look at {sizes[1]}, in heads of {max(sizes[2:])} elements",
            (f"nothing: above {_MOST} and {_LONGEST} torch's own products are as fast",),
        )
    inner = [*nodes, *scaling[::-1], *adding[::-1], node, *factors, last]
    found = Found(q, k, turned, v, last_first is not None, scale, factor, biases, masks)
    return unpaid("silu_attention", node, root) or Match(inner, [last], found)


def _read_values(node: Node, weights: Node, places_first: bool) -> Node | None:
    """V when ``node`` is weights V, laid out as the scores' operands are."""
    if not places_first:
        return values_of(node, weights)
    found = einsum_operands(node, "abcd,adbe->acbe")
    return None if found is None or found[0] is not weights else found[1]


def _sizes(
    q: Node, k: Node, v: Node, turned: bool, places_first: bool
) -> tuple[int, ...] | None:  # fmt: skip
    """The numbers of queries and keys, and the lengths of their vectors and of the values."""
    if not places_first:
        return sizes_of(q, k, v, turned)
    specs = [spec_of(t) for t in (q, k, v)]
    if any(s is None or len(s.shape) != 4 or s.dtype != specs[0].dtype for s in specs):  # type: ignore[union-attr]
        return None
    a, b, c = (s.shape for s in specs if s is not None)
    sizes = (a[1], b[1], a[3], c[3])
    known = all(isinstance(s, int) and s for s in sizes) and a[2] == b[2] == c[2]
    return sizes if known and a[0] == b[0] == c[0] else None  # type: ignore[return-value]


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    k = build.call(torch.transpose, found.k, -2, -1) if found.turned else found.k
    spec = spec_of(found.q)
    flat = spec is not None and len(spec.shape) == 3
    q, k, v = (_heads(t, flat, found.places_first, build) for t in (found.q, k, found.v))
    planes = []
    for function, nodes in ((operator.add, found.biases), (operator.mul, found.masks)):
        plane = None
        for node in nodes:
            plane = node if plane is None else build.call(function, plane, node)
        wide = plane is not None and flat and any(len(spec_of(n).shape) == 3 for n in nodes)  # type: ignore[union-attr]
        planes.append(build.call(torch.unsqueeze, plane, 1) if wide else plane)
    out = build.call(
        torch.ops.recast.silu_attention.default,
        q, k, v, found.scale, found.factor, *planes,
        name="silu_attention",
    )  # fmt: skip
    if found.places_first:
        return [build.call(torch.transpose, out, 1, 2)]
    return [build.call(torch.squeeze, out, 1) if flat else out]


def _heads(node: Node, flat: bool, places_first: bool, build: Build) -> Node:
    """``node`` as (B, H, N, d)."""
    if places_first:
        return build.call(torch.transpose, node, 1, 2)
    return build.call(torch.unsqueeze, node, 1) if flat else node


SILU_ATTENTION = Rule(
    name="fuse-silu-attention",
    equation="(silu(c Q K^t + bias) / n * mask) V => silu_attention(Q, K, V, c, 1 / n)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "attention by silu in one call",
    worth=worth,
)


@dataclass(frozen=True)
class FuseSiluAttention:
    """(silu(c Q K^t + bias) / n * mask) V => silu_attention(Q, K, V, c, 1 / n)

    In three or four dimensions, biases and masks of any shape that broadcasts; on a CPU only.
    """

    name: ClassVar[str] = "fuse-silu-attention"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the attentions by silu of ``graph``; returns their number."""
        return apply(graph, [SILU_ATTENTION], context)
