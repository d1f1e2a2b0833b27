"""Dropout after a relu that is in no chain: one pass over memory for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule, apply

from .leaf import bytes_of, plural, put, unpaid
from .mlp import Step, read

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


def _match(node: Node, root: nn.Module) -> Answer:
    relu = read(node, root)
    if not isinstance(relu, Step) or relu.kind != "relu" or relu.inplace:
        return None
    user = sole_user(node)
    drop = None if user is None else read(user, root)
    if not isinstance(drop, Step) or drop.kind != "dropout" or drop.source is not node:
        return None
    match = Match([node, drop.node], [drop.node], (relu, drop))
    return unpaid("relu_dropout", node, root) or match


def _rewrite(match: Match, build: Build) -> list[Node]:
    relu, drop = match.found
    (p,), (training,) = drop.numbers, drop.training
    return [
        build.call(
            torch.ops.recast.relu_dropout.default,
            relu.source, put(build, p), put(build, training),
            name="relu_dropout",
        )
    ]  # fmt: skip


def _worth(match: Match) -> str:
    size = bytes_of(match.nodes[0])
    return plural(1, "launch") if size is None else f"1 launch, {2 * size} B of traffic a sample"


RELU_DROPOUT = Rule(
    name="fuse-relu-dropout",
    equation="dropout(relu(x), p) => relu_dropout(x, p)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "relu and dropout in one call",
    worth=_worth,
)


@dataclass(frozen=True)
class FuseReluDropout:
    """dropout(relu(x), p) => relu_dropout(x, p)

    Only outside of chains, and only where the op says that it pays. p and training are read from
    the user's module at each call; a dropout with p = 0 stays, for p may change.
    """

    name: ClassVar[str] = "fuse-relu-dropout"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the pairs of ``graph``; returns their number."""
        return apply(graph, [RELU_DROPOUT], context)
