"""The scaling of ``scaled_einsum`` on a GPU: one pass over the product each way.

Each element of the scale s scales n elements of the product P. Forward reads P and writes the
result; backward reads P and the gradient g of the result once, for s g, the gradient of P, and for
Σ P g, that of s. torch reads and writes as much for each of s g, P g and the sum of that.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime.batched_grads import each_of_batch
from recast.runtime.gpu import gpu, nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES

CONDITION = "float32, float16 and bfloat16 of one dtype; no autocast"
_BLOCK = 256
_MOST = 2**31 - 1


class Sizes(NamedTuple):
    """The product is (rows, between, inner), its scale (rows, inner)."""

    rows: int
    between: int
    inner: int


@lru_cache(maxsize=16)
def _kernels(dtype: int, vec: int) -> tuple[Kernel, Kernel]:
    defines = {"RECAST_IN": dtype, "RECAST_VEC": vec, "RECAST_BLOCK": _BLOCK}
    program = nvrtc.program("scaled_product.cu", defines=defines)
    return Kernel(program, "scaled_forward"), Kernel(program, "scaled_backward")


def scaled(scale: Tensor, product: Tensor, letters: str, output: str) -> Tensor | None:
    """``product`` times ``scale``; None if the kernels do not support them.

    ``output`` has a letter for each dimension of the product, ``letters`` those of the scale, in
    order. The product is the caller's own: without autograd it becomes the result.
    """
    there = gpu.serving(product)
    sizes = _sizes(product, letters, output)
    if there is None or sizes is None or torch._C._len_torch_dispatch_stack():
        return None
    if product.dtype not in CODES or scale.dtype != product.dtype or scale.device != product.device:
        return None
    own = [n for n, letter in zip(product.shape, output, strict=True) if letter in letters]
    if list(scale.shape) != own:  # torch broadcasts a dimension of 1, and refuses all others
        return None
    first, second = scale.contiguous(), product.contiguous()
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        return ScaledProduct.apply(there, sizes, first, second)
    _launch(there, 0, sizes, first, second, second)
    return second


def _sizes(product: Tensor, letters: str, output: str) -> Sizes | None:
    """None unless the dimensions that the scale lacks are adjacent, and there is at least one."""
    between = [k for k, letter in enumerate(output) if letter not in letters]
    if not product.numel() or product.numel() > _MOST:
        return None
    first, behind = (between[0], between[-1] + 1) if between else (0, 0)
    if behind - first != len(between):
        return None
    parts = product.shape[:first], product.shape[first:behind], product.shape[behind:]
    return Sizes(*(torch.Size(part).numel() for part in parts))


class ScaledProduct(torch.autograd.Function):
    """Inputs: the device, the sizes, the scale and the product, both contiguous."""

    @staticmethod
    def forward(ctx: Any, there: Gpu, sizes: Sizes, scale: Tensor, product: Tensor) -> Tensor:
        ctx.there, ctx.sizes = there, sizes
        ctx.save_for_backward(scale, product)
        out = torch.empty_like(product)
        _launch(there, 0, sizes, scale, product, out)
        return out

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale, product = ctx.saved_tensors
        grad = grad.contiguous()
        if torch.is_grad_enabled():
            rows, between, inner = ctx.sizes
            wide, g = product.view(rows, between, inner), grad.view(rows, between, inner)
            of_product = (g * scale.view(rows, 1, inner)).view(product.shape)
            return None, None, (wide * g).sum(1).view(scale.shape), of_product
        of_scale, of_product = torch.empty_like(scale), torch.empty_like(product)
        _launch(ctx.there, 1, ctx.sizes, scale, product, grad, of_scale, of_product)
        return None, None, of_scale, of_product


def _launch(there: Gpu, which: int, sizes: Sizes, *tensors: Tensor) -> None:
    """``tensors``: those that the kernel reads, then those that it writes."""
    read = tensors[: 2 + which]
    most = 16 // tensors[0].itemsize
    whole = not sizes.inner % most and not any(t.data_ptr() % 16 for t in tensors)
    vec = most if whole else 1
    arguments: tuple[Argument, ...] = (
        *(c_void_p(t.data_ptr()) for t in read), c_int64(sizes.rows),
        *map(c_int32, sizes[1:]), *(c_void_p(t.data_ptr()) for t in tensors[len(read) :]),
    )  # fmt: skip
    grid = (-(-sizes.rows * sizes.inner // (vec * _BLOCK)), 1, 1)
    kernel = _kernels(CODES[tensors[0].dtype], vec)[which]
    there.launch(kernel, grid, (_BLOCK, 1, 1), 0, arguments)
