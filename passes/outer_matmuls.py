"""Outer products that are multiplied or summed right away.

    (x0 xᵀ) W  =  x0 (xᵀ W)         as in cross networks that follow their formula to the letter:
                                    by bmm, matmul, broadcasting or einsum; W by matmul or a Linear
                                    layer, whose bias is added at the end
    sum(x0 xᵀ, 0)  =  X0ᵀ X         as in the loss of ENMF, of whole tables: bmm, matmul, einsum

x0 (B, N), x (B, M), W (M, O): the outer product has N numbers for each of x, 256 of 256 features.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule
from recast.runtime.layers.as_product import as_product

from .leaf import (
    Attr,
    Value,
    argument,
    bytes_of,
    einsum_of,
    human,
    linear_of,
    put,
    rank,
    reduction_of,
    spec_of,
    tensor_at,
)


@dataclass(frozen=True, slots=True)
class Outer:
    """``left`` (B, N) or (B, N, 1) times ``right`` (B, M) or (B, 1, M), and what computes it."""

    left: Node
    right: Node
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """``(left rightᵀ) W + bias``, without the last dimension if the model drops it."""

    outer: Outer
    weight: Value
    linear: bool  # the weight is (O, M), as a Linear layer has it; else (M, O) or (M,)
    bias: Value
    drops: bool


def _outer(node: Any) -> Outer | None:
    """The vectors of which ``node`` (B, N, M) is the outer product."""
    spec = spec_of(node)
    if spec is None or len(spec.shape) != 3 or not all(_many(n) for n in spec.shape[1:]):
        return None
    if is_call(node, torch.bmm, torch.matmul, operator.matmul) and len(node.args) == 2:
        return _of(node, *node.args)
    if is_call(node, operator.mul):
        return _of(node, *node.args) or _of(node, *node.args[::-1])
    found = einsum_of(node)
    if found is None or len(found.operands) != 2 or [len(t) for t in found.terms] != [2, 2]:
        return None
    (a, b), (left, right) = found.terms, found.operands
    if a[0] != b[0] or len({*a, *b}) != 3 or found.output not in (a + b[1], b + a[1]):
        return None
    if found.output != a + b[1]:
        left, right = right, left
    return Outer(left, right, (node,))


def _many(size: Any) -> bool:
    return isinstance(size, int) and size > 1


def _of(node: Node, left: Any, right: Any) -> Outer | None:
    spec, a, b = spec_of(node), spec_of(left), spec_of(right)
    if spec is None or a is None or b is None or a.dtype != b.dtype:
        return None
    batch, n, m = spec.shape
    if a.shape != (batch, n, 1) or b.shape != (batch, 1, m):
        return None
    x0, x = _bare(left, 2), _bare(right, 1)
    own = [side for side, bare in ((left, x0), (right, x)) if side is not bare]
    return Outer(x0, x, (node, *(side for side in own if sole_user(side) is node)))


def _bare(node: Node, dim: int) -> Node:
    """The vector that ``node`` puts a dimension into; ``node`` if it was there before."""
    inserted = is_call(node, torch.unsqueeze) and argument(node, 1, "dim") % 3 == dim
    return argument(node, 0, "input") if inserted else node


def _match(node: Node, root: nn.Module) -> Answer:
    read = _weighed(node, root)
    if read is None:
        return None
    given, weight, linear, bias = read
    outer = _outer(given) if sole_user(given) is node else None
    if outer is None:
        return None
    drop = sole_user(node)
    spec = spec_of(node)
    drops = (
        is_call(drop, torch.squeeze)
        and spec is not None
        and spec.shape[2:] == (1,)
        and argument(drop, 1, "dim") in (2, -1)
    )
    nodes = [*outer.nodes[::-1], node, *([drop] if drops and drop is not None else [])]
    return Match(nodes, [nodes[-1]], Found(outer, weight, linear, bias, drops))


def _weighed(node: Node, root: nn.Module) -> tuple[Node, Value, bool, Value] | None:
    """``(x, weight, whether it is a Linear layer's, bias)`` of a product with one matrix."""
    linear = linear_of(node, root)
    if linear is not None:
        x, weight, bias, miss = linear
        held = isinstance(weight, Attr) or tensor_at(weight, root) is not None
        return (x, weight, True, bias) if held and miss is None else None
    if not is_call(node, torch.matmul, operator.matmul) or len(node.args) != 2:
        return None
    x, weight = node.args
    matrix = tensor_at(weight, root)
    known = isinstance(x, Node) and matrix is not None and matrix.dim() in (1, 2)
    return (x, weight, False, None) if known else None  # type: ignore[return-value]


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    left, right = _rows(found.outer, build)
    weight = put(build, found.weight)
    product = F.linear if found.linear else torch.matmul
    inner = build.call(product, right, weight)  # (B, O), or (B,) of a vector
    last = spec_of(match.outputs[0])
    flat = found.drops or (last is not None and len(last.shape) == 2)
    if not flat:
        left, inner = build.call(torch.unsqueeze, left, 2), build.call(torch.unsqueeze, inner, 1)
    elif not found.drops:
        inner = build.call(torch.unsqueeze, inner, 1)
    out = build.call(operator.mul, left, inner)
    if found.bias is not None:
        out = build.call(operator.add, out, put(build, found.bias))
    return [build.call(as_product, out)]


def _match_sum(node: Node, root: nn.Module) -> Answer:
    found = reduction_of(node, "sum")
    if found is None or found.keepdim or found.dim not in (0, -3):
        return None
    if sole_user(found.source) is not node or is_call(found.source, operator.mul):
        return None  # a sum of products is not cast by autocast, a product is
    outer = _outer(found.source)
    return None if outer is None else Match([*outer.nodes[::-1], node], [node], outer)


def _rewrite_sum(match: Match, build: Build) -> list[Node]:
    left, right = _rows(match.found, build)
    return [build.call(torch.matmul, build.call(torch.transpose, left, 0, 1), right)]


def _rows(outer: Outer, build: Build) -> tuple[Node, Node]:
    """The factors of an outer product as (B, N) and (B, M)."""
    left, right = outer.left, outer.right
    left = build.call(torch.squeeze, left, 2) if rank(left) == 3 else left
    right = build.call(torch.squeeze, right, 1) if rank(right) == 3 else right
    return left, right


def _worth(match: Match) -> str | None:
    size = bytes_of(match.found.outer.nodes[0])
    return None if size is None else f"{human(4 * size)} of traffic a sample"


OUTER = Rule(
    name="contract-outer-products",
    equation="(x0 xᵀ) W + b => x0 (xᵀ W) + b",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "a matrix times an outer product, which is not written",
    worth=_worth,
)

SUMMED = Rule(
    name="contract-outer-products",
    equation="sum(x0 xᵀ, 0) => X0ᵀ X",
    match=_match_sum,
    rewrite=_rewrite_sum,
    describe=lambda match: "a sum of outer products as one product",
    worth=lambda match: "a matrix for each row, which is not written",
)
