"""RMS norm: each row over the root of the mean of its squares.

With x (..., n), w (n,) or none::

    out = x r w,    r = 1 / sqrt(mean(x², -1) + eps)

``rounding`` says where numbers narrower than the sums are rounded; in float32 all three are alike:

=========  ======================================================================================
"none"     all is computed in the dtype of x, the result has the promoted dtype of x and w
"unit"     x r is computed in float32 and rounded to x's dtype, then multiplied by w
"torch"    ``F.rms_norm``; an ``eps`` of None is torch's default, which depends on the dtype
=========  ======================================================================================

By hand, and in torch on a CPU, it takes six passes over memory forward and some fifteen backward;
here it is one and one.

Backward, with g the gradient of out::

    d x = r (g w - x r² mean(g w x))        d w = Σ_rows g x r
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = "(Tensor input, Tensor? weight, float? eps, str rounding) -> Tensor"
ROUNDINGS = ("none", "unit", "torch")


def reference(input: Tensor, weight: Tensor | None, eps: float | None, rounding: str) -> Tensor:
    """Plain torch. ``input``: (..., n), floating; ``weight``: (n,) or None."""
    check(input, weight, eps, rounding)
    if rounding == "torch":
        return F.rms_norm(input, input.shape[-1:], weight, eps)
    wide = input.float() if rounding == "unit" else input
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _epsilon(input, eps))
    if rounding == "unit":
        unit = unit.type_as(input)
    return unit if weight is None else unit * weight


def fake(input: Tensor, weight: Tensor | None, eps: float | None, rounding: str) -> Tensor:
    """Shape and dtype of the result."""
    dtype = input.dtype
    if weight is not None and rounding != "torch":
        dtype = torch.promote_types(dtype, weight.dtype)
    return input.new_empty(input.shape, dtype=dtype)


def check(input: Tensor, weight: Tensor | None, eps: float | None, rounding: str) -> None:
    """Raise InputError for arguments that do not fit."""
    if rounding not in ROUNDINGS:
        raise InputError(f"rms_norm rounds {rounding!r}", why=f"one of {', '.join(ROUNDINGS)}")
    if not input.dim() or not input.is_floating_point():
        raise InputError(
            f"rms_norm of {tuple(input.shape)} in {input.dtype}", why="rows of floating numbers"
        )
    if weight is not None and weight.shape != input.shape[-1:]:
        raise InputError(
            f"rms_norm of {tuple(input.shape)} with a weight of {tuple(weight.shape)}",
            why="the weight is one number for each column",
        )
    if eps is None and rounding != "torch":
        raise InputError("rms_norm without eps", why="only torch's own has a default")


def _epsilon(input: Tensor, eps: float | None) -> float:
    """``eps``, or torch's default for it."""
    return torch.finfo(input.dtype).eps if eps is None else eps


# ---------------------------------------------------------------- forward and backward


