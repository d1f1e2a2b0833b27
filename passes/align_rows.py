"""Aligns the rows of matrices that only a chain of layers reads to 16 bytes, on a GPU.

An interaction of 27 vectors has 479 columns. The matrix product kernels for such rows take up to
four times as long as those for rows of 480, so the interaction leaves zeros behind each row, and
the first layer reads them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, items, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule, apply
from recast.runtime import aligned

from .leaf import argument, spec_of, tensor_at

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_DOT = torch.ops.recast.dot_interaction.default
_CAT = torch.ops.recast.embedding_cat.default
_MLP = torch.ops.recast.mlp.default
_FLAG = {_DOT: 5, _CAT: 12}  # the place of the flag among the arguments


def _matcher(everywhere: bool) -> Callable[[Node, nn.Module], Answer]:
    def match(node: Node, root: nn.Module) -> Answer:
        if not is_call(node, *_FLAG) or len(node.args) > _FLAG[node.target]:  # type: ignore[index]
            return None
        outputs = [node]
        if is_call(node, _CAT):
            outputs = [item for _, item in sorted(items(node), key=lambda found: found[0])]
            if not outputs or outputs[0].args[1] != 0:
                return None
        matrix = outputs[0]
        chain, spec = sole_user(matrix), spec_of(matrix)
        if chain is None or not is_call(chain, _MLP) or chain.args[3][0] != "linear":  # type: ignore[index]
            return None
        if argument(chain, 0, "input") is not matrix:
            return None
        weight = tensor_at(chain.args[1][0], root)  # type: ignore[index]
        if not everywhere and (weight is None or not weight.is_cuda):
            return None
        width = None if spec is None else spec.shape[1]
        # In 16 bits, which autocast may choose, 16 bytes hold twice as many columns.
        if not isinstance(width, int) or aligned.fits(width, torch.bfloat16):
            return None
        return Match([node, *(o for o in outputs if o is not node)], outputs, width)

    return match


def _rewrite(match: Match, build: Build) -> list[Node]:
    node = match.nodes[0]
    args = list(node.args)
    if is_call(node, _CAT):
        made = build.call(
            _CAT, *args, *[False] * (_FLAG[_CAT] - len(args)), True, name="embedding_cat"
        )
        return [build.item(made, item.args[1]) for item in match.outputs]  # type: ignore[arg-type]
    return [build.call(_DOT, *args, True, name="dot_interaction")]


def _describe(match: Match) -> str:
    return f"rows of {match.found} columns start at whole 16 bytes"


@cache
def align_rule(everywhere: bool) -> Rule:
    """The rule, for layers on a GPU only or for all."""
    return Rule(
        name="align-rows",
        equation="mlp(dot_interaction(ts, x)) => mlp(dot_interaction(ts, x, aligned=True))",
        match=_matcher(everywhere),
        rewrite=_rewrite,
        describe=_describe,
    )


@dataclass(frozen=True)
class AlignRows:
    """mlp(dot_interaction(ts, x)) => mlp(dot_interaction(ts, x, aligned=True))

    Also of joined lookups. Where one chain alone reads the matrix and begins with a Linear, and its
    width is no multiple of 8. Only for layers on a GPU, unless ``everywhere``.
    """

    name: ClassVar[str] = "align-rows"
    everywhere: bool = False

    def run(self, graph: Graph, context: Context) -> int:
        """Align the rows of matrices in ``graph``; returns their number."""
        return apply(graph, [align_rule(self.everywhere)], context)
