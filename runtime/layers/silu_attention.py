"""Attention by silu instead of a softmax, as in HSTU (Zhai et al. 2024, eq. 3).

With q (N, H, Q, d), k (N, H, K, d) and v (N, H, K, e)::

    s = scale · q kᵀ + bias
    a = factor · silu(s) · mask                  (N, H, Q, K)
    out = a v                                    (N, H, Q, e)

``bias`` (floating) and ``mask`` (floating or bool) are optional and broadcast to (N, H, Q, K).
Plain torch makes a pass over memory for each product, sum and factor of the scores and for all of
their gradients; here the scores of a head stay in the cache.

Backward, with g the gradient of out::

    d a = g vᵀ          d s = factor · mask · silu'(s) · d a          d v = aᵀ g
    d q = scale · d s k          d k = scale · d sᵀ q
    d bias = d s, d mask = factor · silu(s) · d a, summed over the dimensions in which they are
    broadcast

Only the inputs are kept for the backward. On a CPU, the first and last keys whose mask is zero for
all queries of a block are not computed; of finite inputs only, and not if the gradient of ``bias``
or ``mask`` is wanted.
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
from recast.runtime.layers.attention_operands import broadcasts, ready, spread
from recast.runtime.op import (
    Kernel,
    Op,
    Sample,
    cpu_kernels,
    register,
    transformed,
    wants_grad,
)

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, float scale, float factor, Tensor? bias=None, "
    "Tensor? mask=None) -> Tensor"
)


# ---------------------------------------------------------------- the definition


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, factor: float, bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain torch; shapes as above. Raises InputError for shapes that do not fit."""
    check(q, k, v, bias, mask)
    s = torch.matmul(q, k.transpose(-2, -1))
    if scale != 1.0:
        s = s * scale
    a = F.silu(s if bias is None else s + bias) * factor
    out = torch.matmul(a if mask is None else a * mask, v)
    # A result of its own takes no values that vmap made of q alone.
    return out if transformed() else _like(q, v, out.dtype).copy_(out)


def fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float, factor: float, bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Shape and dtype of the result."""
    return _like(q, v, v.dtype)


def _like(q: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty result, with the strides of v so that merging the heads needs no copy."""
    if q.shape[2] == v.shape[2]:
        return torch.empty_like(v, dtype=dtype)
    return v.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)


