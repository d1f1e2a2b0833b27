"""Regions of ``torch.autocast`` inside forward: each call of a graph runs in the region it was in.

A region is what the ``with`` blocks around a call set, one entry for each kind of device, whatever
holds outside of them. A call that computes the same in any region has none (``None``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

Region: TypeAlias = tuple[tuple[str, torch.dtype, bool], ...]  # device, dtype, whether enabled

_SAME = {
    operator.getitem, getattr, torch.reshape, torch.flatten, torch.transpose, torch.permute,
    torch.unsqueeze, torch.squeeze, F.embedding, F.embedding_bag,
}  # fmt: skip
_SAME_METHODS = {
    "view", "reshape", "flatten", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand",
    "size", "dim", "contiguous", "detach", "float", "long", "int",
}  # fmt: skip


def nesting() -> int:
    """How many ``with torch.autocast`` blocks are open in this thread."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def enabled(devices: Iterable[str] = ("cpu", "cuda")) -> Region:
    """What now holds for these kinds of devices."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in sorted(set(devices))
    )


def inside(region: Region | None) -> ExitStack:
    """A context in which ``region`` holds."""
    stack = ExitStack()
    for kind, dtype, on in region or ():
        stack.enter_context(torch.autocast(kind, dtype, enabled=on))
    return stack


def same_in_any(node: fx.Node, layer: nn.Module | None) -> bool:
    """Whether a call is known to compute the same in any region. ``layer``: what it calls, if that
    is a module, and known.
    """
    if node.op == "call_method":
        return node.target in _SAME_METHODS
    if node.op == "call_function":
        return node.target in _SAME
    return node.op != "call_module" or isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
