"""``cross_vector`` on a GPU: all layers of a network in one kernel, one warp per sample.

``csrc/cuda/cross_vector.cu`` is compiled for the number of layers and the width of loads. The
gradients of weights are sums over samples: two thin matrix products, left to torch.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel, pointer
from recast.runtime.gpu.gpu import Gpu

CONDITION = "float32, 1 to 8 layers, no autocast"
_BLOCK = 128
_MOST_LAYERS = 8
_MOST = 2**31 - 2**20  # int32, less what the last blocks count past the end


@lru_cache(maxsize=256)
def _kernels(layers: int, start: bool, vec: int) -> tuple[Kernel, Kernel]:
    defines = {
        "RECAST_LAYERS": layers, "RECAST_START": start, "RECAST_VEC": vec, "RECAST_BLOCK": _BLOCK,
    }  # fmt: skip
    program = nvrtc.program("cross_vector.cu", defines=defines)
    return Kernel(program, "cross_forward"), Kernel(program, "cross_backward")


@dataclass(frozen=True, slots=True)
class Network:
    """A call as the kernels read it, with the C++ one's interface. Its tensors must live on."""

    gpu: Gpu
    rows: Tensor  # x_0: (B, d)
    start: Tensor | None  # x: (B, d); None: it is x_0
    weights: Tensor  # (L, d), contiguous
    offsets: Tensor  # (L,)

    def forward(self, out: Tensor, beta: Tensor | None, threads: int) -> None:
        """Write the result to ``out`` (B, d)."""
        self._launch(0, out, (pointer(beta),), (pointer(out),))

    def backward(
        self, grad: Tensor, dx0: Tensor, dx: Tensor | None, dw: Tensor, db: Tensor, dc: Tensor,
        threads: int,
    ) -> None:  # fmt: skip
        """Write the gradients; ``dw`` without the part due to the biases before each layer."""
        first, start = (self.rows.new_empty(len(self.rows), len(self.weights)) for _ in range(2))
        results = tuple(map(pointer, (dx0, dx, first, start)))
        self._launch(1, grad, (pointer(grad), c_int64(grad.stride(0))), results)
        torch.mm(first.t(), self.rows, out=dw)
        if self.start is not None:
            dw.addmm_(start.t(), self.start)
        torch.sum(grad, 0, out=db)
        torch.sum(start, 0, out=dc)

    def _launch(
        self, which: int, other: Tensor, given: tuple[Argument, ...], results: tuple[Argument, ...]
    ) -> None:
        batch, width = self.rows.shape
        read = [t for t in (self.rows, self.start, other) if t is not None]
        vec = columns_at_once(width, read)
        kernel = _kernels(len(self.weights), self.start is not None, vec)[which]
        start = self.rows if self.start is None else self.start
        front = (
            pointer(self.rows), c_int64(self.rows.stride(0)),
            pointer(start), c_int64(start.stride(0)),
            pointer(self.weights), pointer(self.offsets),
        )  # fmt: skip
        sizes = (c_int32(width), c_int32(batch))
        grid = (-(-batch // (_BLOCK // 32)), 1, 1)
        self.gpu.launch(kernel, grid, (_BLOCK, 1, 1), 0, (*front, *given, *sizes, *results))


def network(
    gpu: Gpu, rows: Tensor, start: Tensor | None, weights: Tensor, offsets: Tensor
) -> Network | None:
    """The call; None if the kernels do not support it."""
    batch, width = rows.shape
    if not 1 <= len(weights) <= _MOST_LAYERS or not width or not 0 < batch <= _MOST:
        return None
    return Network(gpu, rows, start, weights, offsets)


def columns_at_once(width: int, read: list[Tensor]) -> int:
    """How many columns a thread may read at once."""
    whole = not width % 4 and not any(t.stride(0) % 4 or t.data_ptr() % 16 for t in read)
    return 4 if whole else 1
