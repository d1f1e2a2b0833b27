"""``dice`` on a GPU: one kernel forward, one backward.

For N elements, forward reads x and the gate and writes the result: 3 N. Backward reads the
gradient, x and the gate and writes two gradients: 5 N. ``torch.compile`` moves as much forward, but
sums the gradient of alpha over rows in a separate kernel, which reads 3 N again: 11 N in all, where
we move 8 N. The partial sums are added in an order that does not depend on the device.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES

CONDITION = "float32, float16 and bfloat16; input and gate of one dtype"
_BLOCK, _COLUMNS = 256, 8  # threads; columns of a block of dice_alpha
_MOST = 2**31 - 1
_MOST_PARTS = 512  # partial gradients of alpha: four blocks on each of 128 multiprocessors
_MOST_WIDTH = 1 << 16  # keeps the grid's second dimension within its limit


@lru_cache(maxsize=256)
def _kernels(dtype: int, alpha: int, out: int, vec: int) -> tuple[Kernel, Kernel, Kernel]:
    defines = {
        "RECAST_IN": dtype, "RECAST_ALPHA": alpha, "RECAST_OUT": out, "RECAST_VEC": vec,
        "RECAST_BLOCK": _BLOCK,
    }  # fmt: skip
    program = nvrtc.program("dice.cu", defines=defines)
    forward, backward, of_alpha = (
        Kernel(program, name) for name in ("dice_forward", "dice_backward", "dice_alpha")
    )
    return forward, backward, of_alpha


@dataclass(frozen=True, slots=True)
class Activation:
    """One call as the kernels read it; the tensors must live on."""

    gpu: Gpu
    input: Tensor  # (rows, C), contiguous rows
    gate: Tensor
    alpha: Tensor  # (1,) or (C,), any stride
    out: torch.dtype

    def forward(self) -> Tensor:
        """The result: (rows, C)."""
        out = torch.empty(self.input.shape, dtype=self.out, device=self.gpu.device)
        self._launch(0, self._chunks(4, _MOST), [], (c_void_p(out.data_ptr()),))
        return out

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of input and gate, (rows, C), and of alpha."""
        width, chunks = self.input.shape[1], self._chunks(8, _MOST_PARTS)
        into, of_gate = (torch.empty_like(t, memory_format=torch.contiguous_format)
                         for t in (self.input, self.gate))  # fmt: skip
        parts = torch.empty((chunks, width), dtype=torch.float32, device=self.gpu.device)
        kernels = self._launch(1, chunks, [grad], tuple(map(_at, (into, of_gate, parts))))
        if len(self.alpha) != width:
            return into, of_gate, parts.sum().reshape(1).to(self.alpha.dtype)
        of_alpha = torch.empty(width, dtype=self.alpha.dtype, device=self.gpu.device)
        self.gpu.launch(
            kernels[2], (-(-width // _COLUMNS), 1, 1), (_BLOCK, 1, 1), 0,
            (_at(parts), c_int32(chunks), c_int32(width), _at(of_alpha)),
        )  # fmt: skip
        return into, of_gate, of_alpha

    def _chunks(self, ahead: int, most: int) -> int:
        """How many chunks of rows: one per ``ahead`` reads of a block, and at most ``most``."""
        _, lanes = self._form([])
        return max(1, min(-(-len(self.input) // (_BLOCK // lanes * ahead)), most))

    def _form(self, others: list[Tensor]) -> tuple[int, int]:
        """How many columns a lane may read at once, and how many lanes share a row."""
        width = self.input.shape[1]
        vec = 16 // self.input.itemsize
        sizes = [(t.stride(0), t.data_ptr(), t.itemsize) for t in (self.input, self.gate, *others)]
        if width % vec or any(s % vec or at % min(vec * size, 16) for s, at, size in sizes):
            vec = 1
        packs = -(-width // vec)
        return vec, -(-packs // -(-packs // _BLOCK))

    def _launch(
        self, which: int, chunks: int, others: list[Tensor], results: tuple[Argument, ...]
    ) -> tuple[Kernel, Kernel, Kernel]:
        rows, width = self.input.shape
        vec, lanes = self._form(others)
        codes = CODES[self.input.dtype], CODES[self.alpha.dtype], CODES[self.out]
        given = [*others, self.input, self.gate]
        front = [a for t in given for a in (_at(t), c_int64(t.stride(0)))]
        step = self.alpha.stride(0) if len(self.alpha) > 1 else 0
        arguments = (*front, _at(self.alpha), c_int32(step), c_int32(width), c_int64(rows),
                     c_int32(lanes))  # fmt: skip
        grid = (chunks, -(-width // (vec * lanes)), 1)
        kernels = _kernels(*codes, vec)
        self.gpu.launch(kernels[which], grid, (_BLOCK, 1, 1), 0, (*arguments, *results))
        return kernels


def activation(gpu: Gpu, input: Tensor, gate: Tensor, alpha: Tensor) -> Activation | None:
    """The call on (rows, C); None if the kernels do not support it."""
    out = torch.promote_types(input.dtype, alpha.dtype)
    if input.dtype != gate.dtype or not {input.dtype, alpha.dtype, out} <= CODES.keys():
        return None
    if not input.numel() or input.shape[1] > _MOST_WIDTH:
        return None
    if any(t.device != input.device for t in (gate, alpha)):
        return None
    return Activation(gpu, input, gate, alpha, out)


def _at(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())
