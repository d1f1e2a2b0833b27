"""Attention of the fields of a sample to each other, as in AutoInt.

With q (N, H, Q, d), k (N, H, K, d) and v (N, H, K, e)::

    a = softmax(scale · q kᵀ)                    (N, H, Q, K)
    out = dropout(a, p) v                        (N, H, Q, e)

Returns ``[out]``, or ``[out, a]`` with ``weights``. Fields are few and vectors short:
plain torch makes a pass over memory for each of the products, the scale, the softmax, its mask and
all of their gradients, while a head of a sample fits into L1. On a CPU, torch's
``scaled_dot_product_attention`` takes as long as these products (x0.7 to x1.4 measured for 16 to
26 fields of length 4 to 16) and its dropout does not draw from torch's usual stream; on a GPU the
definition uses it, unless ``weights`` are wanted.

Backward, with n the mask of the dropout and g, h the gradients of out and a::

    d a = n (g vᵀ) + h      d s = scale · a (d a - Σ a d a)
    d v = (n a)ᵀ g          d q = d s k          d k = d sᵀ q

The mask is the one torch draws for the same seed. Only it, q, k and v are kept for the backward.
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
from recast.runtime.gpu import cuda_launch, gpu
from recast.runtime.layers import attention_cuda
from recast.runtime.mlp import torch_draws
from recast.runtime.op import Kernel, Op, Sample, cpu_kernels, register, wants_grad

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, float scale, float p, bool training, bool weights) -> Tensor[]"
)


# ---------------------------------------------------------------- the definition


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool
) -> list[Tensor]:
    """Plain torch; shapes as above. Raises InputError for shapes that do not fit."""
    check(q, k, v, p)
    if q.is_cuda and not weights and not (training and p > 0):
        out = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return [_laid(out, v)]
    a = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scale, -1)
    out = torch.matmul(F.dropout(a, p, training), v)
    return [_laid(out, v), a] if weights else [_laid(out, v)]


def _laid(out: Tensor, v: Tensor) -> Tensor:
    """``out`` with the strides of ``v`` if both have the same shape."""
    return out if out.shape != v.shape else torch.empty_like(v, dtype=out.dtype).copy_(out)


def fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool
) -> list[Tensor]:
    """Shapes and dtypes of the results."""
    return [_empty(q, v), *([q.new_empty((*q.shape[:3], k.shape[2]))] if weights else [])]


def _empty(q: Tensor, v: Tensor) -> Tensor:
    """An empty result, with the strides of v so that merging the heads needs no copy."""
    return torch.empty_like(v) if q.shape[2] == v.shape[2] else v.new_empty(
        (*q.shape[:3], v.shape[3])
    )  # fmt: skip


def check(q: Tensor, k: Tensor, v: Tensor, p: float) -> None:
    """Raise InputError for shapes that do not fit."""
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InputError(f"q, k and v have shapes {shapes}", why="(batch, heads, fields, elements)")
    if not q.shape[:2] == k.shape[:2] == v.shape[:2] or k.shape[2] != v.shape[2]:
        raise InputError(f"q, k and v have shapes {shapes}", why="k and v are of the same fields")
    if q.shape[3] != k.shape[3]:
        raise InputError(f"q, k and v have shapes {shapes}", why="q and k are of one length")
    if not 0.0 <= p <= 1.0:
        raise InputError(f"dropout probability {p}", why="it must be between 0 and 1")


# ---------------------------------------------------------------- forward and backward


def _ready(t: Tensor) -> Tensor:
    """``t`` with its last dimension contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _native(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The call for the device's kernels; None if they do not support it."""
    there = gpu.serving(q)
    if there is not None:
        check(q, k, v, 0.0)
        return attention_cuda.attention(there, q, k, v)
    extension = device.extension()
    if extension is None or not q.is_cpu or not q.dim() == k.dim() == v.dim() == 4:
        return None
    return extension.field_attention(q, k, v)


def _noise(q: Tensor, k: Tensor, p: float, training: bool) -> Tensor | None:
    """Dropout's factors for the weights, from torch's own stream; None without dropout."""
    if not training or p == 0:
        return None
    return torch_draws.noise_like(q.new_empty((*q.shape[:3], k.shape[2])), p)


def _run(
    native: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, noise: Tensor | None, weights: bool
) -> list[Tensor]:
    found = fake(q, k, v, scale, 0.0, False, weights)
    native.forward(found[0], scale, noise, found[1] if weights else None, device.threads())
    return found


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool
) -> list[Tensor]:
    """The results, not recorded by autograd."""
    first, second, third = _ready(q), _ready(k), _ready(v)
    native = _native(first, second, third)
    if native is None:
        return reference(q, k, v, scale, p, training, weights)
    check(q, k, v, p)
    return _run(native, first, second, third, scale, _noise(q, k, p, training), weights)


