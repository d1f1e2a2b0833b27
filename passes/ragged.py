"""Inputs to which ids may be appended without effect.

A recorded step reads ids from memory of a fixed size, whatever their number. Bags that are cut by
offsets with an end ignore what lies behind it. That holds for our kernels on a GPU, but not for
torch's own lookup, whose last bag includes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of tables that the kernels take


class Lookups(NamedTuple):
    """The arguments of a call of lookups. ``others``: the nodes among its further arguments."""

    weights: Sequence[Any]
    ids: Sequence[Any]
    offsets: Sequence[Any]
    sample_weights: Sequence[Any]
    mode: Sequence[str]
    ended: Sequence[bool]
    others: list[Node]


def lookups_of(call: Node) -> Lookups | None:
    """What ``call`` looks up; None if it is not a call of lookups."""
    args: Any = call.args
    if call.target is _GATHERED:
        weights, ids, offsets, _, mode, _, ended, _, *rest = args
        sample_weights: Any = [None] * len(ids)
    elif call.target in _LOOKUPS:
        weights, ids, offsets, sample_weights, _, mode, _, ended, _, *rest = args
    else:
        return None
    parts = [x if isinstance(x, (list, tuple)) else (x,) for x in rest]
    others = [x for part in parts for x in part if isinstance(x, Node)]
    return Lookups(weights, ids, offsets, sample_weights, mode, ended, others)


def inputs_read(
    graph: Graph,
    root: nn.Module,
    leaves: Sequence[Any],
    so: Callable[[Node, Node, nn.Module], bool],
) -> list[Tensor]:
    """Those of ``leaves``, the values of the placeholders of ``graph``, for which ``so(placeholder,
    user, root)`` holds for all users; once for each such placeholder.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return [
        leaf
        for node, leaf in zip(placeholders, leaves, strict=False)
        if isinstance(leaf, Tensor)
        and node.users
        and gpu.serving(leaf) is not None
        and all(so(node, user, root) for user in node.users)
    ]


def ragged_inputs(graph: Graph, root: nn.Module, leaves: Sequence[Any]) -> list[Tensor]:
    """The inputs to which ids may be appended; see :func:`inputs_read`."""
    return inputs_read(graph, root, leaves, _only_cut)


def _only_cut(node: Node, user: Node, root: nn.Module) -> bool:
    """Whether ``user`` reads ``node`` only as ids, or weights of ids, of bags with an end."""
    call = lookups_of(user)
    if call is None or any(node in (held or ()) for held in (call.weights, call.offsets)):
        return False
    if node in call.others:  # a column of the matrix they are joined to
        return False
    tables = [tensor_at(weight, root) for weight in call.weights]
    if not all(t is not None and t.dtype in DTYPES and t.is_contiguous() for t in tables):
        return False
    return all(
        call.mode[k] != "none" and call.offsets[k] is not None and call.ended[k]
        for held in (call.ids, call.sample_weights)
        for k, value in enumerate(held)
        if value is node
    )
