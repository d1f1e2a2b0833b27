"""A value under an activated gate, as in SwiGLU and GEGLU.

With x the gate and v the value, of one shape::

    out = act(x) v              act: "silu", "gelu" or "gelu_tanh"

In torch it takes two passes over memory forward and three backward, and keeps act(x); here it is
one and one, and act(x) is computed again in backward. A few numbers run in torch: there the call
itself is what costs. How many are a few depends on the activation and on whether autograd records
the call; see ``_FEW``.

Backward, with g the gradient of out::

    d x = g v act'(x)           d v = g act(x)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.errors import InputError
from recast.runtime import device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = "(Tensor gate, Tensor value, str activation) -> Tensor"


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
}


def reference(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """Plain torch. ``gate``, ``value``: of one shape, floating."""
    check(gate, value, activation)
    return ACTIVATIONS[activation](gate) * value


def fake(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """Shape and dtype of the result."""
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, value.dtype))


def check(gate: Tensor, value: Tensor, activation: str) -> None:
    """Raise InputError for arguments that do not fit."""
    if activation not in ACTIVATIONS:
        raise InputError(
            f"gated_activation by {activation!r}", why=f"one of {', '.join(ACTIVATIONS)}"
        )
    if gate.shape != value.shape:
        raise InputError(
            f"gated_activation of {tuple(value.shape)} with a gate of {tuple(gate.shape)}",
            why="the gate has one number for each of the value's",
        )


# ---------------------------------------------------------------- forward and backward

# Elements from which the kernels are at least as fast: when nothing is recorded, and when autograd
# records. With half as many, torch takes 0.8 to 0.9 of the time; gelu trains alike at any size.
_FEW = {"silu": (1 << 16, 1 << 16), "gelu": (1 << 15, 0), "gelu_tanh": (1 << 13, 1 << 14)}


def _flat(x: Tensor) -> Tensor:
    """``x`` as (rows, n) with contiguous rows."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _native(gate: Tensor, value: Tensor, activation: str, recorded: bool) -> Any:
    """The CPU kernels; None if they do not support this call, or torch is faster."""
    count = gate.numel()
    if activation in _FEW and count < _FEW[activation][recorded] and not device.forced():
        return None
    if not all(t.is_cpu and t.dtype is torch.float32 for t in (gate, value)) or not count:
        return None
    check(gate, value, activation)
    return device.extension()


def _run(native: Any, gate: Tensor, value: Tensor, activation: str) -> Tensor:
    out = gate.new_empty(gate.shape)
    native.gated_activation_forward(
        activation, _flat(gate), _flat(value), _flat(out), device.threads()
    )
    return out


def forward(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """The result, not recorded by autograd."""
    native = _native(gate, value, activation, False)
    if native is None:
        return reference(gate, value, activation)
    return _run(native, gate, value, activation)


class GatedActivation(torch.autograd.Function):
    """Inputs: the kernels, the gate, the value and the name of the activation."""

    @staticmethod
    def forward(ctx: Any, native: Any, gate: Tensor, value: Tensor, activation: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.activation = activation
        ctx.save_for_backward(gate, value)
        return _run(native, gate, value, activation)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        gate, value = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:3]
        native = None if torch.is_grad_enabled() else device.extension()
        if native is None:
            made = _differentiable_backward(gate, value, ctx.activation, grad)
            found = [g if n else None for g, n in zip(made, needs, strict=True)]
            return None, *found, None
        found = [gate.new_empty(gate.shape) if n else None for n in needs]
        native.gated_activation_backward(
            ctx.activation, _flat(grad), _flat(gate), _flat(value),
            *(None if g is None else _flat(g) for g in found), device.threads(),
        )  # fmt: skip
        return None, *found, None


def _differentiable_backward(
    gate: Tensor, value: Tensor, activation: str, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The formulas themselves, in torch."""
    return grad * value * _slope(gate, activation), grad * ACTIVATIONS[activation](gate)


def _slope(x: Tensor, activation: str) -> Tensor:
    """The derivative of the activation at ``x``."""
    if activation == "silu":
        p = torch.sigmoid(x)
        return p * (1 + x * (1 - p))
    if activation == "gelu":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density
    root = math.sqrt(2 / math.pi)
    t = torch.tanh(root * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)


def differentiable(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((gate, value)):
        return forward(gate, value, activation)
    native = _native(gate, value, activation, True)
    if native is None:
        return reference(gate, value, activation)
    found: Tensor = GatedActivation.apply(native, gate, value, activation)
    return found


# ---------------------------------------------------------------- cost, samples


def cost(gate: Tensor, value: Tensor, activation: str) -> Cost:
    """Ten flops per element; three passes."""
    return Cost(10 * gate.numel(), 2 * moved(gate) + moved(value))


def samples() -> list[Sample]:
    """Every activation, odd sizes, many rows, long rows, far gates, strides, no rows."""
    g = torch.Generator().manual_seed(43)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    return [
        Sample("silu", (rand(6, 9), rand(6, 9), "silu")),
        Sample("gelu", (rand(6, 9), rand(6, 9), "gelu")),
        Sample("gelu by tanh", (rand(6, 9), rand(6, 9), "gelu_tanh")),
        Sample("3-d", (rand(2, 3, 17), rand(2, 3, 17), "silu")),
        Sample("many rows", (rand(601, 67), rand(601, 67), "gelu")),
        Sample("one column", (rand(5, 1), rand(5, 1), "gelu_tanh")),
        Sample("one vector", (rand(17), rand(17), "silu")),
        Sample("one number", (rand(1)[0], rand(1)[0], "gelu")),
        Sample("empty batch", (rand(0, 8), rand(0, 8), "silu")),
        Sample("far silu", (60 * rand(4, 6), rand(4, 6), "silu")),
        Sample("far gelu", (20 * rand(4, 6), rand(4, 6), "gelu")),
        Sample("far gelu by tanh", (20 * rand(4, 6), rand(4, 6), "gelu_tanh")),
        Sample("strided", (rand(8, 6)[::2], rand(4, 14)[:, 2:8], "silu")),
        Sample("transposed", (rand(9, 6).t(), rand(6, 9), "gelu")),
        Sample("halves of long rows", (*rand(2, 33_002).chunk(2, 1), "gelu_tanh")),
    ]


gated_activation = register(
    Op(
        name="gated_activation",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        kernels=(
            *cpu_kernels(
                "float32; "
                + ", ".join(
                    f"{n} of {usual} numbers or more"
                    + f" (in training {recorded})" * (usual != recorded)
                    for n, (usual, recorded) in _FEW.items()
                )
            ),
            Kernel("torch", "cpu", "any others", lambda: None),
        ),
        not_worth={"cuda": "there is no kernel for it yet; torch's two calls run"},
    )
)
