"""A linear layer with one output, the last of most models, in one pass over memory each way.

With x (rows, K) its input, w its weight, g (rows, 1) the gradient of its output and Z the gate of
the layer below:

    y  = x w' + b
    dX = scale * (g w) * Z     db below = the column sums of dX     dw = g' X     db = the sum of g

As matrix products these are one outer product and three products with a vector, each of which reads
or writes all of X or dX again. Here X is read once each way, and dX written once
(``mlp_one_output`` in ``csrc/cuda/mlp_one_output.cu``). The faster of the two ways is used, timed
once per shape.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import fastest
from recast.runtime.gpu.cuda_launch import pointer
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import products as mlp_products
from recast.runtime.mlp.mask import CODES, Finish, Gate

_ONE, _APART = "one kernel", "products"
_COMPARED = 4096  # rows of a result to compare, to check that both ways agree
_WIDEST = mlp_mask.MOST // 2  # columns: the kernel counts two sums of each


class Layer(NamedTuple):
    """The inputs of backward."""

    g: Tensor  # (rows, 1)
    weight: Tensor  # (1, K), contiguous
    x: Tensor  # (rows, K), contiguous rows
    gate: Gate | None  # of the layer below; None: no mask
    like: Tensor  # the parameter: its gradient has its shape, and the bias gradient its dtype too
    has_bias: bool
    below: torch.dtype | None  # of the bias gradient of the layer below; None: not wanted


class Grads(NamedTuple):
    """The results of backward."""

    x: Tensor  # (rows, K), with the gate applied
    below: Tensor | None  # (K,)
    weight: Tensor  # (1, K)
    bias: Tensor | None  # (1,)
    finish: Finish | None  # writes all but ``x``; call once, on a stream that waits for this one


def takes(layer: Layer) -> bool:
    """Whether the kernel supports the layer."""
    g, weight, x, like = layer.g, layer.weight, layer.x, layer.like
    out = None if layer.gate is None else layer.gate.out
    if out is not None and (out.data_ptr() != x.data_ptr() or out.stride() != x.stride()):
        return False
    width = x.shape[1]
    if not x.numel() or weight.shape[0] != 1 or not width == weight.shape[1] == like.shape[1]:
        return False
    if not mlp_mask.fits(x) or width > _WIDEST:
        return False
    alike = g.dtype == weight.dtype == x.dtype and {x.dtype, like.dtype} <= CODES.keys()
    return alike and layer.below in (None, like.dtype)


def backward(gpu: Gpu, layer: Layer) -> Grads | None:
    """The gradients by one kernel; None if products are faster, or if nothing can be timed."""
    if not takes(layer):
        return None
    x = layer.x
    sizes = x.shape[0].bit_length(), x.shape[1]
    of = x.get_device(), x.dtype, mlp_products.arithmetic(x.dtype)
    by = None if layer.gate is None else layer.gate.bits is not None
    key = "one output", *of, *sizes, by, layer.like.dtype, layer.has_bias, layer.below
    way = fastest.chosen(key)
    if way is None:

        def compared(found: Grads) -> tuple[Tensor | None, ...]:
            if found.finish is not None:
                found.finish()
            of_g = mlp_products.beside_terms(found.bias, layer.g)
            of_gx = mlp_products.beside_terms(found.weight[0], x, layer.g)
            of_dx = mlp_products.beside_terms(found.below, found.x)
            return found.x[:_COMPARED], of_dx, of_gx, of_g

        ways = {_ONE: partial(in_one, gpu, layer), _APART: partial(apart, gpu, layer)}
        way = fastest.choose(key, ways, x, compared)
    return in_one(gpu, layer) if way == _ONE else None


def forward(gpu: Gpu, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(rows, 1) from ``x`` (rows, K) and ``weight`` (1, K), both with contiguous rows.

    By one kernel or by a product, whichever is faster; all of one dtype of :data:`CODES`.
    """
    rows, n = x.shape

    def product() -> Tensor:
        return F.linear(x, weight, bias)

    if rows < mlp_products.MANY:
        return product()
    of = x.get_device(), x.dtype, mlp_products.arithmetic(x.dtype)
    key = "one output forward", *of, rows.bit_length(), n, bias is None
    way = fastest.chosen(key)
    if way is None:
        ours = partial(read_once, gpu, x, weight, bias)
        way = fastest.choose(key, {_ONE: ours, _APART: product}, x, lambda y: (y[:_COMPARED],))
    return read_once(gpu, x, weight, bias) if way == _ONE else product()


