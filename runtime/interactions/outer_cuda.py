"""``contraction`` on a GPU for outer product networks: ``"acd,bcd->abc"``.

For each c it is a product of (a, d) by (d, b) with d and b around 16: few operations for what is
read and written, and cuBLAS' batched products of such matrices take twice the time of a copy. Here
the weight (b, c, d) is kept in shared memory, or in forward in registers if it fits, and x is read
once. The weight's gradient, a sum over all samples, is a product by torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from ctypes import c_int32, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from recast.runtime.batched_grads import each_of_batch
from recast.runtime.gpu import gpu, nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES
from recast.runtime.op import wants_grad

CONDITION = (
    '"acd,bcd->abc" of one dtype, float32, float16 or bfloat16, with d at most 32 and the second'
    " factor in 96 KiB of shared memory; no autocast"
)
EQUATION = "acd,bcd->abc"
_BLOCK = 256
_LONGEST = 32
_SHARED = 96 << 10  # bytes of a block; every architecture from sm_80 on has them
_BLOCKS = 2  # of a multiprocessor
_ROOM = 160 << 10  # bytes of a multiprocessor, on sm_80; later ones have more
_SAMPLES = 2  # of a thread
_TILE = 40 << 10  # of rows and results of some samples, those to come too
_LARGEST = 512  # threads of a block that has the weight in registers
_MOST = 2**31 - 1

_by_tiles = True


@contextlib.contextmanager
def without_tiles() -> Iterator[None]:
    """Inside, ``outer_forward`` does all forwards; used to measure what ``outer_tiles`` gains."""
    global _by_tiles
    before, _by_tiles = _by_tiles, False
    try:
        yield
    finally:
        _by_tiles = before


@lru_cache(maxsize=64)
def _kernel(name: str, dtype: int, dim: int, vec: int) -> Kernel:
    defines = {
        "RECAST_IN": dtype, "RECAST_DIM": dim, "RECAST_VEC": vec, "RECAST_BLOCK": _BLOCK,
    }  # fmt: skip
    return Kernel(nvrtc.program("outer_products.cu", defines=defines), name)


def products(x: Tensor, w: Tensor, equation: str) -> Tensor | None:
    """The contraction, recorded by autograd; None if the kernels do not support it."""
    there = gpu.serving(x)
    if there is None or equation != EQUATION or torch._C._len_torch_dispatch_stack():
        return None
    if x.dtype not in CODES or w.dtype != x.dtype or w.device != x.device:
        return None
    if x.shape[1:] != w.shape[1:]:  # torch broadcasts a dimension of 1, and refuses all others
        return None
    (samples, vectors, dim), outputs = x.shape, w.shape[0]
    if not x.numel() or not w.numel() or dim > _LONGEST or _bytes(w) > _SHARED:
        return None
    if max(samples, outputs, samples * vectors) > _MOST:
        return None
    first, second = x.contiguous(), w.contiguous()
    if wants_grad((first, second)):
        return OuterProducts.apply(there, first, second)
    return _forward(there, first, second)


class OuterProducts(torch.autograd.Function):
    """Inputs: the device, x (a, c, d) and w (b, c, d), contiguous."""

    @staticmethod
    def forward(ctx: Any, there: Gpu, x: Tensor, w: Tensor) -> Tensor:
        ctx.there = there
        ctx.save_for_backward(x, w)
        return _forward(there, x, w)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        of_x = of_w = None
        if ctx.needs_input_grad[1]:
            if torch.is_grad_enabled():
                of_x = torch.einsum("abc,bcd->acd", grad, w)
            else:
                of_x = torch.empty_like(x)
                _launch(ctx.there, 1, grad.contiguous(), w, x.shape, of_x)
        if ctx.needs_input_grad[2]:
            of_w = torch.einsum("abc,acd->bcd", grad, x)
        return None, of_x, of_w


def _forward(there: Gpu, x: Tensor, w: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], w.shape[0], x.shape[1])
    _launch(there, 0, x, w, x.shape, out)
    return out


def _launch(
    there: Gpu, which: int, read: Tensor, w: Tensor, shape: torch.Size, out: Tensor
) -> None:
    samples, vectors, dim = shape
    rows = (w, out if which else read)  # those of d elements
    most = 16 // w.itemsize
    vec = next(
        v for v in (8, 4, 2, 1)
        if v <= most and not dim % v and not any(t.data_ptr() % (v * t.itemsize) for t in rows)
    )  # fmt: skip
    arguments: tuple[Argument, ...] = (
        c_void_p(read.data_ptr()), c_void_p(w.data_ptr()),
        *map(c_int32, (samples, w.shape[0], vectors)), c_void_p(out.data_ptr()),
    )  # fmt: skip
    if not which and _by_tiles and _tiles(there, arguments, shape, w, vec):
        return
    needed = -(-(-(-samples // _SAMPLES) * vectors) // _BLOCK)
    grid = (min(needed, _BLOCKS * there.multiprocessors), 1, 1)
    kernel = _kernel("outer_backward" if which else "outer_forward", CODES[w.dtype], dim, vec)
    there.launch(kernel, grid, (_BLOCK, 1, 1), _bytes(w), arguments)


def _tiles(
    there: Gpu, arguments: tuple[Argument, ...], shape: torch.Size, w: Tensor, vec: int
) -> bool:
    """The forward, by a kernel that has the weight in registers, where it fits."""
    (samples, vectors, dim), outputs, size = shape, w.shape[0], w.itemsize
    block = -(-vectors * -(-outputs // _own(dim)) // 32) * 32
    # Results of a tile begin at multiples of 16 bytes.
    unit = 16 // math.gcd(outputs * vectors * size, 16)
    each = (2 * vectors * (dim + vec) + outputs * vectors) * size
    together = _TILE // (each * unit) * unit or unit
    if vec * size != 16 or block > _LARGEST or together * each > _SHARED:
        return False
    tiles = -(-samples // together)
    blocks = max(1, min(1024 // block, _ROOM // (together * each + 1024)))
    grid = (min(tiles, blocks * there.multiprocessors), 1, 1)
    kernel = _kernel("outer_tiles", CODES[w.dtype], dim, vec)
    given = (*arguments[:-1], c_int32(together), arguments[-1])
    there.launch(kernel, grid, (block, 1, 1), together * each, given)
    return True


def _own(dim: int) -> int:
    """Outputs of a thread of outer_tiles."""
    rounded = -(-dim // 4) * 4
    return 8 if rounded <= 8 else 64 // rounded


def _bytes(w: Tensor) -> int:
    outputs, vectors, dim = w.shape
    return 4 * outputs * vectors * (-(-dim // 4) * 4 + 4)
