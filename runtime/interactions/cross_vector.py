"""A cross network of vectors (DCN): each layer scales the first features by a number per sample.

With x_0 the first features and x the network's starting value, often x_0 itself (Wang et al. 2017,
equation 3)::

    x_{l+1} = x_0 (x_l · w_l + c_l) + b_l + x_l                (B, d); c_l is a number, often absent

All layers are x_l = a_l x_0 + x + β_l, with a number a_l for each sample and the same β_l for all::

    a_{l+1} = a_l + a_l (x_0 · w_l) + (x · w_l) + (β_l · w_l + c_l)          β_{l+1} = β_l + b_l

so one pass over x_0 computes all products and another writes the result, whatever the number of
layers. Plain torch makes six passes per layer, and twice as many in backward.

Backward, with g = grad, from the last layer to the first (e_L = g · x_0, sums over samples)::

    dx_0 = a_L g + Σ_l e_{l+1} a_l w_l     dw_l = Σ e_{l+1} (a_l x_0 + x + β_l)    dc_l = Σ e_{l+1}
    dx = g + Σ_l e_{l+1} w_l               db_k = Σ g + Σ_{l>k} dc_l w_l
    e_l = e_{l+1} (1 + x_0 · w_l)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from recast.runtime.interactions import cross_cuda
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = "(Tensor x0, Tensor x, Tensor[] weights, Tensor?[] scalars, Tensor?[] biases) -> Tensor"

# Elements of x_0 from which one call beats torch's on a CPU: Python costs some 100 us.
WORTH = 1 << 15

Given = Sequence[Tensor | None]


# ---------------------------------------------------------------- the definition


def reference(
    x0: Tensor, x: Tensor, weights: Sequence[Tensor], scalars: Given, biases: Given
) -> Any:
    """Plain torch. ``x0``, ``x``: (..., d); weights and biases: d numbers, scalars: one, any shape.

    A missing scalar or bias is None.
    """
    check(x0, x, weights, scalars, biases)
    for weight, scalar, bias in zip(weights, scalars, biases, strict=True):
        product = F.linear(x, weight.reshape(1, -1), None if scalar is None else scalar.reshape(1))
        crossed = x0 * product
        x = (crossed if bias is None else crossed + bias.reshape(-1)) + x
    return x.contiguous() if weights else x.clone(memory_format=torch.contiguous_format)


def fake(x0: Tensor, x: Tensor, weights: Sequence[Tensor], scalars: Given, biases: Given) -> Tensor:
    """Shape and dtype of the result."""
    given = (t.dtype for t in (x0, x, *weights, *scalars, *biases) if t is not None)
    return x0.new_empty(x0.shape, dtype=fold(torch.promote_types, given))


def check(x0: Tensor, x: Tensor, weights: Sequence[Tensor], scalars: Given, biases: Given) -> None:
    """Raise InputError for shapes that do not fit."""
    if x0.dim() < 1 or x0.shape != x.shape:
        raise InputError(
            f"a cross network from {tuple(x.shape)} with first features {tuple(x0.shape)}",
            why="both are (..., d), of one shape",
        )
    if not len(weights) == len(scalars) == len(biases):
        raise InputError(
            f"{len(weights)} weights, {len(scalars)} scalars and {len(biases)} biases",
            why="every layer of a cross network has one of each; None for one that it lacks",
        )
    for name, tensors, size in (
        ("weight", weights, x0.shape[-1]), ("scalar", scalars, 1), ("bias", biases, x0.shape[-1]),
    ):  # fmt: skip
        for layer, tensor in enumerate(tensors):
            if tensor is not None and tensor.numel() != size:
                raise InputError(
                    f"the {name} of cross layer {layer} has shape {tuple(tensor.shape)}",
                    why=f"it holds {size} numbers",
                )


# ---------------------------------------------------------------- the kernels


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the kernels, and the tensors they read."""

    native: Any
    rows: Tensor  # x_0, (B, d)
    start: Tensor | None  # x, (B, d); None: it is x_0
    weights: Tensor  # (L, d)
    before: Tensor | None  # (L, d): the sum of the biases before each layer; None: none has one
    offsets: Tensor  # (L,): before · weight + scalar
    beta: Tensor | None  # (d,)

    def forward(self, shape: torch.Size) -> Tensor:
        out = torch.empty_like(self.rows, memory_format=torch.contiguous_format)
        self.native.forward(out, self.beta, device.threads())
        return out.view(shape)

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """Gradients of x_0, x, and (L, d), (L, d), (L,) of weights, biases and scalars."""
        dx0 = torch.empty_like(self.rows, memory_format=torch.contiguous_format)
        dx = None if self.start is None else torch.empty_like(dx0)
        dw, db = torch.empty_like(self.weights), torch.empty_like(self.weights[0])
        dc = torch.empty_like(self.offsets)
        self.native.backward(_rows(grad), dx0, dx, dw, db, dc, device.threads())
        if self.before is not None:
            dw.addcmul_(dc.unsqueeze(1), self.before)
        later = dc.unsqueeze(1) * self.weights
        later = later.flip(0).cumsum(0).flip(0) - later
        return dx0, dx, dw, later.add_(db), dc


