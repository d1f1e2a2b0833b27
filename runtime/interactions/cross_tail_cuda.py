"""The tail of a cross layer on a GPU: one kernel over rows; torch sums over samples."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel, pointer
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.cross_cuda import columns_at_once

_BLOCK = 256
_MOST_BLOCKS = 2**31 - 1


@lru_cache(maxsize=16)
def _kernels(gated: bool, vec: int) -> tuple[Kernel, Kernel]:
    defines = {"RECAST_GATED": gated, "RECAST_VEC": vec, "RECAST_BLOCK": _BLOCK}
    program = nvrtc.program("cross_tail.cu", defines=defines)
    return Kernel(program, "tail_forward"), Kernel(program, "tail_backward")


@dataclass(frozen=True, slots=True)
class CudaTail:
    """The tail of one layer as the kernels read it, with the C++ one's interface."""

    gpu: Gpu
    x0: Tensor
    m: Tensor
    inner: Tensor | None
    gate: Tensor | None

    def forward(self, x: Tensor, outer: Tensor | None, out: Tensor, threads: int) -> None:
        """Write the layer's value to ``out``, contiguous."""
        self._launch(0, (x,), (*_rows(x), pointer(outer)), (pointer(out),))

    def backward(
        self, grad: Tensor, dm: Tensor, into: Tensor, dz: Tensor | None, inner: Tensor | None,
        outer: Tensor | None, of_gate: Tensor | None, fresh: bool, whole: bool, threads: int,
    ) -> None:  # fmt: skip
        """Write the gradients, all contiguous, and the sums that are not None."""
        flags = c_int32(fresh), c_int32(whole)
        self._launch(
            1, (grad, into), (*_rows(grad), *flags), (pointer(dm), pointer(into), pointer(dz))
        )
        for values, total in ((dm, inner), (grad, outer), (dz, of_gate)):
            if total is not None and values is not None:
                torch.sum(values, 0, out=total)

    def _launch(
        self, which: int, others: tuple[Tensor, ...], given: tuple[Argument, ...],
        results: tuple[Argument, ...],
    ) -> None:  # fmt: skip
        batch, width = self.x0.shape
        read = [t for t in (self.x0, self.m, self.gate, *others) if t is not None]
        vec = columns_at_once(width, read)
        front = (
            *_rows(self.x0), *_rows(self.m), pointer(self.inner),
            *((c_void_p(None), c_int64(0)) if self.gate is None else _rows(self.gate)),
        )  # fmt: skip
        grid = (-(-batch * (width // vec) // _BLOCK), 1, 1)
        arguments = (*front, *given, c_int32(width), c_int64(batch), *results)
        kernel = _kernels(self.gate is not None, vec)[which]
        self.gpu.launch(kernel, grid, (_BLOCK, 1, 1), 0, arguments)


def takes(x0: Tensor) -> bool:
    """Whether a grid can have enough blocks for such rows."""
    return -(-x0.numel() // _BLOCK) <= _MOST_BLOCKS


def _rows(tensor: Tensor) -> tuple[c_void_p, c_int64]:
    return c_void_p(tensor.data_ptr()), c_int64(tensor.stride(0))
