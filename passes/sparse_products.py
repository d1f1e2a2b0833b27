"""Products with a sparse matrix that the model holds, as graph recommenders propagate rows.

torch.sparse.mm(A, x), A @ x   =>   sparse_mm(A, x)        A: a constant in COO, on a CPU
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, is_method
from recast.rewriter.rule import Answer, Match, Miss, Rule, apply
from recast.runtime.layers.sparse_mm import DTYPES, sparse_mm

from .leaf import device_of, memory_written, spec_of, tensor_at

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_PRODUCTS = (torch.sparse.mm, torch.mm, torch.matmul, torch.spmm, operator.matmul)


def _match(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, *_PRODUCTS) and not any(is_method(node, n) for n in ("mm", "matmul")):
        return None
    if len(node.args) != 2 or node.kwargs:
        return None
    left, x = node.args
    matrix, spec = tensor_at(left, root), spec_of(x)
    if matrix is None or not isinstance(left, Node) or matrix.layout is torch.strided:
        return None
    if device_of(root) != "cpu" or matrix.dim() != 2 or spec is None or len(spec.shape) != 2:
        return None
    if matrix.requires_grad:
        return Miss(node, "its sparse matrix is trained")
    if matrix.layout is not torch.sparse_coo:
        return Miss(
            node,
            f"torch's product is kept for a matrix in {matrix.layout}",
            ("the matrix in COO: matrix.to_sparse_coo()",),
        )
    if matrix.dtype is not spec.dtype or matrix.dtype not in DTYPES or memory_written([left], root):
        return None
    return Match([node], [node], (left, x))


SPARSE = Rule(
    name="multiply-sparse",
    equation="torch.sparse.mm(A, x) => sparse_mm(A, x), A held by the model",
    match=_match,
    rewrite=lambda match, build: [build.call(sparse_mm, *match.found, name="sparse_mm")],
    describe=lambda match: "a product with a sparse matrix as bags of its rows",
    worth=lambda match: "four fifths of its time on a CPU",
)


@dataclass(frozen=True)
class MultiplySparse:
    """torch.sparse.mm(A, x) => sparse_mm(A, x)

    A stays the model's own: its values are read at each call, and the order of its entries is made
    anew when its indices change.
    """

    name: ClassVar[str] = "multiply-sparse"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the products of ``graph``; returns their number."""
        return apply(graph, [SPARSE], context)


__all__ = ["SPARSE", "MultiplySparse"]