def _rows(x: Tensor) -> Tensor:
    x = x.reshape(-1, x.shape[-1])
    return x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()


def _call(
    x0: Tensor, x: Tensor | None, weights: Sequence[Tensor], scalars: Given, biases: Given
) -> _Call | None:
    """The call as the kernels read it; None if they do not support it."""
    where = gpu.serving(x0)
    extension = device.extension() if where is None and x0.is_cpu else None
    if extension is not None and not device.forced() and x0.numel() < WORTH:
        return None
    if (where is None and extension is None) or not weights or not x0.shape[-1]:
        return None
    tensors = [t for t in (x0, x, *weights, *scalars, *biases) if t is not None]
    if any(t.dtype is not torch.float32 or t.device != x0.device for t in tensors):
        return None
    flat = torch.stack([w.reshape(-1) for w in weights])
    offsets, before, beta = flat.new_zeros(len(weights)), None, None
    if any(b is not None for b in biases):
        each = [flat.new_zeros(flat.shape[1]) if b is None else b.reshape(-1) for b in biases]
        sums = torch.stack([torch.zeros_like(each[0]), *each]).cumsum(0)
        before, beta = sums[:-1], sums[-1]
        offsets = (before * flat).sum(1)
    if any(s is not None for s in scalars):
        offsets += torch.cat([offsets.new_zeros(1) if s is None else s.reshape(1) for s in scalars])
    rows, start = _rows(x0), None if x is None else _rows(x)
    native: Any = None
    if where is not None:
        native = cross_cuda.network(where, rows, start, flat, offsets)
    elif extension is not None:
        native = extension.cross_vector(rows, start, list(flat.unbind()), offsets)
    return None if native is None else _Call(native, rows, start, flat, before, offsets, beta)


# ---------------------------------------------------------------- forward and backward


def forward(
    x0: Tensor, x: Tensor, weights: list[Tensor], scalars: list[Any], biases: list[Any]
) -> Tensor:
    """The result, not recorded by autograd."""
    check(x0, x, weights, scalars, biases)
    call = _call(x0, None if x is x0 else x, weights, scalars, biases)
    if call is None:
        return reference(x0, x, weights, scalars, biases)
    return call.forward(x0.shape)


