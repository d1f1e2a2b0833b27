"""Attention of the fields of a sample to each other, as in AutoInt, or of the rows of a sequence.

With q (N, H, Q, d), k (N, H, K, d) and v (N, H, K, e)::

    s = fill where filled, else scale · q kᵀ + bias
    a = softmax(s)                               (N, H, Q, K)
    out = dropout(a, p) v                        (N, H, Q, e)

``bias`` (floating) and ``filled`` (bool) are optional and broadcast to (N, H, Q, K). A row of
scores that are all -inf has weights of NaN, as torch's softmax has, or of 0 if ``safe``, as
``scaled_dot_product_attention`` has.

Returns ``[out]``, or ``[out, a]`` with ``weights``. Fields are few and vectors short:
plain torch makes a pass over memory for each of the products, the scale, the softmax, its mask and
all of their gradients, while a head of a sample fits into L1. On a CPU, torch's
``scaled_dot_product_attention`` takes as long as these products (x0.7 to x1.4 measured for 16 to
26 fields of length 4 to 16) and its dropout does not draw from torch's usual stream; on a GPU the
definition uses it, unless ``weights`` are wanted.

Backward, with n the mask of the dropout and g, h the gradients of out and a::

    d a = n (g vᵀ) + h      d s = a (d a - Σ a d a), 0 where filled
    d v = (n a)ᵀ g          d q = scale · d s k          d k = scale · d sᵀ q
    d bias = d s, summed over the dimensions in which bias is broadcast

The mask is the one torch draws for the same seed. Only it and the inputs are kept for the backward.
On a CPU, the first and last keys that masks leave out for all queries of a block are not computed:
by -inf, or by a number so low that their weights are zero. Of finite inputs only, and not if
``weights`` are wanted, or the gradient of ``bias``.
A GPU's kernels take no bias and no ``filled``: torch's operations run there.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from recast.runtime.layers.attention_operands import broadcasts, ready, spread
from recast.runtime.mlp import torch_draws
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
    "(Tensor q, Tensor k, Tensor v, float scale, float p, bool training, bool weights, "
    "Tensor? bias=None, Tensor? filled=None, float fill=0., bool safe=False) -> Tensor[]"
)


# ---------------------------------------------------------------- the definition


@dataclass(frozen=True, slots=True)
class Masks:
    """What changes the scores before the softmax: see above."""

    bias: Tensor | None = None
    filled: Tensor | None = None
    fill: float = 0.0
    safe: bool = False

    @property
    def some(self) -> bool:
        """Whether there are any."""
        return self.bias is not None or self.filled is not None

    def weights(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """The attention weights before dropout, in plain torch."""
        s = torch.matmul(q, k.transpose(-2, -1)) * scale
        if self.bias is not None:
            s = s + self.bias
        if self.filled is not None:
            s = s.masked_fill(self.filled, self.fill)
        if not self.safe:
            return torch.softmax(s, -1)
        dead = (s == -torch.inf).all(-1, keepdim=True)
        return torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)


_NONE = Masks()


def attention_weights(
    q: Tensor, k: Tensor, scale: float, bias: Tensor | None = None, filled: Tensor | None = None,
    fill: float = 0.0, safe: bool = False,
) -> Tensor:  # fmt: skip
    """The weights before dropout, (N, H, Q, K), in plain torch: for a dropout of one's own."""
    return Masks(bias, filled, fill, safe).weights(q, k, scale)


def weighted(a: Tensor, v: Tensor) -> Tensor:
    """``a v`` of weights (N, H, Q, K), in plain torch, as the op lays it out: (N, H, Q, e)."""
    return _laid(torch.matmul(a, v), v)


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool,
    bias: Tensor | None = None, filled: Tensor | None = None, fill: float = 0.0, safe: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Plain torch; shapes as above. Raises InputError for shapes that do not fit."""
    masks = Masks(bias, filled, fill, safe)
    check(q, k, v, p, masks)
    if q.is_cuda and not weights and not (training and p > 0) and not masks.some:
        out = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return [_laid(out, v)]
    a = masks.weights(q, k, scale)
    out = weighted(F.dropout(a, p, training), v)
    return [out, a] if weights else [out]


def _laid(out: Tensor, v: Tensor) -> Tensor:
    """``out`` with the strides of ``v`` if both have the same shape."""
    if out.shape != v.shape or transformed():  # vmap may be over q alone
        return out
    return torch.empty_like(v, dtype=out.dtype).copy_(out)


def fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool,
    bias: Tensor | None = None, filled: Tensor | None = None, fill: float = 0.0, safe: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Shapes and dtypes of the results."""
    return [_empty(q, v), *([q.new_empty((*q.shape[:3], k.shape[2]))] if weights else [])]


