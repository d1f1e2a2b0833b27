"""Placeholder memory for a model on the meta device while an example runs: tables at no cost.

A table gets address space without memory: pages that read as zero until they are written. Rows of
ids in the example are filled with random numbers, so that results can be compared. The rest of the
model gets its real values. ``materialise`` then replaces the tables by the real rows.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from recast.errors import UsageError
from recast.runtime.ranks import shards

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux
_PLACEHOLDERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_WRITTEN = 1 << 14  # ids of the example whose rows are written, at most


def has_placeholder(parameter: Tensor) -> bool:
    """Whether ``parameter`` has placeholder memory."""
    return len(_PLACEHOLDERS) > 0 and parameter in _PLACEHOLDERS


def give(tables: Iterator[tuple[str, nn.Parameter]], example: Any) -> None:
    """Give placeholder memory to those of ``tables`` (name, parameter) that are on meta.

    Raises:
        UsageError: there is not enough address space.
    """
    ids = _ids(example)
    for name, weight in tables:
        if not weight.is_meta:
            continue
        shards.fill(weight, _pages(name, weight))
        _PLACEHOLDERS[weight] = True
        with torch.no_grad():
            known = ids[ids < len(weight)]
            weight[known] = torch.randn(len(known), weight.shape[1], dtype=weight.dtype)


def forget(parameter: Tensor) -> None:
    """Note that ``parameter`` now has memory of its own."""
    _PLACEHOLDERS.pop(parameter, None)


def remove(root: nn.Module) -> None:
    """Move all parameters with placeholder memory back to meta."""
    for parameter in root.parameters():
        if has_placeholder(parameter):
            forget(parameter)
            new = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            torch._C._swap_tensor_impl(parameter, new)


def _pages(name: str, weight: Tensor) -> Tensor:
    size = max(1, math.prod(weight.shape)) * weight.dtype.itemsize
    try:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"{name} on meta: no {size:,} bytes of address space to run the example in: {error}",
            why="they would cost no memory, and this system counts them all the same",
            tries=("optimize(model) without an example", "vm.overcommit_memory=0"),
        ) from error
    flat = torch.frombuffer(pages, dtype=weight.dtype)
    return flat[: math.prod(weight.shape)].view(weight.shape)


def _ids(example: Any) -> Tensor:
    """All integers in the example that may be ids, without duplicates."""
    leaves = [v for v in tree_leaves(example) if isinstance(v, Tensor) and v.is_cpu]
    held = [v.flatten().long() for v in leaves if not v.is_floating_point() and not v.is_complex()]
    found = torch.cat([torch.empty(0, dtype=torch.long), *held]).unique()
    return found[found >= 0][:_WRITTEN]
