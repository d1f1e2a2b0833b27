"""Dice, the activation of deep interest networks, without the normalisation of its gate.

With a gate of x's shape, and alpha a scalar or one number per column (Zhou et al. 2018, eq. 3)::

    p = sigmoid(gate)
    out = p x + (1 - p) alpha x

The gate is a batch norm of x, another norm, or x itself. Written out in torch, Dice takes some nine
passes over memory forward and twenty backward; here it is two and one.

Backward, with g the gradient of out::

    d x     = g (p + (1 - p) alpha)          beside what comes through the gate
    d gate  = g x (1 - alpha) p (1 - p)
    d alpha = Σ_rows g x (1 - p)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.layers import dice_cuda
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = "(Tensor input, Tensor gate, Tensor alpha) -> Tensor"


def reference(input: Tensor, gate: Tensor, alpha: Tensor) -> Tensor:
    """Plain torch. ``input``, ``gate``: (..., C); ``alpha``: (1,) or (C,)."""
    check(input, gate, alpha)
    p = torch.sigmoid(gate)
    return p * input + (1 - p) * alpha * input


def fake(input: Tensor, gate: Tensor, alpha: Tensor) -> Tensor:
    """Shape and dtype of the result."""
    dtype = torch.promote_types(torch.promote_types(input.dtype, gate.dtype), alpha.dtype)
    return input.new_empty(input.shape, dtype=dtype)


def check(input: Tensor, gate: Tensor, alpha: Tensor) -> None:
    """Raise InputError for shapes that do not fit."""
    if gate.shape != input.shape:
        raise InputError(
            f"dice of {tuple(input.shape)} with a gate of {tuple(gate.shape)}",
            why="the gate has one number for each of the input's",
        )
    if not input.dim() or alpha.dim() != 1 or alpha.shape[0] not in (1, input.shape[-1]):
        raise InputError(
            f"dice of {tuple(input.shape)} with alpha of {tuple(alpha.shape)}",
            why="alpha is one number, or one for each column",
        )


def _flat(x: Tensor) -> Tensor:
    """``x`` as (rows, C) with contiguous rows."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _on_gpu(input: Tensor, gate: Tensor, alpha: Tensor) -> dice_cuda.Activation | None:
    """The call for the GPU kernels; None if they do not support it."""
    there = gpu.serving(input)
    if there is None or not input.numel():
        return None
    check(input, gate, alpha)
    return dice_cuda.activation(there, _flat(input), _flat(gate), alpha)


def _native(input: Tensor, gate: Tensor, alpha: Tensor) -> Any:
    """The CPU kernels; None if they do not support this call."""
    tensors = (input, gate, alpha)
    if not all(t.is_cpu and t.dtype is torch.float32 for t in tensors) or not input.numel():
        return None
    check(*tensors)
    return device.extension()


def _result(native: Any, input: Tensor, p: Tensor, alpha: Tensor) -> Tensor:
    out = input.new_empty(input.shape)
    native.dice_forward(
        _flat(input), _flat(p), alpha.contiguous(), out.view(-1, out.shape[-1]), device.threads()
    )
    return out


def forward(input: Tensor, gate: Tensor, alpha: Tensor) -> Tensor:
    """The result, not recorded by autograd."""
    there = _on_gpu(input, gate, alpha)
    if there is not None:
        return there.forward().view(input.shape)
    native = _native(input, gate, alpha)
    if native is None:
        return reference(input, gate, alpha)
    return _result(native, input, torch.sigmoid(gate), alpha)


