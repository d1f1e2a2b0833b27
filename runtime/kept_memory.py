"""Big buffers on the CPU that outlive a step: memory that every step would ask the system for anew.

What malloc takes from the system for a tensor of megabytes it gives back when the tensor dies, and
the next step pays for every page again: some thousand page faults in a step of DLRM of batch 2048,
next to none this way. Such memory is kept and given out again once no tensor lies in it, as any
allocator does: a storage counts its tensors, views, saved ones and those of other threads too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 1 << 20  # bytes; of smaller ones malloc keeps the pages
MOST = 256 << 20  # bytes kept in all, in use or not

_address = getattr(torch._C, "_storage_address", None)
_uses = getattr(torch._C, "_storage_Use_Count", None)


class _Kept(NamedTuple):
    room: Tensor  # nobody else's
    storage: int  # its address, to count by

    def unused(self) -> bool:
        """No other tensor lies in the storage, and nobody ever asked for the storage itself.

        An object of Python's, once made of a storage, counts as long as the storage is there. So
        memory that was shared between processes or saved is never given out again.
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
    """Kept memory of ``size`` bytes in which no tensor lies; it is kept no longer."""
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
    """Keep nothing: memory without tensors goes back. So it does when a result of
    ``recast.optimize`` is no more.
    """
    _kept.clear()
