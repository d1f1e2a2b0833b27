"""A cache of big CPU buffers, which every step would otherwise request from the system again.

What malloc takes from the system for a tensor of megabytes, it returns when the tensor dies, and
the next step pays for every page again: some thousand page faults in a DLRM step of batch 2048,
hardly any with this cache. A buffer is reused once no tensor uses it any more: its storage counts
tensors, among them views, saved tensors and those of other threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 1 << 20  # bytes; malloc keeps the pages of smaller ones
MOST = 256 << 20  # bytes kept in all, in use or not

_address = getattr(torch._C, "_storage_address", None)
_uses = getattr(torch._C, "_storage_Use_Count", None)


class _Kept(NamedTuple):
    room: Tensor  # nobody else's
    storage: int  # its address, to count by

    def unused(self) -> bool:
        """Whether no other tensor uses the storage, and nobody ever asked for the storage itself.

        A Python object for a storage, once made, counts as long as the storage exists. So memory
        that was shared between processes or saved is never reused.
        """
        return _uses is not None and _uses(self.storage) == 1


_kept: list[_Kept] = []  # least recently given out first


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As ``torch.empty(shape, dtype=dtype)`` on the CPU; contiguous."""
    size = math.prod(shape) * dtype.itemsize
    if not LEAST <= size <= MOST // 4 or _address is None or torch._C._len_torch_dispatch_stack():
        return torch.empty(shape, dtype=dtype, device="cpu")
    kept = _free(size)
    if kept is None:
        room = torch.empty(size, dtype=torch.uint8, device="cpu")
        kept = _Kept(room, _address(room))
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    made = torch.empty(0, dtype=dtype, device="cpu")
    place = torch.ops.aten.set_.source_Tensor_storage_offset
    place(made, kept.room.view(dtype), 0, list(shape), strides)
    _keep(kept)
    return made


def _free(size: int) -> _Kept | None:
    """A kept buffer of ``size`` bytes that no tensor uses, removed from the cache."""
    for k, kept in enumerate(_kept):
        if kept.room.nbytes != size or not kept.unused():
            continue
        try:
            found = _kept.pop(k)
        except IndexError:  # another thread was faster
            return None
        # A thread may have moved what stands at k.
        return found if found.room.nbytes == size and found.unused() else None
    return None


def _keep(kept: _Kept) -> None:
    _kept.append(kept)
    total = sum(k.room.nbytes for k in list(_kept))
    while total > MOST and _kept:
        try:
            total -= _kept.pop(0).room.nbytes
        except IndexError:
            return


def clear() -> None:
    """Empty the cache: unused memory is returned to the system. Also called when a result of
    ``recast.optimize`` is deleted.
    """
    _kept.clear()
