"""Fuses chains of Linear, BatchNorm, activation and dropout into one call.

A chain is read from the graph step by step, along values with a single user, in whatever order the
model has its layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.errors import UsageError
from recast.rewriter.ir import Graph, Node, is_call, note, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .activations import GELU, SILU
from .chain_steps import Step, read_step
from .elementwise import ELEMENTWISE
from .leaf import (
    argument,
    device_of,
    module_of,
    plural,
    put,
    rank,
    tensor_at,
    unpaid,
)

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


def chain_at(node: Node, root: nn.Module, max_layers: int) -> list[Step]:
    """The longest chain that contains ``node``; empty when ``node`` is not a step."""
    first = read_step(node, root)
    if not isinstance(first, Step):
        return []
    while (before := _link(first.source, root)) is not None and _together(before, first):
        first = before
    for part in _parts(_forward(first, root), max_layers):
        if any(step.node is node for step in part):
            return part
    return []


def _link(node: Any, root: nn.Module) -> Step | None:
    """The step at ``node`` if its value has exactly one user."""
    if not isinstance(node, Node) or sole_user(node) is None:
        return None
    step = read_step(node, root)
    return step if isinstance(step, Step) else None


def _forward(step: Step, root: nn.Module) -> Iterable[Step]:
    while True:
        yield step
        user = sole_user(step.node)
        following = None if user is None else read_step(user, root)
        if not isinstance(following, Step) or following.source is not step.node:
            return
        if step.node in _others(following) or not _together(step, following):
            return
        step = following


def _together(step: Step, following: Step) -> bool:
    """Whether two steps compute in one region of autocast."""
    return note(step.node).autocast == note(following.node).autocast


def _others(step: Step) -> list[Any]:
    """The values that a step reads besides its input."""
    return [*step.params, *step.stats, *step.numbers, *step.training]


def _parts(steps: Iterable[Step], max_layers: int) -> list[list[Step]]:
    """Cut a run of steps where the op could not do what the model does.

    An in-place step writes to its input: harmless when the chain itself made that value, but not on
    the chain's input, which others may see. Dropout returns its input when not training, so it does
    not count as making a new value.
    """
    parts: list[list[Step]] = [[]]
    owned = False
    for step in steps:
        layers = sum(s.kind == "linear" for s in parts[-1])
        if step.inplace and not owned:
            parts.append([])
            continue
        if step.kind == "linear" and layers == max_layers:
            parts.append([])
        parts[-1].append(step)
        owned = owned or step.kind != "dropout"
    return parts


def _matcher(max_layers: int) -> Callable[[Node, nn.Module], Answer]:
    def match(node: Node, root: nn.Module) -> Answer:
        found = read_step(node, root)
        if not isinstance(found, Step):
            return found
        chain = chain_at(node, root, max_layers)
        if not chain or chain[0].node is not node:
            return None
        if not any(step.kind == "linear" for step in chain):
            if _norms_places(chain, root):
                return Match([s.node for s in chain], [chain[-1].node], chain)
            return _by_hand(chain[0].source, root)
        if len(chain) == 1:
            return _alone(node, root)
        match = Match([s.node for s in chain], [chain[-1].node], chain)
        return unpaid("mlp", node, root) or match

    return match


def _norms_places(chain: Sequence[Step], root: nn.Module) -> bool:
    """Whether a chain without a Linear pays: a batch norm of (N, C, L), on a CPU."""
    if not any(step.kind == "batch_norm" for step in chain) or device_of(root) != "cpu":
        return False
    return rank(chain[0].source) == 3


def _by_hand(node: Any, root: nn.Module) -> Miss | None:
    """Why ``x @ W + b`` is no Linear, where a chain could begin with one."""
    why = (
        "a product and a sum by hand join no chain: under autocast the sum is in fp32, which a"
        " Linear rounds"
    )
    if is_call(node, torch.addmm):
        weight: Any = argument(node, 2, "mat2")
        why = "an addmm cannot join a chain: its weight is transposed, and it may scale"
    elif is_call(node, operator.add):
        product = next((a for a in node.args if is_call(a, torch.matmul, torch.mm)), None)
        weight = None if product is None or len(product.args) != 2 else product.args[1]
    else:
        return None
    while is_call(weight, torch.transpose):
        weight = argument(weight, 0, "input")
    held = tensor_at(weight, root)
    if not isinstance(held, nn.Parameter) or held.dim() != 2:
        return None
    return Miss(node, why, ("F.linear(x, weight, bias), with a weight (out, in)", "nn.Linear"))


def _alone(node: Node, root: nn.Module) -> Miss | None:
    """Why a single Linear is not part of a chain, where the user could change that."""
    users = list(node.users)
    steps = [u for u in users if isinstance(read_step(u, root), Step)]
    if steps and any(is_call(u, torch.ops.recast.dice.default) for u in steps[0].users):
        return None  # it reads both by definition: nothing that a user could change
    if steps and len(users) > 1:
        others = ", ".join(u.name for u in users if u is not steps[0])
        why = f"{steps[0].name} could follow in one call, but {others} uses its value too"
        return Miss(node, why, ("use the value after the activation only",))
    follows = None if len(users) != 1 else module_of(users[0], root)
    if follows is not None and not steps:
        name = type(follows).__name__
        return Miss(
            node, f"a Linear alone gains nothing, and nn.{name} after it cannot join a chain"
        )
    return None


def _rewrite(match: Match, build: Build) -> list[Node]:
    chain: Sequence[Step] = match.found
    return [call(build, chain[0].source, chain, "mlp")]


def call(build: Build, source: Node, chain: Sequence[Step], name: str) -> Node:
    """The call of ``recast::mlp`` that applies the steps of ``chain`` to ``source``."""

    def flat(part: str) -> list[Any]:
        return [put(build, value) for step in chain for value in getattr(step, part)]

    return build.call(
        torch.ops.recast.mlp.default,
        source,
        flat("params"),
        flat("stats"),
        [step.kind for step in chain],
        flat("numbers"),
        flat("training"),
        name=name,
    )


def _describe(match: Match) -> str:
    chain: Sequence[Step] = match.found
    counts: dict[str, int] = {}
    for step in chain:
        counts[step.kind] = counts.get(step.kind, 0) + 1
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) + " in one call"


def _worth(match: Match) -> str:
    """The launches saved, and that small batches train on torch's own layers."""
    launches = plural(len(match.found) - 1, "launch")
    return f"{launches}; small batches train on torch's own layers"


