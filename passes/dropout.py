"""Dropout that is in no chain: after a relu in one pass over memory; alone with a faster mask.

On a CPU, torch draws a mask number by number, 10 ns each where MKL does not draw them; the kernel
of ``recast::mlp`` draws the same numbers in 1 ns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, sole_user
from recast.rewriter.order import declare_random
from recast.rewriter.rule import Answer, Build, Match, Rule, apply, resolve
from recast.runtime.layers.drawn_dropout import drawn_dropout

from .chain_steps import Step, read_step
from .leaf import Attr, Value, bytes_of, device_of, memory_written, plural, put, spec_of, unpaid

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


def _match(node: Node, root: nn.Module) -> Answer:
    relu = read_step(node, root)
    if not isinstance(relu, Step) or relu.kind != "relu" or relu.inplace:
        return None
    user = sole_user(node)
    drop = None if user is None else read_step(user, root)
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


# ---------------------------------------------------------------- alone


declare_random(drawn_dropout)


def _match_alone(node: Node, root: nn.Module) -> Answer:
    drop = read_step(node, root)
    if not isinstance(drop, Step) or drop.kind != "dropout" or drop.inplace:
        return None
    spec = spec_of(drop.source)
    (training,) = drop.training
    if device_of(root) != "cpu" or spec is None or not spec.dtype.is_floating_point:
        return None
    # A model for serving gains nothing. `mlp` keeps its input for backward, where torch does not.
    if not _on(training, root) or memory_written([node], root):
        return None
    return Match([node], [node], drop)


def _on(training: Value, root: nn.Module) -> bool:
    """Whether the flag is set while the model is optimised."""
    if isinstance(training, Attr):
        return bool(resolve(root, training.path))
    if isinstance(training, Node):
        return training.op == "get_attr" and bool(resolve(root, str(training.target)))
    return bool(training)


def _rewrite_alone(match: Match, build: Build) -> list[Node]:
    drop: Step = match.found
    (p,), (training,) = drop.numbers, drop.training
    given = (put(build, value) for value in (p, training))
    return [build.call(drawn_dropout, drop.source, *given, name="dropout")]


ALONE = Rule(
    name="draw-dropout",
    equation="dropout(x, p) => drawn_dropout(x, p)",
    match=_match_alone,
    rewrite=_rewrite_alone,
    describe=lambda match: "a mask drawn by our kernel",
    worth=lambda match: "9 ns a number in training, where MKL draws none",
)


@dataclass(frozen=True)
class FuseReluDropout:
    """dropout(relu(x), p) => relu_dropout(x, p)

    Only outside of chains, and only where the op says that it pays. p and training are read from
    the user's module at each call; a dropout with p = 0 stays, for p may change. On a CPU, the
    mask of a dropout alone is drawn faster where it is large; not if the model is in eval mode when
    it is optimised.
    """

    name: ClassVar[str] = "fuse-relu-dropout"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the dropouts of ``graph``; returns their number."""
        return apply(graph, [RELU_DROPOUT, ALONE], context)
