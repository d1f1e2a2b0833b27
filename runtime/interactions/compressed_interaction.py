"""A layer of a compressed interaction network (xDeepFM): products of all pairs, then a mixture.

With H feature vectors x_h and M feature vectors y_m of length D in a sample (Lian et al. 2018,
equation 6)::

    out[o] = act( Σ_{h,m} W[o, h M + m] · x_h ∘ y_m + bias[o] )        (B, O, D), column by column

``act`` is ``relu`` or nothing. In plain torch the products are a (B, H M, D) tensor, which a
``Conv1d`` of kernel size 1 reads; here they exist in registers only.

Backward, with g = grad where the relu let through, else 0::

    p[h, m] = Σ_o W[o, h M + m] g[o]       dx_h = Σ_m p[h, m] ∘ y_m       dy_m = Σ_h p[h, m] ∘ x_h
    dW[o, h M + m] = Σ g[o] ∘ x_h ∘ y_m    dbias[o] = Σ g[o]              over samples and columns
"""

from __future__ import annotations

import dataclasses
from functools import reduce as fold
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device, partials
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.interactions import cin_tiles, compressed_cuda
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = "(Tensor x, Tensor y, Tensor weight, Tensor? bias, bool relu) -> Tensor"
# Columns (B D) up to which torch's call is faster on a CPU without gradients: 0.1 to 0.6 of our
# time at 16 to 128, 2 to 6 times our time at 256. Our kernel computes whole blocks of columns.
FEW = 128


# ---------------------------------------------------------------- the definition