def _flat(x: Tensor) -> Tensor:
    """``x`` as (rows, n) with contiguous rows."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _native(input: Tensor, weight: Tensor | None, eps: float | None, rounding: str) -> Any:
    """The CPU kernels; None if they do not support this call."""
    tensors = (input,) if weight is None else (input, weight)
    if not all(t.is_cpu and t.dtype is torch.float32 for t in tensors) or not input.numel():
        return None
    check(input, weight, eps, rounding)
    return device.extension()


def _run(
    native: Any, input: Tensor, weight: Tensor | None, eps: float | None, inverse: Tensor | None
) -> Tensor:
    out = input.new_empty(input.shape)
    native.rms_norm_forward(
        _flat(input), None if weight is None else weight.contiguous(), _epsilon(input, eps),
        out.view(-1, out.shape[-1]), inverse, device.threads(),
    )  # fmt: skip
    return out


def forward(input: Tensor, weight: Tensor | None, eps: float | None, rounding: str) -> Tensor:
    """The result, not recorded by autograd."""
    native = _native(input, weight, eps, rounding)
    if native is None:
        return reference(input, weight, eps, rounding)
    return _run(native, input, weight, eps, None)


class RmsNorm(torch.autograd.Function):
    """Inputs: the kernels, x, w or None, and eps."""

    @staticmethod
    def forward(
        ctx: Any, native: Any, input: Tensor, weight: Tensor | None, eps: float | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.eps = _epsilon(input, eps)
        inverse = input.new_empty(input.numel() // input.shape[-1])
        ctx.save_for_backward(input, weight, inverse)
        return _run(native, input, weight, eps, inverse)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        input, weight, inverse = ctx.saved_tensors
        native = None if torch.is_grad_enabled() else device.extension()
        if native is None:
            found = _differentiable_backward(input, weight, ctx.eps, grad)
            needs = ctx.needs_input_grad[1:3]
            return (None, *(g if n else None for g, n in zip(found, needs, strict=True)), None)
        of_input = input.new_empty(input.shape) if ctx.needs_input_grad[1] else None
        of_weight = weight.new_empty(weight.shape) if ctx.needs_input_grad[2] else None
        native.rms_norm_backward(
            _flat(grad), _flat(input), None if weight is None else weight.contiguous(), inverse,
            None if of_input is None else of_input.view(-1, input.shape[-1]), of_weight,
            device.threads(),
        )  # fmt: skip
        return None, of_input, of_weight, None


def _differentiable_backward(
    input: Tensor, weight: Tensor | None, eps: float, grad: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The formulas themselves, in torch."""
    r = torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + eps)
    scaled = grad if weight is None else grad * weight
    mean = (scaled * input).mean(-1, keepdim=True)
    of_input = r * (scaled - input * r.pow(2) * mean)
    if weight is None:
        return of_input, None
    return of_input, (grad * input * r).reshape(-1, input.shape[-1]).sum(0)


def differentiable(
    input: Tensor, weight: Tensor | None, eps: float | None, rounding: str
) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((input, weight)):
        return forward(input, weight, eps, rounding)
    native = _native(input, weight, eps, rounding)
    if native is None:
        return reference(input, weight, eps, rounding)
    found: Tensor = RmsNorm.apply(native, input, weight, eps)
    return found


# ---------------------------------------------------------------- cost, samples


def cost(input: Tensor, weight: Tensor | None, eps: float | None, rounding: str) -> Cost:
    """Four flops per element; two passes."""
    return Cost(4 * input.numel(), 2 * moved(input) + (0 if weight is None else moved(weight)))


def samples() -> list[Sample]:
    """With and without weight, every rounding, odd sizes, many rows, strides, no rows."""
    g = torch.Generator().manual_seed(37)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return [
        Sample("columns", (rand(6, 9), rand(9), 1e-6, "none")),
        Sample("no weight", (rand(7, 5), None, 1e-5, "none")),
        Sample("multiple of registers", (rand(6, 64), rand(64), 1e-6, "none")),
        Sample("torch's", (rand(5, 8), rand(8), 1e-3, "torch")),
        Sample("3-d", (rand(2, 3, 67), rand(67), 1e-6, "none")),
        Sample("4-d", (rand(2, 3, 2, 64), rand(64), 1e-6, "none")),
        Sample("many rows", (rand(601, 33), rand(33), 1e-6, "none")),
        Sample("one column", (rand(5, 1), rand(1), 1e-2, "none")),
        Sample("one row", (rand(1, 130), rand(130), 1e-6, "torch")),
        Sample("one vector", (rand(17), rand(17), 1e-6, "none")),
        Sample("empty batch", (rand(0, 8), rand(8), 1e-6, "none")),
        Sample("zeros", (torch.zeros(3, 8), rand(8), 1e-2, "none")),
        Sample("strided", (rand(8, 6)[::2], rand(12)[::2], 1e-6, "none")),
        Sample("transposed", (rand(9, 6).t(), rand(9), 1e-6, "none")),
    ]


rms_norm = register(
    Op(
        name="rms_norm",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        kernels=(
            *cpu_kernels("float32, no autocast"),
            Kernel("torch", "cpu", "any others", lambda: None),
        ),
        not_worth={"cuda": "there is no kernel for it, and torch compiles its own"},
    )
)
