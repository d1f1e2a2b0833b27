"""Inputs to which ids may be added without effect.

A recorded step reads ids from memory of one size, whatever their number. Bags that are cut by
offsets with an end do not see what stands behind it; that holds for our kernels on a GPU, not for
torch's own lookup, whose last bag takes it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recast.rewriter.ir import Graph, Node
from recast.runtime.gpu import gpu

from .leaf import tensor_at

_LOOKUPS = (
    torch.ops.recast.embedding_bags.default, torch.ops.recast.embedding_bags_beside.default,
    torch.ops.recast.embedding_cat.default,
)  # fmt: skip
_GATHERED = torch.ops.recast.gathered_dots.default
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of tables that the kernels take


def ragged_inputs(graph: Graph, root: nn.Module, leaves: Sequence[Any]) -> list[Tensor]:
    """Those of ``leaves``, the values of the placeholders of ``graph``."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return [
        leaf
        for node, leaf in zip(placeholders, leaves, strict=False)
        if isinstance(leaf, Tensor)
        and node.users
        and gpu.serving(leaf) is not None
        and all(_only_cut(node, user, root) for user in node.users)
    ]


def _only_cut(node: Node, user: Node, root: nn.Module) -> bool:
    """Whether ``user`` reads ``node`` as ids, or weights of ids, of bags with an end only."""
    if user.target is _GATHERED:
        weights, ids, offsets, _, mode, _, last, _, *others = user.args
        sample_weights: Any = [None] * len(ids)  # type: ignore[arg-type]
        if node in others or any(node in x for x in others if isinstance(x, (list, tuple))):
            return False
    elif user.target in _LOOKUPS:
        weights, ids, offsets, sample_weights, _, mode, _, last, _, *rest = user.args
        if any(isinstance(x, (list, tuple)) and node in x for x in rest):
            return False  # a column of the matrix they are joined to
    else:
        return False
    if any(node in (held or ()) for held in (weights, offsets)):  # type: ignore[operator]
        return False
    tables = [tensor_at(weight, root) for weight in weights]  # type: ignore[union-attr]
    if not all(t is not None and t.dtype in _DTYPES and t.is_contiguous() for t in tables):
        return False
    return all(
        mode[k] != "none" and offsets[k] is not None and last[k]  # type: ignore[index]
        for held in (ids, sample_weights)
        for k, value in enumerate(held)  # type: ignore[arg-type]
        if value is node
    )
