"""Matrices of float32 on the GPU turned about their diagonal, for products in TF32.

Tensor cores of a Hopper read operands of TF32 along the sum only. Forward both lie so; but in
dX = dY W the weight lies across it, and in dW = dY' X both do. Of W, and of dY, which is small
beside X where a layer has many inputs, a turned copy is made at each call; never kept, as weights
change between calls.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from recast.runtime import aligned
from recast.runtime.gpu import cublaslt, nvrtc
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.mlp.mask import MOST

_BLOCK, _TILE = 256, 64  # as in csrc/cuda/turn.cu


@cache
def _kernel() -> Kernel:
    return Kernel(nvrtc.program("turn.cu"), "turn")


def takes(matrix: Tensor) -> bool:
    """Whether a product in TF32 reads ``matrix`` (rows, columns), of dense rows, across its sum
    when that goes down the columns.
    """
    known = min(matrix.shape) > 1 and max(matrix.shape) <= MOST
    return cublaslt.tf32(matrix.dtype) and known and matrix.stride(1) == 1


def like(matrix: Tensor) -> Tensor:
    """A matrix (rows, columns) to be written, of elements side by side down the columns.

    Columns start at whole 16 bytes.
    """
    rows, columns = matrix.shape
    return matrix.new_empty(columns, aligned.stride(rows, torch.float32))[:, :rows].t()


def turned(gpu: Gpu, matrix: Tensor) -> Tensor:
    """A copy of ``matrix``, of float32, as :func:`like` has it. In one launch."""
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    (rows, columns), made = matrix.shape, like(matrix)
    gpu.launch(
        _kernel(), (-(-rows // _TILE) * -(-columns // _TILE), 1, 1), (_BLOCK, 1, 1), 0,
        (
            c_void_p(matrix.data_ptr()), c_int64(matrix.stride(0)), c_void_p(made.data_ptr()),
            c_int64(made.stride(1)), c_int32(rows), c_int32(columns),
        ),
    )  # fmt: skip
    return made
