"""Dice: a parametric relu whose slope is blended in by a gate.

p = sigmoid(z)                              z: a norm of x, or x itself
p * x + (1 - p) * alpha * x                 products in any order and association
x * (p + alpha * (1 - p))

For x (B, L, C), models transpose to (B, C, L) for the batch norm, and back. A norm over the B L
rows has the same statistics without a transpose.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .chain_steps import Step, read_step
from .leaf import argument, bytes_of, human, module_of, plural, spec_of, unpaid
from .mlp import call

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True, slots=True)
class Found:
    """Everything a Dice is made of."""

    x: Node
    gate: Node  # z
    alpha: Node
    turned: Node | None  # what x is the transpose of, when the Dice is computed over rows
    norm: Step | None  # the batch norm, where it is too


# ---------------------------------------------------------------- parts


def _factors(node: Any, within: set[Node]) -> list[Any]:
    """The factors of a product; the nodes that multiply them are added to ``within``."""
    if not is_call(node, operator.mul):
        return [node]
    within.add(node)
    return [f for side in node.args for f in _factors(side, within)]


def _rest(node: Any) -> Node | None:
    """p when ``node`` is 1 - p."""
    if is_call(node, operator.sub) and node.args[0] in (1, 1.0):
        return node.args[1] if isinstance(node.args[1], Node) else None
    if is_call(node, torch.rsub) and node.args[1:] in ((1,), (1.0,)):
        return node.args[0] if isinstance(node.args[0], Node) else None
    return None


def _gate(p: Any) -> Node | None:
    """z when ``p`` is sigmoid(z)."""
    if is_call(p, torch.sigmoid) or is_method(p, "sigmoid"):
        source = argument(p, 0, "input")
        return source if isinstance(source, Node) else None
    return None


@dataclass(frozen=True, slots=True)
class _Parts:
    x: Node
    p: Node
    alpha: Node
    nodes: tuple[Node, ...]


def _split(terms: list[list[Any]], within: set[Node]) -> tuple[Node, Node, list[Any]] | None:
    """``(p, rest, others)`` of the sum of a product with p and one with 1 - p."""
    for one, other in (terms, terms[::-1]):
        for factor in other:
            p = _rest(factor)
            if p is None or p not in one or _gate(p) is None:
                continue
            left = [f for f in one if f is not p], [f for f in other if f is not factor]
            if len(left[0]) + 1 == len(one) and len(left[1]) + 1 == len(other):
                within.update((p, factor))
                return p, factor, [*left[0], "|", *left[1]]
    return None


def _parts(node: Node) -> _Parts | None:
    """The parts of a Dice that ends in ``node``."""
    within: set[Node] = {node}
    if is_call(node, operator.add) and len(node.args) == 2:
        found = _split([_factors(side, within) for side in node.args], within)
        if found is None:
            return None
        p, _, others = found
        cut = others.index("|")
        first, second = others[:cut], others[cut + 1 :]
        if len(first) != 1 or len(second) != 2 or first[0] not in second:
            return None
        x = first[0]
        alpha = second[1] if second[0] is x else second[0]
    elif is_call(node, operator.mul):
        sides = [s for s in node.args if is_call(s, operator.add)]
        if len(sides) != 1:
            return None
        (inner,) = sides
        x = node.args[1] if node.args[0] is inner else node.args[0]
        within.add(inner)
        found = _split([_factors(side, within) for side in inner.args], within)
        if found is None or found[2][:1] != ["|"] or len(found[2]) != 2:
            return None
        p, alpha = found[0], found[2][1]
    else:
        return None
    if not all(isinstance(n, Node) for n in (x, p, alpha)):
        return None
    return _Parts(x, p, alpha, tuple(within))


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    parts = _parts(node)
    if parts is None:
        return None
    gate = _gate(parts.p)
    x, a, z = spec_of(parts.x), spec_of(parts.alpha), spec_of(gate)
    if gate is None or x is None or a is None or z is None or x.shape != z.shape:
        return None
    if not x.dtype.is_floating_point or len({x.dtype, a.dtype, z.dtype}) != 1:
        return None
    refused = unpaid("dice", node, root)
    if a.shape in ((1,), x.shape[-1:]) and len(x.shape) > 1:
        found = Found(parts.x, gate, parts.alpha, None, None)
        return refused or Match(parts.nodes, [node], found)
    if len(x.shape) != 3 or a.shape != (x.shape[1], 1):
        return Miss(
            node,
            f"its alpha has shape {a.shape} and its input {x.shape}",
            ("an alpha of one number, or one for each column",),
        )
    return refused or _turned(node, parts, gate, root)


def _turned(node: Node, parts: _Parts, gate: Node, root: nn.Module) -> Answer:
    """A Dice of x (B, L, C) that is transposed to (B, C, L) before it and back after it."""
    back = sole_user(node)
    source = _transposed(parts.x)
    if source is None or back is None or _transposed(back) is not node:
        return Miss(
            node,
            "it is applied to (batch, columns, length), and not transposed back right after it",
            ("apply it to (batch, length, columns), with an alpha for each column",),
        )
    module = module_of(gate, root)
    if not isinstance(module, nn.BatchNorm1d) or argument(gate, 0, "input") is not parts.x:
        return Miss(node, "its gate is no nn.BatchNorm1d of its input", ("use nn.BatchNorm1d",))
    norm = read_step(gate, root)
    if not isinstance(norm, Step):
        return norm
    spec = spec_of(source)
    if spec is None or not isinstance(spec.shape[1], int):
        return Miss(node, "the length of its input changes from batch to batch")
    nodes = [parts.x, gate, *parts.nodes, back]
    return Match(nodes, [back], Found(parts.x, gate, parts.alpha, source, norm))


def _transposed(node: Any) -> Node | None:
    """X when ``node`` is X with its last two dimensions exchanged."""
    if not is_call(node, torch.transpose):
        return None
    dims = {argument(node, 1, "dim0"), argument(node, 2, "dim1")}
    return argument(node, 0, "input") if dims in ({1, 2}, {-1, -2}) else None


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    op = torch.ops.recast.dice.default
    if found.turned is None or found.norm is None:
        return [build.call(op, found.x, found.gate, found.alpha, name="dice")]
    spec = spec_of(found.turned)
    assert spec is not None
    rows = build.call(torch.flatten, found.turned, 0, 1)
    norm = call(build, rows, [found.norm], "norm")
    alpha = build.call(torch.flatten, found.alpha)
    out = build.call(op, rows, norm, alpha, name="dice")
    return [build.call(torch.unflatten, out, 0, (-1, spec.shape[1]))]


def _worth(match: Match) -> str:
    found: Found = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    size = bytes_of(found.x)
    return launches if size is None else f"{launches}, {human(12 * size)} a sample"


DICE = Rule(
    name="fuse-dice",
    equation="p x + (1 - p) alpha x, p = sigmoid(z) => dice(x, z, alpha)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: (
        "Dice in one call" + (", over rows" if match.found.turned is not None else "")
    ),
    worth=_worth,
)


@dataclass(frozen=True)
class FuseDice:
    """p x + (1 - p) alpha x, p = sigmoid(z) => dice(x, z, alpha)

    alpha is one number, or one per column. A batch norm over (B, C, L) becomes one over rows.
    """

    name: ClassVar[str] = "fuse-dice"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse every Dice of ``graph``; returns their number."""
        return apply(graph, [DICE], context)
