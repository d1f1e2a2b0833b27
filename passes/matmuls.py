"""Products with a stack of matrices, one per vector: bilinear fields, experts.

matmul(x, W)       x: (B, F, m, D), W: (F, D, E); F or W's first size may be 1
matmul(W, x)       x: (B, F, D, m), W: (F, E, D)

torch writes out W once per sample, and its gradient too, before it sums that over the batch. As an
einsum, the samples are the rows of F products: 2048 samples of 120 vectors of 16 take 1/25 of the
time. Where each sample has many vectors per matrix, copying these costs more than copying W: 16
vectors and matrices of 16 by 1 to 8 take 1.3 to 1.8 times as long. The result of the einsum lies
field by field, so it is copied into the layout that a product has: a later product per sample would
otherwise be done by torch one by one, each with a copy.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import nn

from recast.rewriter.ir import Node, Spec, is_call
from recast.rewriter.rule import Answer, Build, Match, Rule

from .leaf import human, spec_of, tensor_at

_ROWS, _COLUMNS = "bfmd,fde->bfme", "fed,bfdm->bfem"
MOST_VECTORS = 4  # m, per matrix: 4 take 1/1.3 to 1/1.6 of the time, 8 take 1/1.1 to 1/0.7


@dataclass(frozen=True, slots=True)
class Found:
    """``einsum(equation, a, b)``, and how many elements of W torch would write a sample."""

    equation: str
    a: Node
    b: Node
    written: int
    itemsize: int


def _sizes(node: Node, root: nn.Module) -> Spec | None:
    """The sizes of ``node``, as far as they are known; of a parameter too."""
    held = tensor_at(node, root)
    return spec_of(node) if held is None else Spec(held.dtype, tuple(held.shape))


def _match(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, torch.matmul, operator.matmul) or len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    specs = _sizes(a, root), _sizes(b, root)
    for equation, x, w, at in ((_ROWS, *specs, 2), (_COLUMNS, *specs[::-1], 3)):
        if x is None or w is None or (len(x.shape), len(w.shape)) != (4, 3):
            continue
        vectors = x.shape[at]
        few = isinstance(vectors, int) and vectors <= MOST_VECTORS
        if not few and x.shape[1] != 1:  # of one field there is no copy for each matrix
            continue
        sizes = [size for size in w.shape if isinstance(size, int)]
        if len(sizes) != 3 or isinstance(x.shape[0], int) or not isinstance(x.shape[1], int):
            continue  # the stack has to be the same for all samples
        written = torch.Size(sizes).numel() // sizes[0] * max(sizes[0], x.shape[1])
        return Match([node], [node], Found(equation, a, b, written, w.dtype.itemsize))
    return None


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    product = build.call(torch.einsum, found.equation, found.a, found.b)
    return [build.call(torch.ops.aten.contiguous.default, product)]


def _worth(match: Match) -> str:
    found: Found = match.found
    return f"{human(4 * found.written * found.itemsize)} of traffic a sample"


STACKED: Rule = Rule(
    name="contract-matmuls",
    equation='matmul(x, W) => einsum("bfmd,fde->bfme", x, W)',
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "a product with a stack of matrices, without a copy of it a sample",
    worth=_worth,
)
