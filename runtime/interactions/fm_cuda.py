"""``fm_interaction`` on a GPU: features are read in place, by address and stride.

``csrc/cuda/fm_interaction.cu`` is compiled for the dtypes, the width of loads and the number of
lanes per sample. Backward needs the sum of all features before the first gradient: lanes with few
features keep them in registers, so that none is read twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES, Rows, rows_of

CONDITION = "float32, float16 and bfloat16 features of one dtype"
_BLOCK = 128
_HELD = 4, 8, 16  # features that a thread keeps: whatever is between is compiled as the next
_MOST = 2**31 - 2**20  # int32, less what the last blocks count past the end


@lru_cache(maxsize=256)
def _kernels(
    dtype: int, vec: int, lanes: int, splits: int, held: int, reduce: bool
) -> tuple[Kernel, Kernel]:
    defines = {
        "RECAST_IN": dtype, "RECAST_OUT": dtype, "RECAST_VEC": vec, "RECAST_LANES": lanes,
        "RECAST_SPLITS": splits, "RECAST_HELD": held, "RECAST_REDUCE": reduce,
        "RECAST_BLOCK": _BLOCK,
    }  # fmt: skip
    program = nvrtc.program("fm_interaction.cu", defines=defines)
    return Kernel(program, "fm_forward"), Kernel(program, "fm_backward")


@dataclass(frozen=True, slots=True)
class Interaction:
    """One call as the kernels read it; the features must live on."""

    gpu: Gpu
    rows: Rows
    dtype: torch.dtype
    scale: float
    reduce: bool
    lanes: int
    splits: int
    kernels: tuple[Kernel, Kernel]

    def forward(self) -> Tensor:
        """The result: (B, D), or (B, 1) summed over D."""
        batch, dim = self.rows.shapes[0][0], self.rows.shapes[0][-1]
        out = self._empty(batch, 1 if self.reduce else dim)
        self._launch(0, c_void_p(out.data_ptr()), c_int64(out.stride(0)))
        return out

    def backward(self, grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradient of each feature that ``needs`` one."""
        shapes, counts = self.rows.shapes, self.rows.counts
        batch, dim = shapes[0][0], shapes[0][-1]
        asked = [k for k, need in enumerate(needs) if need]
        whole = self._empty(batch, sum(counts[k] for k in asked), dim)
        parts = torch.split_with_sizes(whole, [counts[k] for k in asked], 1)
        grads: list[Tensor | None] = [None] * len(counts)
        table, step, start = array("q"), dim * whole.itemsize, whole.data_ptr()
        for k, part in zip(asked, parts, strict=True):
            grads[k] = part if len(shapes[k]) == 3 else part.squeeze(1)
        for count, need in zip(counts, needs, strict=True):
            for _ in range(count):
                table.extend((start if need else 0, whole.stride(0)))
                start += step if need else 0
        into = self.gpu.upload(table)
        self._launch(
            1,
            c_void_p(grad.data_ptr()), c_int64(grad.stride(0)), c_void_p(into.data_ptr()),
        )  # fmt: skip
        return grads

    def _launch(self, which: int, *arguments: Argument) -> None:
        batch, dim = self.rows.shapes[0][0], self.rows.shapes[0][-1]
        rows = self.gpu.upload(self.rows.at)
        front = (
            c_void_p(rows.data_ptr()), c_int32(len(self.rows.at) // 2), c_int32(dim),
            c_float(2 * self.scale), c_int32(batch),
        )  # fmt: skip
        team = self.lanes * (self.splits if which else 1)
        blocks = -(-batch // (_BLOCK // team))
        self.gpu.launch(
            self.kernels[which], (blocks, 1, 1), (_BLOCK, 1, 1), 0, (*front, *arguments)
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.gpu.device)


def interaction(
    gpu: Gpu, features: Sequence[Tensor], scale: float, reduce: bool
) -> Interaction | None:
    """The call; None if the kernels do not support it."""
    rows, dtype = rows_of(features), features[0].dtype
    if rows is None or not rows.at or dtype not in CODES:
        return None
    batch, dim = rows.shapes[0][0], rows.shapes[0][-1]
    if not dim or batch > _MOST:
        return None
    vec = 16 // dtype.itemsize
    while dim % vec or rows.bits % (vec * dtype.itemsize):
        vec //= 2
    lanes = min(32, 1 << (-(-dim // vec) - 1).bit_length())
    count = len(rows.at) // 2
    splits = min(32 // lanes, 1 << (count.bit_length() - 1))
    each = -(-count // splits)
    held = next((some for some in _HELD if some >= each), _HELD[-1])
    kernels = _kernels(CODES[dtype], vec, lanes, splits, held, reduce)
    return Interaction(gpu, rows, dtype, scale, reduce, lanes, splits, kernels)
