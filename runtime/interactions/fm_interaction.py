"""Second-order factorisation machine: all pairwise products of feature vectors, in linear time.

With F feature vectors v_f of length D in a sample (Rendle 2010, equation 5)::

    out = scale · ((Σ_f v_f)² - Σ_f v_f²)            (B, D), column by column
        = 2 scale · Σ_{f<g} v_f · v_g                so scale 1/2 is the sum over pairs

``reduce`` sums over D too: (B, 1), the interaction of an FM; without it, the bi-interaction of NFM.
Neither the squares nor a stack of the features is ever written.

Backward::

    d v_f = 2 scale · grad · (Σ_g v_g - v_f)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any, Protocol

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.batched_grads import each_of_batch
from recast.runtime.cost import Cost, moved
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.interactions import fm_cuda
from recast.runtime.interactions.features import check_features, stacked
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = "(Tensor[] features, float scale, bool reduce) -> Tensor"


# ---------------------------------------------------------------- the definition


def reference(features: Sequence[Tensor], scale: float, reduce: bool) -> Tensor:
    """Plain torch. ``features``: (B, D) or (B, f, D) each."""
    check_features(features, "fm_interaction")
    vectors = stacked(features)
    out = scale * (vectors.sum(1).pow(2) - vectors.pow(2).sum(1))
    return out.sum(1, keepdim=True) if reduce else out


def fake(features: Sequence[Tensor], scale: float, reduce: bool) -> Tensor:
    """Shape and dtype of the result."""
    first = features[0]
    dtype = fold(torch.promote_types, (t.dtype for t in features))
    return first.new_empty((first.shape[0], 1 if reduce else first.shape[-1]), dtype=dtype)


# ---------------------------------------------------------------- the kernels


class Call(Protocol):
    """One call as kernels read it; the features must live on."""

    def forward(self) -> Tensor:
        """The result."""

    def backward(self, grad: Tensor, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        """The gradients of the features, at least of those that ``needs`` one."""


@dataclass(frozen=True, slots=True)
class _OnCpu:
    """A call of the C++ kernels."""

    native: Any
    features: list[Tensor]
    scale: float
    reduce: bool

    def forward(self) -> Tensor:
        out = fake(self.features, self.scale, self.reduce)
        self.native.forward(out, self.scale, device.threads())
        return out

    def backward(self, grad: Tensor, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        rows = [f.shape[1] if f.dim() == 3 else 1 for f in self.features]
        whole = grad.new_empty((grad.shape[0], sum(rows), self.features[0].shape[-1]))
        self.native.backward(grad, self.scale, [whole], device.threads())
        parts = torch.split_with_sizes(whole, rows, 1)
        pairs = zip(parts, self.features, strict=True)
        return [part if f.dim() == 3 else part.squeeze(1) for part, f in pairs]


def _call(features: list[Tensor], scale: float, reduce: bool) -> Call | None:
    """The call for the device's kernels; None if they do not support it."""
    there = gpu.serving(features[0]) if features else None
    if there is not None:
        check_features(features, "fm_interaction")
        return fm_cuda.interaction(there, features, scale, reduce)
    extension = device.extension()
    if extension is None or not all(f.is_cpu for f in features):
        return None
    native = extension.fm_interaction(features)
    return None if native is None else _OnCpu(native, features, scale, reduce)


# ---------------------------------------------------------------- forward and backward


def forward(features: list[Tensor], scale: float, reduce: bool) -> Tensor:
    """The result, not recorded by autograd."""
    call = _call(features, scale, reduce)
    return reference(features, scale, reduce) if call is None else call.forward()


class FmInteraction(torch.autograd.Function):
    """Inputs: the call, scale, reduce, then the features."""

    @staticmethod
    def forward(ctx: Any, call: Call, scale: float, reduce: bool, *features: Tensor) -> Tensor:
        ctx.scale, ctx.reduce = scale, reduce
        ctx.save_for_backward(*features)
        if torch._C._len_torch_dispatch_stack():
            return fm_interaction.target(list(features), scale, reduce)
        return call.forward()

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, needs = list(ctx.saved_tensors), ctx.needs_input_grad[3:]
        call = None if torch.is_grad_enabled() else _call(features, ctx.scale, ctx.reduce)
        if call is None:
            return (None, None, None, *_differentiable_backward(features, ctx.scale, grad))
        found = call.backward(grad if grad.stride(1) == 1 else grad.contiguous(), needs)
        return (None, None, None, *(g if n else None for g, n in zip(found, needs, strict=True)))


def _differentiable_backward(
    features: Sequence[Tensor], scale: float, grad: Tensor
) -> list[Tensor]:
    """The formula itself, in torch."""
    total = stacked(features).sum(1)
    upstream = 2 * scale * grad
    return [
        upstream * (total - f) if f.dim() == 2 else upstream.unsqueeze(1) * (total.unsqueeze(1) - f)
        for f in features
    ]


def differentiable(features: list[Tensor], scale: float, reduce: bool) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((features,)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return fm_interaction.target(features, scale, reduce)
        return forward(features, scale, reduce)
    call = _call(features, scale, reduce)
    if call is None:
        return reference(features, scale, reduce)
    return FmInteraction.apply(call, scale, reduce, *features)


def autocast(dtype: torch.dtype, features: list[Tensor], scale: float, reduce: bool) -> Tensor:
    """Under autocast on a GPU, which raises squares and sums to fp32."""
    wide = [f.float() if f.dtype in (torch.float16, torch.bfloat16) else f for f in features]
    return differentiable(wide, scale, reduce)


# ---------------------------------------------------------------- cost, samples


def cost(features: Sequence[Tensor], scale: float, reduce: bool) -> Cost:
    """Three flops an element; features read once, the result written once."""
    first = features[0]
    written = first.shape[0] * (1 if reduce else first.shape[-1]) * first.element_size()
    return Cost(3 * sum(f.numel() for f in features), moved(*features) + written)


def samples() -> list[Sample]:
    """Odd sizes, vectors and stacks, strides, one vector, one row, no rows."""
    g = torch.Generator().manual_seed(17)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    many = [rand(6, 16) for _ in range(27)]
    return [
        Sample("stack", ([rand(6, 10, 16)], 0.5, False)),
        Sample("stack summed", ([rand(6, 10, 16)], 0.5, True)),
        Sample("vectors", (many, 0.5, True)),
        Sample("vector and stack", ([rand(5, 9), rand(5, 4, 9)], 1.0, False)),
        Sample("odd width summed", ([rand(7, 3, 67)], 0.5, True)),
        Sample("one column", ([rand(7, 3, 1)], 0.5, False)),
        Sample("one vector", ([rand(3, 8)], 0.5, True)),
        Sample("one row", ([rand(1, 7, 130)], -2.0, False)),
        Sample("empty batch", ([rand(0, 4, 8)], 0.5, True)),
        Sample("strided batch", ([rand(12, 4, 8)[::2], rand(6, 8, 3)[:, :, 1]], 0.5, False)),
        Sample("transposed", ([rand(6, 9, 5).transpose(1, 2)], 0.5, True)),
        Sample("broadcast", ([rand(6, 9), rand(1, 9).expand(6, 9)], 0.5, False)),
    ]


fm_interaction = register(
    Op(
        name="fm_interaction",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        autocast=autocast,
        devices=("cpu", "cuda"),
        takes_stacks=True,
        kernels=(
            Kernel("cuda", "cuda", fm_cuda.CONDITION, cuda_launch.why_not),
            *cpu_kernels("float32 features, no autocast"),
            Kernel("torch", "cpu", "any other features", lambda: None),
        ),
    )
)
