"""``pair_products`` on a GPU: vectors are read where they are, by address and stride.

``csrc/cuda/pair_products.cu`` is compiled for the dtype and for what is summed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES, rows_of

CONDITION = (
    "float32, float16 and bfloat16 features of one dtype, no autocast, whose vectors of a sample"
    " fit into 96 KiB of shared memory, with as many gradients"
)
_BLOCK = 128
_SHARED = 96 << 10  # bytes of a block; every architecture from sm_80 on has them
_GOAL = 24 << 10  # so that several blocks share a multiprocessor
_MOST = 2**31 - 1


@lru_cache(maxsize=256)
def _kernels(dtype: int, sum: int) -> tuple[Kernel, Kernel]:
    program = nvrtc.program("pair_products.cu", defines={"RECAST_IN": dtype, "RECAST_SUM": sum})
    return Kernel(program, "pair_forward"), Kernel(program, "pair_backward")


@dataclass(frozen=True, slots=True)
class Products:
    """One call as the kernels read it, in the form of the C++ one; the tensors must live on."""

    gpu: Gpu
    at: array[int]  # (address, stride) of each vector, left ones first
    counts: tuple[int, int]  # vectors on the left and on the right
    batch: int
    dim: int
    pairs: tuple[Tensor, Tensor]
    weight: Tensor | None
    code: int  # of the dtype
    lanes: int
    samples: int

    def forward(self, out: Tensor, sum: int, threads: int) -> None:
        """Write the result to ``out``, contiguous."""
        self._launch(0, sum, 1, (c_void_p(out.data_ptr()),))

    def backward(
        self, grad: Tensor, sum: int, left: list[Tensor], right: list[Tensor],
        weight: Tensor | None, threads: int,
    ) -> None:  # fmt: skip
        """Write the gradients of all vectors of a side to one (batch, vectors, dim)."""
        into = [c_void_p(t[0].data_ptr() if t else None) for t in (left, right)]
        own = c_void_p(None if weight is None else weight.data_ptr())
        strides = c_int64(grad.stride(0)), c_int64(grad.stride(1))
        self._launch(1, sum, 2, (c_void_p(grad.data_ptr()), *strides, *into, own))

    def _launch(self, which: int, sum: int, copies: int, rest: Sequence[Argument]) -> None:
        rows, weight = self.gpu.upload(self.at), self.weight
        kernel = _kernels(self.code, sum)[which]
        front: tuple[Argument, ...] = (
            c_void_p(rows.data_ptr()), *map(c_int32, self.counts),
            *(c_void_p(t.data_ptr()) for t in self.pairs),
            c_void_p(None if weight is None else weight.data_ptr()),
            c_int64(0 if weight is None else weight.stride(0)),
            c_int32(len(self.pairs[0])), c_int32(self.dim), c_int32(self.batch),
            c_int32(self.lanes),
        )  # fmt: skip
        shared = copies * self.samples * 4 * self.dim * len(self.at) // 2
        grid, block = (-(-self.batch // self.samples), 1, 1), (self.lanes * self.samples, 1, 1)
        self.gpu.launch(kernel, grid, block, shared, (*front, *rest))


def products(
    gpu: Gpu, left: list[Tensor], right: list[Tensor], li: Tensor, lj: Tensor,
    weight: Tensor | None,
) -> Products | None:  # fmt: skip
    """The call; None where the kernels do not take it. Pairs of vectors that are not there are left
    out: to look at ``li`` and ``lj`` would wait for the device.
    """
    dtype, rows, others = left[0].dtype, rows_of(left), rows_of(right) if right else None
    if rows is None or (right and (others is None or right[0].dtype != dtype)):
        return None
    if dtype not in CODES or any(t.dtype != torch.int64 or not t.is_contiguous() for t in (li, lj)):
        return None
    if any(t.device != li.device for t in (*left[:1], *right[:1], lj)):
        return None
    if weight is not None and (weight.dtype != dtype or weight.stride(-1) != 1):
        return None
    at = rows.at + others.at if others is not None else rows.at
    batch, dim, vectors = left[0].shape[0], left[0].shape[-1], len(at) // 2
    each = 2 * 4 * dim * vectors
    if not 0 < batch <= _MOST or not dim or not len(li) or each > _SHARED:
        return None
    lanes = min(32, 1 << (dim - 1).bit_length())
    samples = max(1, min(_BLOCK // lanes, _GOAL // each))
    counts = len(rows.at) // 2, 0 if others is None else len(others.at) // 2
    return Products(gpu, at, counts, batch, dim, (li, lj), weight, CODES[dtype], lanes, samples)