class Dice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, native: Any, input: Tensor, gate: Tensor, alpha: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        if isinstance(native, dice_cuda.Activation):
            ctx.save_for_backward(input, None, alpha, gate)
            return native.forward().view(input.shape)
        p = torch.sigmoid(gate)
        ctx.save_for_backward(input, p, alpha, gate)
        return _result(native, input, p, alpha)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        input, p, alpha, gate = ctx.saved_tensors
        there = None if torch.is_grad_enabled() else _on_gpu(input, gate, alpha)
        native = None if torch.is_grad_enabled() or p is None else _native(input, gate, alpha)
        if there is not None:
            of_input, of_gate, of_alpha = there.backward(_flat(grad))
            found = [of_input.view(input.shape), of_gate.view(input.shape), of_alpha]
        elif native is None:
            found = _differentiable_backward(input, gate, alpha, grad)
        else:
            found = _backward(native, input, p, alpha, grad)
        needs = ctx.needs_input_grad[1:]
        return (None, *(g if n else None for g, n in zip(found, needs, strict=True)))


def _backward(native: Any, input: Tensor, p: Tensor, alpha: Tensor, grad: Tensor) -> list[Tensor]:
    of_input, of_gate = (input.new_empty(input.shape) for _ in range(2))
    width = input.shape[-1]
    of_alpha = alpha.new_empty(1, width)
    native.dice_backward(
        _flat(grad), _flat(input), _flat(p), alpha.contiguous(),
        of_input.view(-1, width), of_gate.view(-1, width), of_alpha, device.threads(),
    )  # fmt: skip
    each = of_alpha[0] if alpha.shape[0] == width else of_alpha.sum(1)
    return [of_input, of_gate, each]


def _differentiable_backward(
    input: Tensor, gate: Tensor, alpha: Tensor, grad: Tensor
) -> list[Tensor]:
    """The formulas themselves, in torch."""
    p = torch.sigmoid(gate)
    along = grad * input
    rows = (along * (1 - p)).reshape(-1, input.shape[-1])
    of_alpha = rows.sum(0) if alpha.shape[0] == input.shape[-1] else rows.sum().reshape(1)
    return [grad * (p + (1 - p) * alpha), along * (1 - alpha) * p * (1 - p), of_alpha]


def differentiable(input: Tensor, gate: Tensor, alpha: Tensor) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((input, gate, alpha)):
        return forward(input, gate, alpha)
    native = _on_gpu(input, gate, alpha) or _native(input, gate, alpha)
    if native is None:
        return reference(input, gate, alpha)
    found: Tensor = Dice.apply(native, input, gate, alpha)
    return found


def cost(input: Tensor, gate: Tensor, alpha: Tensor) -> Cost:
    """Nine flops per element; two passes."""
    return Cost(9 * input.numel(), 2 * moved(input) + 3 * moved(gate) + moved(alpha))


def samples() -> list[Sample]:
    """One alpha and many, two and three dimensions, odd sizes, many rows, strides, no rows."""
    g = torch.Generator().manual_seed(29)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return [
        Sample("columns", (rand(6, 9), rand(6, 9), rand(9))),
        Sample("one alpha", (rand(7, 5), rand(7, 5), rand(1))),
        Sample("3-d", (rand(2, 3, 17), rand(2, 3, 17), rand(17))),
        Sample("many rows", (rand(601, 3), rand(601, 3), rand(3))),
        Sample("one column", (rand(5, 1), rand(5, 1), rand(1))),
        Sample("one row", (rand(1, 8), rand(1, 8), rand(8))),
        Sample("empty batch", (rand(0, 8), rand(0, 8), rand(8))),
        Sample("far gates", (rand(4, 6), 200 * rand(4, 6), rand(6))),
        Sample("strided", (rand(8, 6)[::2], rand(4, 14)[:, 2:8], rand(12)[::2])),
        Sample("transposed", (rand(9, 6).t(), rand(9, 6).t(), rand(9))),
    ]


dice = register(
    Op(
        name="dice",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        devices=("cpu", "cuda"),
        kernels=(
            Kernel("cuda", "cuda", dice_cuda.CONDITION, cuda_launch.why_not),
            *cpu_kernels("float32"),
            Kernel("torch", "cpu", "any others", lambda: None),
        ),
    )
)
