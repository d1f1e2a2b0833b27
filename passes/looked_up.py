"""Inputs that are used only as ids and offsets of lookups.

A recorded step copies its batch to memory of its own, where such inputs may be narrower than they
are given: the kernels read int32 with half the traffic of int64. Any other reader would see the
dtype, so there must be none. Lookups that are left to torch, or that keep ids as they are, would
see it too, so every lookup must be of a plain table that the kernels take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from recast.rewriter.ir import Graph, Node
from recast.runtime.gpu import gpu

from .leaf import tensor_at
from .ragged import DTYPES, inputs_read, lookups_of

MOST_ROWS = 2**31 - 1  # ids beyond int32 become its largest value: that must not be a row


def looked_up_inputs(graph: Graph, root: nn.Module, leaves: Sequence[Any]) -> list[Tensor]:
    """The inputs that only lookups read, as ids or offsets; see :func:`.ragged.inputs_read`."""
    return inputs_read(graph, root, leaves, _only_looks_up)


def _only_looks_up(node: Node, user: Node, root: nn.Module) -> bool:
    """Whether ``user`` reads ``node`` only as ids or offsets of lookups."""
    call = None if user.kwargs else lookups_of(user)
    if call is None:
        return False
    if any(node in (held or ()) for held in (call.weights, call.sample_weights, call.others)):
        return False
    # The gradient of a "max" computes ids of its own from these, which lose the given values.
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