def reference(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Plain torch. ``x``: (B, H, D), ``y``: (B, M, D), ``weight``: (O, H M) or (O, H M, 1)."""
    check(x, y, weight, bias)
    products = (x.unsqueeze(2) * y.unsqueeze(1)).flatten(1, 2)
    out = F.conv1d(products, weight if weight.dim() == 3 else weight.unsqueeze(2), bias)
    return F.relu(out) if relu else out


def fake(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Shape and dtype of the result."""
    dtype = fold(torch.promote_types, (x.dtype, y.dtype))
    return x.new_empty((x.shape[0], weight.shape[0], x.shape[2]), dtype=dtype)


def check(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise InputError for shapes that do not fit."""
    if x.dim() != 3 or y.dim() != 3 or x.shape[0] != y.shape[0] or x.shape[2] != y.shape[2]:
        raise InputError(
            f"compressed_interaction of {tuple(x.shape)} and {tuple(y.shape)}",
            why="the two are (batch, features, dim) of one batch and dim",
        )
    products = x.shape[1] * y.shape[1]
    if weight.dim() not in (2, 3) or weight.shape[1:] not in ((products,), (products, 1)):
        raise InputError(
            f"the weight of a compressed_interaction has shape {tuple(weight.shape)}",
            why=f"it mixes {products} products: (outputs, {products}) or (outputs, {products}, 1)",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias of shape {tuple(bias.shape)} for {weight.shape[0]} outputs")


# ---------------------------------------------------------------- forward and backward


def forward(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """The result, not recorded by autograd."""
    few = x.shape[0] * x.shape[-1] <= FEW and x.is_cpu and gpu.serving(x) is None
    native = None if few and not device.forced() else _native(x, y, weight, bias)
    if native is None:
        return reference(x, y, weight, bias, relu)
    return _run(native, x, y, weight, relu)


def _native(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, casts: bool = False) -> Any:
    """The call as kernels read it; None if they do not support it.

    ``casts``: products are rounded to the weight's dtype, as autocast does.
    """
    flat = weight.squeeze(2) if weight.dim() == 3 and weight.shape[2] == 1 else weight
    there = gpu.serving(x)
    if there is not None:
        check(x, y, weight, bias)
        if not casts and x.dtype != weight.dtype:
            return None
        return compressed_cuda.interaction(there, x, y, flat, bias)
    extension = device.extension()
    return None if extension is None else extension.compressed_interaction(x, y, flat, bias)


def _run(native: Any, x: Tensor, y: Tensor, weight: Tensor, relu: bool) -> Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0], x.shape[2]), dtype=weight.dtype)
    native.forward(out, relu, device.threads())
    return out


class CompressedInteraction(torch.autograd.Function):
    """Inputs: the native call, relu, x, y, weight, bias."""

    @staticmethod
    def forward(
        ctx: Any, native: Any, relu: bool, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.relu = relu
        if torch._C._len_torch_dispatch_stack():
            out = compressed_interaction.target(x, y, weight, bias, relu)
        else:
            out = _run(native, x, y, weight, relu)
        ctx.save_for_backward(x, y, weight, bias, out if relu else None)
        return out

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, out = ctx.saved_tensors
        native = None if torch.is_grad_enabled() else _native(x, y, weight, bias, casts=True)
        needs = ctx.needs_input_grad[2:]
        if native is None:
            return (None, None, *_differentiable_backward(ctx, needs, grad))
        if isinstance(native, cin_tiles.Tiles):
            native = dataclasses.replace(native, result=out)
        elif ctx.relu:
            grad = grad.masked_fill(out <= 0, 0)
        if grad.stride(2) != 1:
            grad = grad.contiguous()
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        dw, db = weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])
        native.backward(grad, dx, dy, dw, db, device.threads())
        found = (dx, dy, dw, db)
        return (None, None, *(g if need else None for g, need in zip(found, needs, strict=True)))


def _differentiable_backward(
    ctx: Any, needs: tuple[bool, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """In plain torch: for ``create_graph``, and if settings have changed since forward."""
    further = torch.is_grad_enabled()
    *inputs, passed = ctx.saved_tensors
    if further:
        own = partials.apart(inputs)
    else:
        own = [
            None if t is None else t.detach().requires_grad_(need)
            for t, need in zip(inputs, needs, strict=True)
        ]
        grad = grad.masked_fill(passed <= 0, 0) if ctx.relu else grad
    x, y, weight, bias = own
    with torch.enable_grad():
        products = (x.unsqueeze(2) * y.unsqueeze(1)).flatten(1, 2).to(weight.dtype)
        out = F.conv1d(products, weight if weight.dim() == 3 else weight.unsqueeze(2), bias)
        out = F.relu(out) if ctx.relu and further else out
    return tuple(partials.gradients([out], own, needs, [grad], further=further))


def differentiable(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((x, y, weight, bias)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return compressed_interaction.target(x, y, weight, bias, relu)
        return forward(x, y, weight, bias, relu)
    native = _native(x, y, weight, bias)
    if native is None:
        return reference(x, y, weight, bias, relu)
    return CompressedInteraction.apply(native, relu, x, y, weight, bias)


def autocast(
    dtype: torch.dtype, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, relu: bool
) -> Tensor:
    """The call under autocast on a GPU: products of the inputs as given, rounded when computed."""
    kind = x.device.type
    wide, casts = torch.promote_types(x.dtype, y.dtype), {x.dtype, y.dtype, weight.dtype}
    if casts <= {torch.float32, torch.float16, torch.bfloat16}:
        first, second = x.to(wide), y.to(wide)
        low, beside = weight.to(dtype), None if bias is None else bias.to(dtype)
        native = _native(first, second, low, beside, casts=True)
        if native is not None and not wants_grad((x, y, weight, bias)):
            return _run(native, first, second, low, relu)
        if native is not None:
            return CompressedInteraction.apply(native, relu, first, second, low, beside)
    with torch.autocast(kind, dtype):
        return reference(x, y, weight, bias, relu)


# ---------------------------------------------------------------- cost, samples


def cost(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Cost:
    """A product and O multiply-adds per pair and column; each operand read once."""
    columns, products = x.shape[0] * x.shape[2], x.shape[1] * y.shape[1]
    outputs = weight.shape[0]
    written = columns * outputs * x.element_size()
    return Cost(columns * products * (2 * outputs + 1), moved(x, y, weight, bias) + written)


def samples() -> list[Sample]:
    """Odd numbers of everything, one of everything, x with itself, strides, no rows."""
    g = torch.Generator().manual_seed(19)

    def one(
        label: str, batch: int, sizes: tuple[int, int], dim: int, outputs: int, **how: Any
    ) -> Sample:
        x, y = (torch.randn(batch, size, dim, generator=g) for size in sizes)
        weight = torch.randn(outputs, sizes[0] * sizes[1], generator=g)
        if how.get("conv"):
            weight = weight.unsqueeze(2)
        bias = torch.randn(outputs, generator=g) if how.get("bias", True) else None
        return Sample(label, (x, y, weight, bias, how.get("relu", False)))

    x = torch.randn(5, 4, 10, generator=g)
    weight = torch.randn(6, 16, generator=g)
    return [
        one("layer", 6, (10, 10), 16, 16, relu=True, conv=True),
        one("no bias", 5, (3, 8), 16, 5, bias=False),
        one("odd sizes", 7, (5, 3), 11, 19, relu=True),
        one("many outputs", 3, (4, 7), 8, 50, conv=True),
        one("one of each", 4, (1, 1), 1, 1),
        one("one row", 1, (6, 5), 33, 9, relu=True),
        one("empty batch", 0, (3, 4), 8, 5, relu=True),
        Sample("with itself", (x, x, weight, None, False)),
        Sample("strided", (x[:, ::2][:, :2], x[:, 2:], weight[:, ::4], None, True)),
        Sample("transposed", (x.transpose(1, 2)[:, :4], x[:, :, :4], weight, None, False)),
    ]


compressed_interaction = register(
    Op(
        name="compressed_interaction",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        devices=("cpu", "cuda"),
        autocast=autocast,
        kernels=(
            Kernel("cuda", "cuda", compressed_cuda.CONDITION, cuda_launch.why_not),
            *cpu_kernels("float32, contiguous columns, no autocast"),
            Kernel("torch", "cpu", "anything else", lambda: None),
        ),
    )
)
