"""Values under an activated gate, as in SwiGLU and GEGLU: one call.

    silu(x) * v        gelu(x) * v        gelu(x, approximate="tanh") * v

in either order, as modules, functions or by hand. Only where both are of one shape.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .activations import GELU, SILU
from .chain_steps import Step, read_step
from .leaf import argument, bytes_of, differs, human, module_of, spec_of, unpaid

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_KINDS = ("silu", "gelu")


@dataclass(frozen=True, slots=True)
class Found:
    """``act(gate) * value``."""

    gate: Node
    value: Node
    activation: str


def _activated(node: Any, root: nn.Module) -> tuple[str, Any] | Miss | None:
    """``(activation, x)`` when ``node`` is the activation of x; it must not write to x."""
    if not isinstance(node, Node):
        return None
    step = read_step(node, root)
    if isinstance(step, Miss):
        return step if isinstance(module_of(node, root), (nn.SiLU, nn.GELU)) else None
    if step is not None:
        return (step.kind, step.source) if _plain(step) else None
    x = argument(node, 0, "input")
    module = module_of(node, root)
    if isinstance(module, nn.GELU):
        return differs(node, module, nn.GELU) or ("gelu_tanh", x)
    by_tanh = is_call(node, F.gelu) and argument(node, 1, "approximate") == "tanh"
    return ("gelu_tanh", x) if by_tanh else None


def _plain(step: Step) -> bool:
    return step.kind in _KINDS and not step.inplace


def _match(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, operator.mul) or len(node.args) != 2:
        return None
    given: Any = node.args
    for act, value in (given, given[::-1]):
        found = _activated(act, root)
        if isinstance(found, Miss):
            return found
        if found is None or not isinstance(value, Node) or value is act:
            continue
        activation, gate = found
        if sole_user(act) is not node or not _alike(gate, value):
            continue
        match = Match([act, node], [node], Found(gate, value, activation))
        return unpaid("gated_activation", node, root) or match
    return None


def _alike(gate: Any, value: Node) -> bool:
    one, two = spec_of(gate), spec_of(value)
    if one is None or two is None or one.shape != two.shape:
        return False
    return one.dtype == two.dtype and one.dtype.is_floating_point


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    target = torch.ops.recast.gated_activation.default
    return [build.call(target, found.gate, found.value, found.activation, name="gated")]


def _worth(match: Match) -> str:
    size = bytes_of(match.nodes[-1])
    saved = "1 launch" if size is None else f"1 launch, {human(6 * size)} of traffic a sample"
    small = match.found.activation != "gelu"
    return f"{saved}; small batches run torch's own calls" if small else saved


GATED = Rule(
    name="fuse-gated-activations",
    equation="act(x) * v => gated_activation(x, v, act)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda m: f"a value under the {m.found.activation.replace('_', ' by ')} of a gate",
    worth=_worth,
)


@dataclass(frozen=True)
class FuseGatedActivations:
    """act(x) * v => gated_activation(x, v, act)

    silu and gelu, exact or by tanh, by hand too; on a CPU only.
    """

    name: ClassVar[str] = "fuse-gated-activations"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the gated values of ``graph``; returns how often it fired, on activations too."""
        fired = apply(graph, [SILU, GELU], context)
        return fired + apply(graph, [GATED], context)
