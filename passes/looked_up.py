"""Inputs of which nothing is used but the rows they name: ids and offsets of lookups.

A recorded step copies its batch to memory of its own, where such inputs may be narrower than they
are given: the kernels read int32 at half the traffic of int64. Whoever else reads an input sees its
dtype, so there must be nobody; and a lookup may be one that is left to torch, or that keeps an id
as it is, so all of them must be of plain tables that the kernels take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from recast.rewriter.ir import Graph, Node
from recast.runtime.gpu import gpu

from .leaf import tensor_at
from .ragged import DTYPES, inputs_read, lookups_of

MOST_ROWS = 2**31 - 1  # ids beyond int32 become its last: that must be no row


def looked_up_inputs(graph: Graph, root: nn.Module, leaves: Sequence[Any]) -> list[Tensor]:
    """The inputs of which nothing but the ids counts, see :func:`.ragged.inputs_read`."""
    return inputs_read(graph, root, leaves, _only_looks_up)


def _only_looks_up(node: Node, user: Node, root: nn.Module) -> bool:
    """Whether ``user`` reads ``node`` as ids or offsets of lookups alone."""
    call = None if user.kwargs else lookups_of(user)
    if call is None:
        return False
    if any(node in (held or ()) for held in (call.weights, call.sample_weights, call.others)):
        return False
    # The gradient of a "max" makes ids of its own of these, of which nobody knows what they were.
    if any(ids is node and mode == "max" for ids, mode in zip(call.ids, call.mode, strict=True)):
        return False
    return all(_is_plain(tensor_at(weight, root)) for weight in call.weights)


def _is_plain(table: Tensor | None) -> bool:
    """Whether the kernels read this table, whose ids int32 can hold."""
    return (
        type(table) in (Tensor, nn.Parameter)
        and isinstance(table, Tensor)
        and table.dtype in DTYPES
        and table.dim() == 2
        and table.is_contiguous()
        and len(table) <= MOST_ROWS
        and gpu.serving(table) is not None
    )
