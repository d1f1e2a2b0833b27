"""Transposed copies of float32 matrices on the GPU, for products in TF32.

Hopper's tensor cores read TF32 operands along the summed dimension only. In forward both operands
lie that way, but in dX = dY W the weight does not, and in dW = dY' X neither does. So W, or dY,
which is small compared with X if a layer has many inputs, is copied at each call; copies are never
kept, as weights change between calls.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from functools import cache

from torch import Tensor

from recast.runtime.gpu import cublaslt, nvrtc
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.mlp.mask import MOST

_BLOCK, _TILE, _SIDE = 256, 64, 4  # as in csrc/cuda/transpose.cu


@cache
def _kernel() -> Kernel:
    return Kernel(nvrtc.program("transpose.cu"), "transpose")


def takes(matrix: Tensor) -> bool:
    """Whether a transposed copy of ``matrix`` (rows, columns) is supported and can help: it is used
    in TF32 products, and its rows are contiguous, while the product sums down its columns.
    """
    known = min(matrix.shape) > 1 and max(matrix.shape) <= MOST
    return cublaslt.tf32(matrix.dtype) and known and matrix.stride(1) == 1


def like(matrix: Tensor) -> Tensor:
    """An uninitialised column-major matrix (rows, columns), its columns aligned to 16 bytes."""
    rows, columns = matrix.shape
    return matrix.new_empty(columns, -(-rows // _SIDE) * _SIDE)[:, :rows].t()


def turned(gpu: Gpu, matrix: Tensor) -> Tensor:
    """A copy of the float32 ``matrix`` in the layout of :func:`like`, in one launch."""
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