def read_once(gpu: Gpu, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`forward` by one kernel."""
    (rows, n), y = x.shape, x.new_empty(x.shape[0], 1)
    _, blocks, lanes = mlp_mask.cut(gpu, x, "mlp_one_output_forward", whole=True)
    vec = mlp_mask.vec_of(n | x.stride(0), weight, x)
    gpu.launch(
        mlp_mask.kernel("mlp_one_output_forward", CODES[x.dtype], 0, vec, lanes), (1, blocks, 1),
        (mlp_mask.BLOCK, 1, 1), 0,
        (
            c_void_p(x.data_ptr()), c_int64(x.stride(0)), c_void_p(weight.data_ptr()),
            pointer(bias), c_void_p(y.data_ptr()), c_int32(rows), c_int32(n),
        ),
    )  # fmt: skip
    return y


def in_one(gpu: Gpu, layer: Layer) -> Grads:
    """By one kernel, and a second for its sums, which are deterministic."""
    g, weight, x, gate, like, has_bias, below = layer
    rows, n = x.shape
    dx, of_weight = x.new_empty(rows, n), like.new_empty(1, n)
    of_bias = like.new_empty(1) if has_bias else None
    of_below = None if below is None else weight.new_empty(n, dtype=below)
    tiles, blocks, lanes = mlp_mask.cut(gpu, x, "mlp_one_output")
    parts = torch.empty(blocks, 2 * n + 1, dtype=torch.float32, device=x.device)
    vec = mlp_mask.vec_of(n | x.stride(0), weight, x, dx)
    bits = None if gate is None else gate.bits
    by = 0 if gate is None else 2 if bits is None else 1
    gpu.launch(
        mlp_mask.kernel("mlp_one_output", CODES[x.dtype], 0, vec, lanes), (tiles, blocks, 1),
        (mlp_mask.BLOCK, 1, 1), 0,
        (
            c_void_p(g.data_ptr()), c_int64(g.stride(0)), c_void_p(weight.data_ptr()),
            c_void_p(x.data_ptr()), c_int64(x.stride(0)), c_int32(by),
            pointer(bits), c_int32(0 if bits is None else bits.shape[1]),
            c_float(1.0 if gate is None else gate.scale),
            c_void_p(dx.data_ptr()), c_void_p(parts.data_ptr()), c_int32(rows), c_int32(n),
        ),
    )  # fmt: skip
    finish = partial(_join, gpu, x.dtype, parts, of_below, of_weight, of_bias)
    return Grads(dx, of_below, of_weight, of_bias, finish)


def _join(
    gpu: Gpu, of: torch.dtype, parts: Tensor, below: Tensor | None, weight: Tensor,
    bias: Tensor | None,
) -> None:  # fmt: skip
    """The sums of ``parts`` (blocks, 2 n + 1)."""
    blocks, columns = parts.shape
    gpu.launch(
        mlp_mask.kernel("mlp_one_output_sums", CODES[of], CODES[weight.dtype], 1, 1),
        (-(-columns // 32), 1, 1), (mlp_mask.BLOCK, 1, 1), 0,
        (
            c_void_p(parts.data_ptr()), c_int32(blocks), c_int32(columns // 2),
            pointer(below), c_void_p(weight.data_ptr()), pointer(bias),
        ),
    )  # fmt: skip


def apart(gpu: Gpu, layer: Layer) -> Grads:
    """By products, each with what follows it: see :mod:`~recast.runtime.mlp.products`."""
    g, weight, x, gate, like, has_bias, below = layer
    of_weight, of_bias = like.new_empty(like.shape), like.new_empty(1) if has_bias else None
    mlp_products.weight_gradient(g, x, of_weight, of_bias)()
    dx, of_below, finish = mlp_products.input_gradient(gpu, g, weight, gate, below)
    return Grads(dx, of_below, of_weight, of_bias, finish)