@cache
def chain_rule(max_layers: int) -> Rule:
    """The rule for chains of at most ``max_layers`` Linear layers."""
    return Rule(
        name="fuse-mlp",
        equation="dropout(act(norm(linear(x)))) ... => mlp(x, params, steps)",
        match=_matcher(max_layers),
        rewrite=_rewrite,
        describe=_describe,
        worth=_worth,
    )


@dataclass(frozen=True)
class FuseMlp:
    """dropout(act(norm(linear(x)))) ... => mlp(x, params, steps)

    The longest chains of Linear, BatchNorm1d, activation and Dropout, in any order, as modules or
    as functions, with at least one Linear and one more step. A value that is also used elsewhere
    ends the chain. Activations by hand, as x * sigmoid(x), become torch's own first.
    On a CPU also a BatchNorm1d of (N, C, L) alone, and chains of logarithms, exponentials, bounds.
    """

    name: ClassVar[str] = "fuse-mlp"
    max_layers: int = 64

    def __post_init__(self) -> None:
        if self.max_layers < 1:
            raise UsageError(
                f"passes: fuse-mlp cannot have max-layers={self.max_layers}",
                why="a chain has at least one Linear",
                tries=("--without fuse-mlp, for none",),
            )

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the chains of ``graph``; returns how often it fired, on activations too."""
        fired = apply(graph, [SILU, GELU], context)
        fired += apply(graph, [chain_rule(self.max_layers)], context)
        return fired + apply(graph, [ELEMENTWISE], context)  # what the chains leave