class FieldAttention(torch.autograd.Function):
    """Inputs: q, k, v with contiguous vectors, the scale, the mask, whether a is wanted."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, noise: Tensor | None, weights: bool
    ) -> tuple[Tensor, ...]:
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, noise)
        ctx.set_materialize_grads(False)
        return tuple(_run(_native(q, k, v), q, k, v, scale, noise, weights))

    @staticmethod
    def masks(ctx: Any) -> list[Tensor]:
        """See :func:`recast.runtime.mlp.mask.masks`."""
        noise = ctx.saved_tensors[3]
        return [] if noise is None else [noise != 0]

    @staticmethod
    @each_of_batch
    def backward(
        ctx: Any, grad: Tensor | None, more: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, noise = ctx.saved_tensors
        if grad is None and more is None:
            return (None,) * 6
        if torch.is_grad_enabled():
            return (*_differentiable_backward(q, k, v, ctx.scale, noise, grad, more), *[None] * 3)
        if grad is None:
            grad = v.new_zeros((*q.shape[:3], v.shape[3]))
        dq, dk, dv = (_ready(torch.empty_like(t)) for t in (q, k, v))
        more = None if more is None else more.contiguous()
        _native(q, k, v).backward(
            _ready(grad), ctx.scale, noise, more, dq, dk, dv, device.threads()
        )
        return dq, dk, dv, None, None, None


def _differentiable_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    noise: Tensor | None,
    grad: Tensor | None,
    more: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula itself, in torch."""
    a = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scale, -1)
    da = torch.zeros_like(a) if more is None else more
    dv = torch.zeros_like(v)
    if grad is not None:
        through = torch.matmul(grad, v.transpose(-2, -1))
        da = da + (through if noise is None else through * noise)
        dv = torch.matmul((a if noise is None else a * noise).transpose(-2, -1), grad)
    ds = scale * a * (da - (a * da).sum(-1, keepdim=True))
    return torch.matmul(ds, k), torch.matmul(ds.transpose(-2, -1), q), dv


def differentiable(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool
) -> list[Tensor]:
    """The results, recorded by autograd."""
    if not wants_grad((q, k, v)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return list(field_attention.target(q, k, v, scale, p, training, weights))
        return forward(q, k, v, scale, p, training, weights)
    first, second, third = _ready(q), _ready(k), _ready(v)
    if torch._C._len_torch_dispatch_stack() or _native(first, second, third) is None:
        return reference(q, k, v, scale, p, training, weights)
    check(q, k, v, p)
    noise = _noise(q, k, p, training)
    return list(FieldAttention.apply(first, second, third, scale, noise, weights))


def autocast(
    dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool,
    weights: bool,
) -> list[Tensor]:  # fmt: skip
    """The call under autocast on a GPU: by the kernels if all inputs already have autocast's dtype,
    no weights are wanted (autocast would leave them in float32) and there is no dropout.
    """
    if not weights and not (training and p > 0) and q.dtype == k.dtype == v.dtype == dtype:
        return differentiable(q, k, v, scale, p, training, weights)
    with torch.autocast(q.device.type, dtype):
        return reference(q, k, v, scale, p, training, weights)


# ---------------------------------------------------------------- cost, samples


def cost(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool
) -> Cost:
    """Two products and some ten flops per weight; inputs read once, the result written once."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    written = q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3] + pairs * weights
    flops = pairs * (2 * (q.shape[3] + v.shape[3]) + 10)
    return Cost(flops, moved(q, k, v) + written * q.element_size())


def samples() -> list[Sample]:
    """Heads split by view and by stack, odd sizes, other keys, dropout, weights, no rows."""
    g = torch.Generator().manual_seed(41)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def heads(n: int, fields: int, count: int, length: int) -> Tensor:
        return rand(n, fields, count, length).transpose(1, 2)

    def three(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
        return rand(*shape), rand(*shape), rand(*shape)

    viewed = heads(4, 20, 2, 8), heads(4, 20, 2, 8), heads(4, 20, 2, 8)
    odd = rand(3, 1, 5, 3), rand(3, 1, 9, 3), rand(3, 1, 9, 11)
    many = rand(2, 1, 3, 4), rand(2, 1, 67, 4), rand(2, 1, 67, 4)
    turned = rand(3, 2, 5, 6).transpose(2, 3), rand(3, 2, 6, 5), rand(3, 2, 6, 5)
    blocks = rand(2, 1, 19, 11), rand(2, 1, 37, 11), rand(2, 1, 37, 41)
    return [
        Sample("views", (*viewed, 8**-0.5, 0.0, False, False)),
        Sample("heads first", (*three(2, 5, 7, 8), 1.0, 0.0, True, True)),
        Sample("odd", (*odd, 0.5, 0.0, True, False)),
        Sample("train", (*three(3, 2, 6, 5), 0.7, 0.3, True, False)),
        Sample("train weights", (*three(3, 2, 3, 4), 0.7, 0.3, True, True)),
        Sample("one of each", (*three(1, 1, 1, 1), 2.0, 0.0, False, True)),
        Sample("many keys", (*many, 1.0, 0.0, True, False)),
        Sample("blocks and ends", (*blocks, 0.3, 0.2, True, True)),
        Sample("empty batch", (*three(0, 2, 6, 5), 0.7, 0.0, False, False)),
        Sample("transposed", (*turned, 0.4, 0.0, False, False)),
        Sample("parts of one", (*rand(3, 2, 3, 9).split(3, 3), 0.4, 0.0, False, False)),
    ]


field_attention = register(
    Op(
        name="field_attention",
        schema=SCHEMA,
        reference=reference,
        fake=fake,
        forward=forward,
        differentiable=differentiable,
        samples=samples,
        cost=cost,
        casts=True,
        random=True,
        devices=("cpu", "cuda"),
        autocast=autocast,
        kernels=(
            Kernel("cuda", "cuda", attention_cuda.CONDITION, cuda_launch.why_not),
            *cpu_kernels("float32, no autocast"),
            Kernel("torch", "cpu", "anything else", lambda: None),
        ),
    )
)
