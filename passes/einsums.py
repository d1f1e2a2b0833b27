"""Einsums of three factors, one of which only scales the result: contracts the other two first.

einsum("bi,eij,bj->bei", x, W, y)           would write x W, (B, E, d, d), before it sums over j
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node
from recast.rewriter.rule import Answer, Build, Match, Rule, apply
from recast.runtime.interactions.scaled_einsum import scales

from .leaf import einsum_of, human, spec_of, unpaid

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True, slots=True)
class Found:
    """``scaled_einsum(scale, a, b, equation)``, and what torch would write instead."""

    operands: tuple[Node, Node, Node]
    equation: str
    written: str  # the dimensions of the first product


def _match(node: Node, root: nn.Module) -> Answer:
    given = einsum_of(node)
    if given is None or len(given.operands) != 3 or given.output is None:
        return None
    terms, output, operands = given.terms, given.output, given.operands
    specs = [spec_of(operand) for operand in operands]
    if len({None if s is None else s.dtype for s in specs} | {None}) != 2:
        return None
    if None in specs or any({*t} - {*string.ascii_letters} or len({*t}) < len(t) for t in terms):
        return None
    for k in (0, 1):  # torch begins with these two
        if scales(terms[k], terms[1 - k], terms[2], output) and {*terms[1 - k]} - {*output}:
            chosen: tuple[Any, Any, Any] = (operands[k], operands[1 - k], operands[2])
            found = Found(
                chosen,
                f"{terms[k]},{terms[1 - k]},{terms[2]}->{output}",
                "".join(dict.fromkeys(terms[0] + terms[1])),
            )
            return unpaid("scaled_einsum", node, root) or Match([node], [node], found)
    return None


def _rewrite(match: Match, build: Build) -> Sequence[Node]:
    found: Found = match.found
    op = torch.ops.recast.scaled_einsum.default
    return [build.call(op, *found.operands, found.equation, name="scaled_einsum")]


def _worth(match: Match) -> str | None:
    found: Found = match.found
    sizes: dict[str, int] = {}
    itemsize = 0
    for operand, term in zip(found.operands, found.equation.split("->")[0].split(","), strict=True):
        spec = spec_of(operand)
        size = None if spec is None else spec.at(1)
        if spec is None or size is None:
            return None
        sizes.update(zip(term, size, strict=True))
        itemsize = spec.dtype.itemsize
    count = torch.Size(sizes[letter] for letter in found.written).numel()
    return f"{human(2 * count * itemsize)} of traffic a sample"


SCALED = Rule(
    name="split-einsums",
    equation='einsum("bi,eij,bj->bei", x, W, y) => x * einsum("eij,bj->bei", W, y)',
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: f"an einsum of three, {match.found.equation}, scaled at its end",
    worth=_worth,
)


@dataclass(frozen=True)
class SplitEinsums:
    """einsum("bi,eij,bj->bei", x, W, y) => x * einsum("eij,bj->bei", W, y)

    Only where the first or second factor scales the result, since torch contracts from the left.
    """

    name: ClassVar[str] = "split-einsums"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the einsums of ``graph``; returns their number."""
        return apply(graph, [SCALED], context)
