"""Write your own rule: x · sigmoid(x)  ⟹  silu(x), one call where there were two."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import recast
from recast.rewriter import ir, rule
from recast.rewriter.pipeline import Context


def match(node: fx.Node, root: nn.Module) -> rule.Answer:
    """Not mine (None), nearly (Miss, with the reason), or mine (Match)."""
    if not ir.is_call(node, torch.sigmoid):
        return None
    product = ir.sole_user(node)
    if product is None:
        return rule.Miss(node, "its value is used more than once")
    x = node.args[0]
    if not ir.is_call(product, operator.mul) or x not in product.args:
        return None
    return rule.Match(nodes=[node, product], outputs=[product], found=x)


def rewrite(match: rule.Match, build: rule.Build) -> list[fx.Node]:
    """One node for each output of the match."""
    return [build.call(F.silu, match.found)]


SILU = rule.Rule("silu", "x · sigmoid(x)  ⟹  silu(x)", match, rewrite)


@dataclass(frozen=True)
class FuseSilu:
    name: str = "fuse-silu"

    def run(self, graph: fx.Graph, context: Context) -> int:
        return rule.apply(graph, [SILU], context)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


example = (torch.randn(8, 4),)
fast = recast.optimize(Gate(), example=example, passes=[FuseSilu()])
print(fast)
assert fast.report.to_dict()["fired"] == {"silu": 1}
recast.diff(Gate(), fast, example).check()
