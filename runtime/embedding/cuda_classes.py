"""The classes of lookups on a GPU: which can share one launch of ``embedding_forward.cu``, and how
that kernel is specialised for them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime.embedding.call import Call
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.gpu.gpu import Gpu

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as RECAST_TABLE and RECAST_OUT
BLOCK = 256
LONG = 512  # bags of at least so many ids are summed by a whole block

_UNDER_WAY = 4  # reads in flight per lane
_FULL = 12  # blocks per multiprocessor that keep it busy; three run at once
_MOST_ROWS, _MOST_STRIDE = 2**32 - 2, 2**31 - 1


class LookupClass(NamedTuple):
    """What the lookups of one launch have in common: the macros of embedding_forward.cu."""

    table: int
    out: int
    vec: int
    lanes: int
    chunks: int
    max: bool
    bags: int
    long: int

    def kernel(self) -> Kernel:
        return _kernel(self)

    def rounds(self, blocks: int, multiprocessors: int) -> int:
        """For how many rounds a warp reads its ids at once, a power of two. ``blocks``: how many
        there would be with one round each.

        More rounds mean less waiting, but fewer blocks with more work each.
        """
        bags, rounds = 32 // self.lanes * self.bags, 1  # bags of a warp in a round
        most = 1 if self.max or bags >= 32 else min(8, 32 // bags)
        while 2 * rounds <= most and blocks >= 2 * rounds * _FULL * multiprocessors:
            rounds *= 2
        return rounds


@lru_cache(maxsize=1024)
def _kernel(of: LookupClass) -> Kernel:
    defines = {f"RECAST_{name.upper()}": value for name, value in of._asdict().items()}
    program = nvrtc.program("embedding_forward.cu", defines={**defines, "RECAST_BLOCK": BLOCK})
    return Kernel(program, "embedding_forward")


def _fixed(call: Call, k: int) -> int:
    """Ids per bag of lookup k; 0 if it has offsets, 1 if it is not pooled."""
    if call.layout.mode[k] == "none":
        return 1
    return call.ids[k].shape[1] if call.offsets[k] is None else 0


def classes_of(call: Call, on: Gpu) -> list[LookupClass] | None:
    """The class of each lookup; None if one has none, or its tensors are not on that GPU."""
    index = -1 if on.device.index is None else on.device.index
    if call.columns is not None and call.columns.dtype not in CODES:
        return None
    tensors = (*call.ids, *call.offsets, *call.per_sample_weights, *call.others)
    if any(x is not None and x.get_device() != index for x in tensors):
        return None
    if not all(takes(w) and w.get_device() == index for w in call.weights):
        return None
    return [class_of(call, k) for k in range(len(call.ids))]


def takes(weight: Tensor) -> bool:
    """Whether the kernels can read this table."""
    rows, dim = weight.shape
    return (
        weight.dtype in CODES
        and weight.layout is torch.strided
        and rows <= _MOST_ROWS
        and weight.stride(0) <= _MOST_STRIDE
        and (weight.stride(1) == 1 or dim <= 1)
    )


def class_of(call: Call, k: int) -> LookupClass:
    weight, mode = call.weight(k), call.layout.mode[k]
    dim, size, most = weight.shape[1], weight.itemsize, 16 // weight.itemsize
    vec = most
    while dim % vec or weight.stride(0) % vec or weight.data_ptr() % (vec * size):
        vec //= 2
    wide = -(-max(dim, 1) // vec)  # lanes that would read a whole row at once
    lanes = min(32, 1 << (wide - 1).bit_length())
    chunks = min(4, 1 << (-(-wide // lanes) - 1).bit_length())
    fixed = _fixed(call, k)
    may_be_long = mode in ("sum", "mean", "total") and (fixed == 0 or fixed >= LONG)
    may_be_single = mode != "max" and fixed <= 1
    return LookupClass(
        CODES[weight.dtype],
        CODES[call.dtype(k)],
        vec,
        lanes,
        chunks,
        mode == "max",
        _UNDER_WAY // chunks if may_be_single else 1,
        LONG if may_be_long else 0,
    )