def _empty(q: Tensor, v: Tensor) -> Tensor:
    """An empty result, with the strides of v so that merging the heads needs no copy."""
    return torch.empty_like(v) if q.shape[2] == v.shape[2] else v.new_empty(
        (*q.shape[:3], v.shape[3])
    )  # fmt: skip


def check(q: Tensor, k: Tensor, v: Tensor, p: float, masks: Masks = _NONE) -> None:
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
    scores = (*q.shape[:3], k.shape[2])
    for name, mask in (("bias", masks.bias), ("filled", masks.filled)):
        if mask is not None and not broadcasts(mask.shape, scores):
            raise InputError(
                f"{name} has shape {tuple(mask.shape)}", why=f"it must broadcast to {scores}"
            )
    if masks.filled is not None and masks.filled.dtype != torch.bool:
        raise InputError(f"filled is {masks.filled.dtype}", why="it must be bool")
    if masks.bias is not None and not masks.bias.is_floating_point():
        raise InputError(f"bias is {masks.bias.dtype}", why="it must be floating")


# ---------------------------------------------------------------- forward and backward


def _native(q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> Any:
    """The call for the device's kernels; None if they do not support it."""
    there = gpu.serving(q)
    if there is not None:
        check(q, k, v, 0.0, masks)
        return None if masks.some else attention_cuda.attention(there, q, k, v)
    extension = device.extension()
    if extension is None or not q.is_cpu or not q.dim() == k.dim() == v.dim() == 4:
        return None
    if not masks.some:
        return extension.field_attention(q, k, v)
    check(q, k, v, 0.0, masks)
    filled = None if masks.filled is None else masks.filled.to(torch.float32)
    bias, filled = (spread(t, q, k) for t in (masks.bias, filled))
    return extension.field_attention(q, k, v, bias, filled, masks.fill, masks.safe)


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
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool,
    bias: Tensor | None = None, filled: Tensor | None = None, fill: float = 0.0, safe: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The results, not recorded by autograd."""
    masks = Masks(bias, filled, fill, safe)
    first, second, third = ready(q), ready(k), ready(v)
    native = _native(first, second, third, masks)
    if native is None:
        return reference(q, k, v, scale, p, training, weights, bias, filled, fill, safe)
    check(q, k, v, p)
    return _run(native, first, second, third, scale, _noise(q, k, p, training), weights)


class FieldAttention(torch.autograd.Function):
    """Inputs: q, k, v with contiguous vectors, the scale, the mask of the dropout, whether a is
    wanted, and the fields of ``Masks``.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, noise: Tensor | None,
        weights: bool, bias: Tensor | None, filled: Tensor | None, fill: float, safe: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.scale, ctx.fill, ctx.safe = scale, fill, safe
        ctx.save_for_backward(q, k, v, noise, bias, filled)
        ctx.set_materialize_grads(False)
        native = _native(q, k, v, Masks(bias, filled, fill, safe))
        return tuple(_run(native, q, k, v, scale, noise, weights))

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
        q, k, v, noise, bias, filled = ctx.saved_tensors
        masks = Masks(bias, filled, ctx.fill, ctx.safe)
        if grad is None and more is None:
            return (None,) * 10
        if torch.is_grad_enabled():
            made = _differentiable_backward(q, k, v, ctx.scale, noise, grad, more, masks)
            return (*made[:3], None, None, None, made[3], None, None, None)
        if grad is None:
            grad = v.new_zeros((*q.shape[:3], v.shape[3]))
        into = [ready(torch.empty_like(t)) for t in (q, k, v)]
        dbias = None
        more = None if more is None else more.contiguous()
        given = (ready(grad), ctx.scale, noise, more, *into, device.threads())
        if bias is not None and ctx.needs_input_grad[6]:
            dbias = q.new_empty((*q.shape[:3], k.shape[2]))
            _native(q, k, v, masks).backward(*given, dbias)
            dbias = dbias.sum_to_size(bias.shape)
        else:
            _native(q, k, v, masks).backward(*given)
        return (*into, None, None, None, dbias, None, None, None)


def _differentiable_backward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, noise: Tensor | None, grad: Tensor | None,
    more: Tensor | None, masks: Masks,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The formula itself, in torch."""
    a = masks.weights(q, k, scale)
    da = torch.zeros_like(a) if more is None else more
    dv = torch.zeros_like(v)
    if grad is not None:
        through = torch.matmul(grad, v.transpose(-2, -1))
        da = da + (through if noise is None else through * noise)
        dv = torch.matmul((a if noise is None else a * noise).transpose(-2, -1), grad)
    ds = a * (da - (a * da).sum(-1, keepdim=True))
    if masks.filled is not None:
        ds = ds.masked_fill(masks.filled, 0.0)
    dbias = None if masks.bias is None else ds.sum_to_size(masks.bias.shape)
    ds = scale * ds
    return torch.matmul(ds, k), torch.matmul(ds.transpose(-2, -1), q), dv, dbias


def differentiable(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool,
    bias: Tensor | None = None, filled: Tensor | None = None, fill: float = 0.0, safe: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The results, recorded by autograd."""
    given = (q, k, v, scale, p, training, weights, bias, filled, fill, safe)
    if not wants_grad((q, k, v, bias)):
        if torch._C._len_torch_dispatch_stack():
            with torch._C._AutoDispatchBelowAutograd():
                return list(field_attention.target(*given))
        return forward(*given)
    first, second, third = ready(q), ready(k), ready(v)
    masks = Masks(bias, filled, fill, safe)
    if torch._C._len_torch_dispatch_stack() or _native(first, second, third, masks) is None:
        return reference(*given)
    check(q, k, v, p)
    noise = _noise(q, k, p, training)
    made = FieldAttention.apply(
        first, second, third, scale, noise, weights, bias, filled, fill, safe
    )
    return list(made)


def autocast(
    dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool,
    weights: bool, *masks: Any,
) -> list[Tensor]:  # fmt: skip
    """The call under autocast on a GPU: by the kernels if all inputs already have autocast's dtype,
    no weights are wanted (autocast would leave them in float32) and there is no dropout.
    """
    if not weights and not (training and p > 0) and q.dtype == k.dtype == v.dtype == dtype:
        return differentiable(q, k, v, scale, p, training, weights, *masks)
    with torch.autocast(q.device.type, dtype):
        return reference(q, k, v, scale, p, training, weights, *masks)


# ---------------------------------------------------------------- cost, samples


def cost(
    q: Tensor, k: Tensor, v: Tensor, scale: float, p: float, training: bool, weights: bool,
    bias: Tensor | None = None, filled: Tensor | None = None, fill: float = 0.0, safe: bool = False,
) -> Cost:  # fmt: skip
    """Two products and some ten flops per weight; inputs read once, the result written once."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    written = q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3] + pairs * weights
    flops = pairs * (2 * (q.shape[3] + v.shape[3]) + 10)
    masks = [t for t in (bias, filled) if t is not None]
    return Cost(flops, moved(q, k, v, *masks) + written * q.element_size())


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
    causal = torch.full((7, 7), -torch.inf).triu(1)
    padding = torch.tensor([[False] * 4 + [True] * 3, [True] * 7, [False] * 7])[:, None, None]
    wide = rand(2, 2, 19, 11), rand(2, 2, 37, 11), rand(2, 2, 37, 5)
    some = torch.rand(2, 1, 19, 37, generator=g) < 0.4
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
        Sample("bias", (*three(3, 2, 6, 5), 0.7, 0.3, True, True, rand(3, 1, 1, 6))),
        Sample("causal", (*three(3, 2, 7, 5), 0.7, 0.0, True, False, causal)),
        Sample(
            "bias of columns, filled",
            (*wide, 0.4, 0.0, True, False, rand(19, 2).t()[:, None, :, None], some, -4.0),
        ),
        Sample("filled", (*three(3, 2, 7, 5), 0.7, 0.2, True, True, None, padding, -1e4)),
        Sample(
            "no key is left",
            (*three(3, 2, 7, 5), 0.7, 0.0, True, True, None, padding, -torch.inf, True),
        ),
        Sample("no rows, masked", (*three(0, 2, 7, 5), 0.7, 0.0, False, False, causal)),
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
