"""Second-order factorisation machine: the square of a sum minus the sum of squares.

S = sum(T, 1), Q = sum(T ** 2, 1)          T: (B, F, D), stacked or given; stacked (F, B, D), too
out = (S ** 2 - Q) * 0.5                   squares by pow, square or x * x
out = sum(out, 1)                          before or after the factor, or not at all
S = t_1 + t_2 .., Q = t_1 ** 2 + t_2 ** 2 .., of (B, D) each, is the same
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .leaf import argument, human, plural, rank, reduction_of, spec_of, unpaid
from .pair_parts import leaves
from .stacks import Piece, features, pieces_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


_FEWEST = 3  # vectors added one by one; of fewer, plain torch is as fast


@dataclass(frozen=True, slots=True)
class Found:
    """The parts of a factorisation machine."""

    stack: Node  # T, or the first of its vectors
    pieces: tuple[Piece, ...]
    scale: float
    reduce: bool


# ---------------------------------------------------------------- parts


def _square(node: Any) -> Node | None:
    """X when ``node`` is X², element by element."""
    if not isinstance(node, Node):
        return None
    if is_call(node, operator.mul) and node.args[0] is node.args[1]:
        return node.args[0] if isinstance(node.args[0], Node) else None
    if is_call(node, torch.square) or is_method(node, "square"):
        return argument(node, 0, "input")
    if is_call(node, torch.pow, operator.pow) or is_method(node, "pow"):
        return argument(node, 0, "input") if argument(node, 1, "exponent") == 2 else None
    return None


def _sum(node: Any) -> tuple[Node, int] | None:
    """``(x, dim)`` when ``node`` sums x over one dimension, counted from the front."""
    found = reduction_of(node, "sum")
    dims = None if found is None else rank(found.source)
    return (found.source, found.dim % dims) if found is not None and dims else None


def _scaled(node: Any) -> float | None:
    """The constant that ``node`` multiplies its input by."""
    if is_call(node, operator.mul):
        numbers = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        return float(numbers[0]) if len(numbers) == 1 else None
    if is_call(node, operator.truediv) and isinstance(node.args[1], (int, float)):
        return 1 / node.args[1] if isinstance(node.args[0], Node) and node.args[1] else None
    return None


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, operator.sub):
        return None
    squared, summed = _square(node.args[0]), _sum(node.args[1])
    first, second = _sum(squared), _square(summed[0]) if summed else None
    if squared is None or summed is None or first is None or second is None:
        return None
    (stack, dim), other = first, summed[1]
    spec = spec_of(stack)
    if stack is not second:
        return Miss(
            node,
            f"the sum is of {stack.name}, the squares are of {second.name}",
            ("sum and square the same tensor (a view of it counts as another)",),
        )
    first_of_all = (
        is_call(stack, torch.stack) and argument(stack, 1, "dim", 0) in (0, -3) and rank(node) == 2
    )
    if spec is None or len(spec.shape) != 3 or dim != other or dim != (0 if first_of_all else 1):
        return Miss(
            node,
            f"summed over dimension {dim} and {other} of {None if spec is None else spec.shape}",
            ("stack the feature vectors to (batch, features, dim) and sum over dimension 1",),
        )
    if spec_of(squared) != spec_of(node.args[1]):
        return Miss(node, "one of the two sums keeps the dimension that it sums over")
    if not spec.dtype.is_floating_point:
        return None
    tail, scale, reduce = _tail(node)
    inner: list[Any] = [squared, node.args[0], summed[0], node.args[1], node, *tail]
    stack_nodes: tuple[Node, ...]
    elsewhere = set(stack.users) - {squared, summed[0]}  # T is needed anyway
    if first_of_all:
        vectors = argument(stack, 0, "tensors")
        pieces, stack_nodes = tuple((v, 0) for v in vectors), () if elsewhere else (stack,)
        stack = vectors[0]
    else:
        pieces, stack_nodes = (((stack, 0),), ()) if elsewhere else pieces_of(stack)
    nodes = list(dict.fromkeys([*stack_nodes, *inner]))
    match = Match(nodes, [nodes[-1]], Found(stack, pieces, scale, reduce))
    return unpaid("fm_interaction", node, root) or match


def _match_listed(node: Node, root: nn.Module) -> Answer:
    """``(v_1 + v_2 ..)² - (v_1² + v_2² ..)``, as a loop or Python's sum writes it."""
    if not is_call(node, operator.sub) or len(node.args) != 2:
        return None
    squared, summed = node.args
    first = _square(squared)
    if not is_call(first, operator.add) or not is_call(summed, operator.add):
        return None
    vectors, adds = leaves(first)
    squares, others = leaves(summed)
    of = [_square(square) for square in squares]
    specs = {spec_of(v) for v in vectors}
    if len(specs) != 1 or len(vectors) < _FEWEST or len({*vectors}) != len(vectors):
        return None
    spec = specs.pop()
    if {*of} != {*vectors} or len(of) != len(vectors) or spec is None or len(spec.shape) != 2:
        return None
    if not spec.dtype.is_floating_point or spec_of(node) != spec:
        return None
    assert isinstance(squared, Node)
    tail, scale, reduce = _tail(node)
    inside = {*adds, *others, *squares, squared, node, *tail}
    nodes = [n for n in node.graph.nodes if n in inside]
    found = Found(vectors[0], tuple((v, 0) for v in vectors), scale, reduce)
    match = Match(nodes, [tail[-1] if tail else node], found)
    return unpaid("fm_interaction", node, root) or match