def check(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> None:
    """Raise InputError for shapes that do not fit."""
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    why = None
    if not len(of_q) == len(of_k) == len(of_v) == 4:
        why = "(batch, heads, places, elements)"
    elif not of_q[:2] == of_k[:2] == of_v[:2] or of_k[2] != of_v[2]:
        why = "k and v are of the same places"
    elif of_q[3] != of_k[3]:
        why = "q and k are of one length"
    if why is not None:
        shapes = f"{tuple(of_q)}, {tuple(of_k)} and {tuple(of_v)}"
        raise InputError(f"q, k and v have shapes {shapes}", why=why)
    scores = (*of_q[:3], of_k[2])
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None and not broadcasts(given.shape, scores):
            raise InputError(
                f"{name} has shape {tuple(given.shape)}", why=f"it must broadcast to {scores}"
            )
    if bias is not None and not bias.is_floating_point():
        raise InputError(f"bias is {bias.dtype}", why="it must be floating")


# ---------------------------------------------------------------- forward and backward


def _native(
    q: Tensor, k: Tensor, v: Tensor, scale: float, factor: float, bias: Tensor | None,
    mask: Tensor | None,
) -> Any:  # fmt: skip
    """The call for the CPU kernels; None if they do not support it."""
    extension = device.extension()
    if extension is None or not q.is_cpu or not q.dim() == k.dim() == v.dim() == 4:
        return None
    if (bias is not None and bias.dtype != torch.float32) or not q.numel() or not v.numel():
        return None
    if mask is not None and mask.dtype not in (torch.float32, torch.bool):
        return None
    check(q, k, v, bias, mask)
    bias, mask = (None if t is None else spread(t.to(torch.float32), q, k) for t in (bias, mask))
    return extension.silu_attention(q, k, v, scale, factor, bias, mask)


def _run(native: Any, q: Tensor, v: Tensor) -> Tensor:
    out = ready(_like(q, v, v.dtype))
    native.forward(out, device.threads())
    return out


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, factor: float, bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The result, not recorded by autograd."""
    first, second, third = ready(q), ready(k), ready(v)
    native = _native(first, second, third, scale, factor, bias, mask)
    if native is None:
        return reference(q, k, v, scale, factor, bias, mask)
    return _run(native, q, third)


class SiluAttention(torch.autograd.Function):
    """Inputs: the kernels' call; q, k, v with contiguous vectors; scale, factor, bias and mask."""

    @staticmethod
    def forward(
        ctx: Any, native: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, factor: float,
        bias: Tensor | None, mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.scale, ctx.factor = scale, factor
        ctx.save_for_backward(q, k, v, bias, mask)
        ctx.set_materialize_grads(False)
        return _run(native, q, v)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        q, k, v, bias, mask = ctx.saved_tensors
        given = (q, k, v, ctx.scale, ctx.factor, bias, mask)
        native = None if torch.is_grad_enabled() else _native(*given)
        if native is None:
            found: tuple[Any, ...] = _differentiable_backward(*given, grad)
        else:
            planes = tuple(
                q.new_empty((*q.shape[:3], k.shape[2])) if needed else None
                for needed in ctx.needs_input_grad[6:]
            )
            into = [ready(torch.empty_like(t)) for t in (q, k, v)]
            native.backward(ready(grad), *into, *planes, device.threads())
            found = (*into, *planes)
        made: list[Tensor | None] = [None, *found[:3], None, None]
        for plane, of_plane, needed in zip(
            (bias, mask), found[3:], ctx.needs_input_grad[6:], strict=True
        ):
            made.append(of_plane.sum_to_size(plane.shape) if needed else None)
        return tuple(made)


def _differentiable_backward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, factor: float, bias: Tensor | None,
    mask: Tensor | None, grad: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The formulas themselves, in torch; the planes' gradients for each query and key."""
    s = torch.matmul(q, k.transpose(-2, -1)) * scale
    if bias is not None:
        s = s + bias
    p = torch.sigmoid(s)
    part = p * factor if mask is None else p * factor * mask
    da = torch.matmul(grad, v.transpose(-2, -1))
    dbias = da * part * (1 + s * (1 - p))
    dmask = da * s * p * factor
    dv = torch.matmul((s * part).transpose(-2, -1), grad)
    ds = scale * dbias
    return torch.matmul(ds, k), torch.matmul(ds.transpose(-2, -1), q), dv, dbias, dmask


def differentiable(
    q: Tensor, k: Tensor, v: Tensor, scale: float, factor: float, bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The result, recorded by autograd."""
    given = (scale, factor, bias, mask)
    if not wants_grad((q, k, v, bias, mask)):
        return forward(q, k, v, *given)
    first, second, third = ready(q), ready(k), ready(v)
    native = _native(first, second, third, *given)
    if native is None:
        return reference(q, k, v, *given)
    found: Tensor = SiluAttention.apply(native, first, second, third, *given)
    return found


# ---------------------------------------------------------------- cost, samples


def cost(
    q: Tensor, k: Tensor, v: Tensor, scale: float, factor: float, bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Cost:  # fmt: skip
    """Two products and some ten flops per score; inputs read once, the result written once."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    written = q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3]
    flops = pairs * (2 * (q.shape[3] + v.shape[3]) + 10)
    planes = [t for t in (bias, mask) if t is not None]
    return Cost(flops, moved(q, k, v, *planes) + written * q.element_size())


def samples() -> list[Sample]:
    """Heads split by view and by stack, odd sizes, other keys, biases, masks, strides, no rows."""
    g = torch.Generator().manual_seed(47)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def heads(n: int, places: int, count: int, length: int) -> Tensor:
        return rand(n, places, count, length).transpose(1, 2)

    def three(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
        return rand(*shape), rand(*shape), rand(*shape)

    viewed = heads(4, 20, 2, 8), heads(4, 20, 2, 8), heads(4, 20, 2, 8)
    odd = rand(3, 1, 5, 3), rand(3, 1, 9, 3), rand(3, 1, 9, 11)
    blocks = rand(2, 2, 19, 11), rand(2, 2, 37, 11), rand(2, 2, 37, 41)
    turned = rand(3, 2, 5, 6).transpose(2, 3), rand(3, 2, 6, 5), rand(3, 2, 6, 5)
    causal = torch.ones(7, 7).tril()
    padding = torch.tensor([[True] * 4 + [False] * 3, [True] * 7, [False] * 7])[:, None, None]
    return [
        Sample("views", (*viewed, 1.0, 0.05)),
        Sample("odd", (*odd, 0.5, 1.0)),
        Sample("one of each", (*three(1, 1, 1, 1), 2.0, 1.0)),
        Sample("blocks and ends", (*blocks, 0.3, 0.5)),
        Sample("bias", (*three(3, 2, 6, 5), 1.0, 0.2, rand(3, 1, 6, 6))),
        Sample("bias of places", (*three(3, 2, 6, 5), 0.7, 1.0, rand(6, 6))),
        Sample("bias of keys", (*three(3, 2, 6, 5), 0.7, 1.0, rand(2, 1, 6))),
        Sample("causal", (*three(3, 2, 7, 5), 1.0, 0.1, rand(3, 1, 7, 7), causal)),
        Sample("padding", (*three(3, 2, 7, 5), 1.0, 0.1, None, padding)),
        Sample("mask of queries", (*blocks, 0.4, 1.0, rand(19, 1), rand(2, 1, 19, 1))),
        Sample("far scores", (*three(2, 2, 5, 4), 30.0, 1.0, 40 * rand(5, 5))),
        Sample("parts of one", (*rand(3, 2, 3, 9).split(3, 3), 0.4, 1.0)),
        Sample("transposed", (*turned, 0.4, 1.0, rand(6, 2).t()[:, None, None, :][0])),
        Sample("empty batch", (*three(0, 2, 6, 5), 0.7, 1.0, rand(6, 6))),
    ]


silu_attention = register(
    Op(
        name="silu_attention",
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
        not_worth={"cuda": "there is no kernel for it yet; torch's own calls run"},
    )
)
