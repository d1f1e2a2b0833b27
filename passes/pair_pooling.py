"""Products of pairs that are weighted and summed, as by attention: sum(w * products, 1).

The products themselves are needed for the layers that compute the weights. The weighted sum reads
the vectors again instead, which take a tenth of the memory, and so does its gradient.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule

from .leaf import argument, bytes_of, extra, human, plural, spec_of


@dataclass(frozen=True, slots=True)
class Found:
    """``call``: the products (B, P, D); ``weight``: (B, P, 1)."""

    call: Node
    weight: Node
    keepdim: bool


def _match(node: Node, root: nn.Module) -> Answer:
    if not (is_call(node, torch.sum) or is_method(node, "sum")):
        return None
    if extra(node, 3, "input", "dim", "axis", "keepdim"):
        return None
    product: Any = argument(node, 0, "input")
    dim = argument(node, 1, "dim", node.kwargs.get("axis"))
    keep = argument(node, 2, "keepdim", False)
    if not is_call(product, operator.mul) or sole_user(product) is not node:
        return None
    if dim not in (1, -2, (1,), [1]) or not isinstance(keep, bool):
        return None
    operands: tuple[Any, ...] = product.args
    for call, weight in (operands, operands[::-1]):
        if _whole(call) and isinstance(weight, Node) and _fits(weight, call):
            return Match([product, node], [node], Found(call, weight, keep))
    return None


def _whole(node: Any) -> bool:
    """Whether ``node`` gives products of pairs that are neither weighted nor summed."""
    if not is_call(node, torch.ops.recast.pair_products.default):
        return False
    return node.args[4] is None and node.args[5] == "none"


def _fits(weight: Node, call: Any) -> bool:
    """Whether ``weight`` has one number a pair, of the dtype of the products."""
    a, b = spec_of(weight), spec_of(call)
    if a is None or b is None or a.dtype != b.dtype:
        return False
    return a.shape == (*b.shape[:2], 1)


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    left, right, li, lj = found.call.args[:4]
    weight = build.call(torch.squeeze, found.weight, 2)
    out = build.call(
        torch.ops.recast.pair_products.default,
        left, right, li, lj, weight, "pairs",
        name="pair_products",
    )  # fmt: skip
    return [build.call(torch.unsqueeze, out, 1) if found.keepdim else out]


def _worth(match: Match) -> str:
    size = bytes_of(match.nodes[0])
    return (
        plural(1, "launch") if size is None else f"1 launch, {human(2 * size)} of traffic a sample"
    )


POOLED = Rule(
    name="pool-pair-products",
    equation="sum(w * pair_products(x), 1) => pair_products(x, w, sum over pairs)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "products of pairs, weighed and summed in one call",
    worth=_worth,
)