def _tail(node: Node) -> tuple[list[Node], float, bool]:
    """``(nodes, factor, summed)``: the factor and the sum over D that follow the difference."""
    nodes: list[Node] = []
    scale, reduce = 1.0, False
    while (user := sole_user(nodes[-1] if nodes else node)) is not None:
        factor, over = _scaled(user), _sum(user)
        before = spec_of(over[0]) if over else None
        if factor is not None:
            scale *= factor
        elif over and before and not reduce and over[1] == len(before.shape) - 1:
            reduce = True
        else:
            break
        nodes.append(user)
    return nodes, scale, reduce


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    out = build.call(
        torch.ops.recast.fm_interaction.default,
        features(found.pieces, build), found.scale, found.reduce,
        name="fm_interaction",
    )  # fmt: skip
    spec = spec_of(match.outputs[0])
    assert spec is not None
    dims = len(spec.shape)
    if dims == 1:
        out = build.call(torch.squeeze, out, 1)
    return [build.call(torch.unsqueeze, out, 1) if dims == 3 else out]


def _size(found: Found) -> tuple[int, ...] | None:
    """(1, F, D) of the vectors, where known."""
    spec = spec_of(found.stack)
    size = spec.at(1) if spec is not None else None
    if size is None or len(size) == 3:
        return size
    return (size[0], len(found.pieces), size[1])


def _describe(match: Match) -> str:
    found: Found = match.found
    size = _size(found)
    count = f"{size[1]} vectors" if size is not None else "vectors"
    return f"factorisation machine of {count}{', summed,' if found.reduce else ''} in one call"


def _worth(match: Match) -> str:
    found: Found = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    spec, size = spec_of(found.stack), _size(found)
    if spec is None or size is None:
        return launches
    _, count, width = size
    stacked = count * width if len(found.pieces) > 1 else 0
    saved = 2 * (count * width + stacked) * spec.dtype.itemsize  # the squares; the stack
    return f"{launches}, {human(saved)} of traffic a sample"


FM: Rule = Rule(
    name="fuse-fm-interaction",
    equation="c (sum(T, 1)^2 - sum(T^2, 1)), T = stack(ts) => fm_interaction(ts, c)",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


LISTED: Rule = Rule(
    name="fuse-fm-interaction",
    equation="c ((t_1 + t_2 ..)^2 - (t_1^2 + t_2^2 ..)) => fm_interaction(ts, c)",
    match=_match_listed,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


@dataclass(frozen=True)
class FuseFmInteraction:
    """c (sum(T, 1)^2 - sum(T^2, 1)), T = stack(ts) => fm_interaction(ts, c)

    With or without the sum over D; the constant factor is fused when it follows immediately.
    """

    name: ClassVar[str] = "fuse-fm-interaction"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the factorisation machines of ``graph``; returns their number."""
        return apply(graph, [FM, LISTED], context)
