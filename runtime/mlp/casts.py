"""Casts matrices on the GPU, and pads rows with zeros so that each is aligned to 16 bytes.

It casts all weights of a chain for autocast in one launch, and inputs with rows of any width.
Torch's own calls for many tensors give a block 65536 elements, so that a chain of 2 million weights
keeps only 34 blocks busy; and they would need more launches for the padding.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from recast.runtime import aligned
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.mlp.mask import CODES

_BLOCK = 256
_ELEMENTS = 8 * _BLOCK  # per block


@lru_cache(maxsize=8)
def _kernel(name: str, out: int) -> Kernel:
    defines = {"RECAST_OUT": out, "RECAST_BLOCK": _BLOCK}
    return Kernel(nvrtc.program("cast_rows.cu", defines=defines), name)


def takes(tensor: Tensor) -> bool:
    """Whether the kernels support it: one or two dimensions, a dtype of :data:`.mask.CODES`."""
    return tensor.dtype in CODES and tensor.dim() in (1, 2)


def every(
    gpu: Gpu, tensors: Sequence[Tensor], dtype: torch.dtype, wide: Tensor | None = None
) -> list[Tensor]:
    """Cast ``tensors``, all supported by :func:`takes`, to ``dtype``, in one launch.

    The results are contiguous, but that of ``wide``, one of them, gets rows padded with zeros and
    aligned to 16 bytes, and is marked as such.
    """
    made: list[Tensor] = []
    table, blocks = array("q"), 0
    for t in tensors:
        if t is wide and t.dim() == 2:
            to = aligned.mark(aligned.empty(t.shape[0], t.shape[1], dtype, t.device))
            stride = to.stride(0)
        else:
            to = torch.empty(t.shape, dtype=dtype, device=t.device)
            stride = t.shape[-1]
        made.append(to)
        rows, down = (t.shape[0], t.stride(0)) if t.dim() == 2 else (1, 0)
        count = rows * stride
        table.extend((t.data_ptr(), to.data_ptr(), down, t.stride(-1), t.shape[-1], stride))
        table.extend((count, CODES[t.dtype] | blocks << 2))
        blocks += -(-count // _ELEMENTS)
    if blocks:
        words = gpu.upload(table)
        gpu.launch(
            _kernel("cast_rows", CODES[dtype]), (blocks, 1, 1), (_BLOCK, 1, 1), 0,
            (c_void_p(words.data_ptr()), c_int32(len(made))),
        )  # fmt: skip
    return made


def widened(gpu: Gpu, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of ``matrix`` (rows, width) in ``dtype`` with its zero padding: (rows, stride).

    In one launch.
    """
    rows, width = matrix.shape
    stride = aligned.stride(width, dtype)
    made = matrix.new_empty((rows, stride), dtype=dtype)
    count = made.numel()
    gpu.launch(
        _kernel("cast_one", CODES[dtype]), (-(-count // _ELEMENTS), 1, 1), (_BLOCK, 1, 1), 0,
        (
            c_void_p(matrix.data_ptr()), c_void_p(made.data_ptr()),
            *map(c_int64, matrix.stride()), c_int64(width), c_int64(stride), c_int64(count),
            c_int32(CODES[matrix.dtype]),
        ),
    )  # fmt: skip
    return made
