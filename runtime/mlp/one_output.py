"""Backward of a linear layer with one output, the last of most models, in one pass over memory.

With g (rows, 1) the gradient of its output, w its weight and Z the mask of the layer below:

    dX = scale * (g w) * Z     db below = the column sums of dX     dw = g' X     db = the sum of g

As products these are an outer one and two that are no matrix products at all, and each reads or
writes all of X or dX again. Here X is read once and dX written once (``mlp_one_output`` in
``csrc/cuda/mlp_epilogue.cu``). The faster way of the two, timed once for a shape.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime import fastest
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import products as mlp_products
from recast.runtime.mlp.mask import CODES

_ONE, _APART = "one kernel", "products"
_COMPARED = 4096  # rows of a result that tell whether two ways compute the same


class Layer(NamedTuple):
    """What backward finds."""

    g: Tensor  # (rows, 1)
    weight: Tensor  # (1, K), the columns side by side
    x: Tensor  # (rows, K), likewise
    bits: Tensor | None  # of the layer below: uint8 (rows, bytes); None: all of it passes
    scale: float  # of its dropout
    like: Tensor  # the parameter: its gradient, and that of the bias, has its shape and dtype
    has_bias: bool
    below: torch.dtype | None  # of the bias gradient of the layer below; None: not wanted


class Grads(NamedTuple):
    """What it gives."""

    x: Tensor  # (rows, K), under the mask
    below: Tensor | None  # (K,)
    weight: Tensor  # (1, K)
    bias: Tensor | None  # (1,)


def takes(layer: Layer) -> bool:
    """Whether the kernel can do it."""
    g, weight, x, like = layer.g, layer.weight, layer.x, layer.like
    if not x.numel() or weight.shape[0] != 1 or not x.shape[1] == weight.shape[1] == like.shape[1]:
        return False
    alike = g.dtype == weight.dtype == x.dtype and {x.dtype, like.dtype} <= CODES.keys()
    return alike and layer.below in (None, like.dtype)


def backward(gpu: Gpu, layer: Layer) -> Grads | None:
    """The gradients by one kernel; None where the products are faster, or nobody can tell."""
    if not takes(layer):
        return None
    sizes = layer.x.get_device(), layer.x.dtype, *layer.x.shape[1:], layer.x.shape[0].bit_length()
    what = layer.bits is None, layer.like.dtype, layer.has_bias, layer.below
    key = "one output", *sizes, *what
    way = fastest.chosen(key)
    if way is None:
        ways = {_ONE: partial(in_one, gpu, layer), _APART: partial(apart, gpu, layer)}
        way = fastest.choose(key, ways, layer.x, lambda found: (found.x[:_COMPARED], *found[1:]))
    return in_one(gpu, layer) if way == _ONE else None


def in_one(gpu: Gpu, layer: Layer) -> Grads:
    """By one kernel, and one for its sums, which are always alike."""
    g, weight, x, bits, scale, like, has_bias, below = layer
    rows, n = x.shape
    dx, of_weight = x.new_empty(rows, n), like.new_empty(1, n)
    of_bias = like.new_empty(1) if has_bias else None
    of_below = None if below is None else weight.new_empty(n, dtype=below)
    tiles, blocks, chunk, lanes = mlp_mask.cut(gpu, rows, n, True)
    parts = torch.empty(blocks, 2 * n + 1, dtype=torch.float32, device=x.device)
    vec = mlp_mask.vec_of(n | x.stride(0), weight, x, dx)
    block = (mlp_mask.BLOCK, 1, 1)
    gpu.launch(
        mlp_mask.kernel("mlp_one_output", CODES[x.dtype], 0, vec, lanes), (tiles, blocks, 1),
        block, 0,
        (
            c_void_p(g.data_ptr()), c_int64(g.stride(0)), c_void_p(weight.data_ptr()),
            c_void_p(x.data_ptr()), c_int64(x.stride(0)),
            c_void_p(None if bits is None else bits.data_ptr()),
            c_int32(0 if bits is None else bits.shape[1]), c_float(scale),
            c_void_p(dx.data_ptr()), c_void_p(parts.data_ptr()), c_int32(rows), c_int32(n),
            c_int32(chunk),
        ),
    )  # fmt: skip
    gpu.launch(
        mlp_mask.kernel("mlp_one_output_sums", CODES[x.dtype], CODES[like.dtype], 1, 1),
        (-(-(2 * n + 1) // 32), 1, 1), block, 0,
        (
            c_void_p(parts.data_ptr()), c_int32(blocks), c_int32(n),
            c_void_p(None if of_below is None else of_below.data_ptr()),
            c_void_p(of_weight.data_ptr()),
            c_void_p(None if of_bias is None else of_bias.data_ptr()),
        ),
    )  # fmt: skip
    return Grads(dx, of_below, of_weight, of_bias)


def apart(gpu: Gpu, layer: Layer) -> Grads:
    """By products, each with what follows it: see :mod:`~recast.runtime.mlp.products`."""
    g, weight, x, bits, scale, like, has_bias, below = layer
    of_weight, of_bias = like.new_empty(like.shape), like.new_empty(1) if has_bias else None
    mlp_products.weight_gradient(g, x, of_weight, of_bias)()
    dx, of_below = mlp_products.input_gradient(gpu, g, weight, bits, scale, below)
    return Grads(dx, of_below, of_weight, of_bias)