class CrossVector(torch.autograd.Function):
    """Inputs: the call, x_0, x (None where it is x_0), then weights, scalars and biases."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, x0: Tensor, x: Tensor | None, *rest: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x0, x, *rest)
        ctx.call = call
        if torch._C._len_torch_dispatch_stack():
            start = x0 if x is None else x
            return cross_vector.target(x0, start, *_thirds(rest))
        return call.forward(x0.shape)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x0, x, *rest = ctx.saved_tensors
        weights, scalars, biases = _thirds(rest)
        call, ctx.call = ctx.call, None  # used once; it would keep its tensors alive
        if torch.is_grad_enabled():
            call = None
        elif call is None:
            call = _call(x0, x, weights, scalars, biases)
        if call is None:
            return (None, *_differentiable_backward(ctx.needs_input_grad[1:], (x0, x, *rest), grad))
        dx0, dx, dw, db, dc = call.backward(grad)
        found: list[Tensor | None] = [dx0.view(x0.shape), None if dx is None else dx.view(x0.shape)]
        for of, values in ((dw, weights), (dc, scalars), (db, biases)):
            found += [
                None if t is None else part.view(t.shape)
                for t, part in zip(values, of.unbind(), strict=True)
            ]
        needs = ctx.needs_input_grad[1:]
        return (None, *(g if need else None for g, need in zip(found, needs, strict=True)))


def _thirds(rest: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    n = len(rest) // 3
    return list(rest[:n]), list(rest[n : 2 * n]), list(rest[2 * n :])


def _differentiable_backward(
    needs: tuple[bool, ...], inputs: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """For ``create_graph``: through the reference."""
    own = partials.apart(inputs)
    x0, x, *rest = own
    assert x0 is not None
    out = reference(x0, x0 if x is None else x, *_thirds(rest))
    return tuple(partials.gradients([out], own, needs, [grad]))


def differentiable(
    x0: Tensor, x: Tensor, weights: list[Tensor], scalars: list[Any], biases: list[Any]
) -> Tensor:
    """The result, recorded by autograd."""
    if not wants_grad((x0, x, weights, scalars, biases)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return cross_vector.target(x0, x, weights, scalars, biases)
        return forward(x0, x, weights, scalars, biases)
    check(x0, x, weights, scalars, biases)
    start = None if x is x0 else x
    with torch.no_grad():
        call = _call(x0, start, weights, scalars, biases)
    if call is None:
        return reference(x0, x, weights, scalars, biases)
    return CrossVector.apply(call, x0, start, *weights, *scalars, *biases)


# ---------------------------------------------------------------- cost, samples


def cost(x0: Tensor, x: Tensor, weights: Sequence[Tensor], scalars: Given, biases: Given) -> Cost:
    """Two flops per layer and element, and two for the result; each operand read once."""
    start = None if x is x0 else x
    flops = 2 * x0.numel() * (len(weights) * (1 if start is None else 2) + 1)
    return Cost(flops, moved(x0, start, *weights, *scalars, *biases) + moved(x0))


def samples() -> list[Sample]:
    """Widths around a register's, all shapes of parameters, x apart, strides, one row, no rows."""
    g = torch.Generator().manual_seed(37)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def one(label: str, x0: Tensor, layers: int, x: Tensor | None = None, **how: Any) -> Sample:
        d = x0.shape[-1]
        shape = how.get("shape", (d,))
        weights = [rand(*shape) / d for _ in range(layers)]
        scalars = [rand(1) if how.get("scalars") else None for _ in range(layers)]
        biases = [rand(*shape) if k in how.get("biases", range(layers)) else None
                  for k in range(layers)]  # fmt: skip
        return Sample(label, (x0, x0 if x is None else x, weights, scalars, biases))

    return [
        one("network", rand(6, 40), 3),
        one("one layer", rand(5, 17), 1, shape=(1, 17)),
        one("columns", rand(7, 33), 2, shape=(33, 1), biases=(1,)),
        one("no biases", rand(4, 8), 4, biases=()),
        one("scalars", rand(4, 9), 5, scalars=True),
        one("apart", rand(6, 19), 3, rand(6, 19), scalars=True),
        one("one row", rand(1, 70), 6),
        one("empty batch", rand(0, 8), 2),
        one("3-d", rand(3, 4, 5), 2),
        one("strided", rand(12, 2, 16)[::2, 1], 3, rand(16, 6).t()),
        one("no layers", rand(3, 4), 0),
    ]


cross_vector = register(
    Op(
        name="cross_vector",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        devices=("cpu", "cuda"),
        kernels=(
            Kernel("cuda", "cuda", cross_cuda.CONDITION, cuda_launch.why_not),
            *cpu_kernels("float32 throughout, no autocast"),
            Kernel("torch", "cpu", "anything else", lambda: None),
        ),
    )
)
