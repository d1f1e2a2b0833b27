"""The masks of ``nn.TransformerEncoder`` and its layers, in each way that torch evaluates them.

With gradients or in training, a layer adds its masks to the scores, and a query without keys gets
zeros. Without them it takes a fast path: whatever in a mask is not 0 leaves a place out, and a
query without keys gets NaN. An encoder whose padding is at the end of all rows then computes no
padded places at all, and returns zeros for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recast.runtime.layers.attention_masks import causal_bias, left_out, takes_fast_path


def layer_masks(
    x: Tensor, mask: Tensor | None, padding: Tensor | None, heads: int, causal: bool,
    batch_first: bool, training: bool = True, tensors: Sequence[Tensor | None] = (),
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """``attn_mask`` and ``key_padding_mask`` with which the slow path of an
    ``nn.MultiheadAttention`` computes what a layer computes in this call.

    ``x``: (N, L, E) if ``batch_first``, else (L, N, E), the input of the layer; ``mask``: its
    ``src_mask``, (L, L) or (N heads, L, L); ``padding``: its ``src_key_padding_mask``, (N, L);
    ``causal``: its ``is_causal``. ``training`` and ``tensors``, its parameters: for layers that may
    take the fast path. Returns floats, with NaN where a query without keys is to get NaN.
    """
    if not takes_fast_path(training, (x, *tensors)):
        if causal and padding is None:
            rows = x if batch_first else x.transpose(0, 1)
            return causal_bias(rows, rows.shape[1]), None
        return _added(mask, x.dtype), _added(padding, x.dtype)
    if mask is None or padding is None:
        return (
            None if mask is None else _dropped(mask, x.dtype),
            None if padding is None else _dropped(padding, x.dtype),
        )
    samples, length = x.shape[:2]
    whole = mask.unflatten(0, (samples, heads)) if mask.dim() == 3 else mask
    rows = padding[:, None, None]
    numbers = mask.is_floating_point() and padding.is_floating_point()
    left = left_out(whole + rows if numbers else left_out(whole) | left_out(rows))
    if not numbers and not torch.compiler.is_compiling() and not left.all(-1).any():
        return _dropped(mask, x.dtype), _dropped(padding, x.dtype)
    together = _dropped(left, x.dtype)
    return together.expand(samples, heads, length, length).flatten(0, 1), None


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _dropped(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf at the places that ``mask`` leaves out; NaN where it leaves out all of a query."""
    left = left_out(mask)
    bias = torch.zeros_like(left, dtype=dtype).masked_fill_(left, -torch.inf)
    return bias.masked_fill_(left.all(-1, keepdim=True), torch.nan)


_WORTH = 1 << 25  # multiply-adds for padded places that are worth another call: a millisecond's


def _padded(length: int) -> float:
    """The part of the places from which on torch is faster without them than we are with them."""
    return 0.75 if length <= 32 else 0.55  # measured: 0.75 and more for 20, 0.5 for 50 and 100


def without_padding(
    x: Tensor, padding: Tensor, allowed: bool, training: bool,
    layers: Sequence[tuple[int, bool, bool]], tensors: Sequence[Tensor], eps: Sequence[float],
) -> tuple[Tensor | None, Tensor, Tensor, bool]:  # fmt: skip
    """``(done, x, padding, skipped)`` of an ``nn.TransformerEncoder`` without ``mask``.

    ``skipped``: whether it computes no padded places in this call. ``done``: its result before its
    last norm, by torch's own fast path, where that is faster; x and padding are then of one row.

    ``x``: (N, L, E), its input; ``padding``: (N, L); ``allowed``: its ``use_nested_tensor``;
    ``training``: of its first layer. Of each of the ``layers``: how many heads, whether it has
    gelu, not relu, and its norms first; its ``tensors`` in the order of torch's call; the ``eps``
    of its norms.
    """
    if not allowed or torch.compiler.is_compiling() or not takes_fast_path(training, (x, *tensors)):
        return None, x, padding, False
    left = left_out(padding)
    if x.dim() != 3 or not (left[:, 1:] | ~left[:, :-1]).all():
        return None, x, padding, False
    padded, weights = int(left.sum()), sum(t.numel() for t in tensors)
    if padded < _padded(x.shape[1]) * left.numel() or padded * weights < _WORTH:
        return None, x.masked_fill(left[..., None], 0.0), padding, True
    done = _by_torch(x, left, layers, tensors, eps)  # the layers of the graph still run, of one row
    return done, x[:1], padding[:1], True


def _by_torch(
    x: Tensor, left: Tensor, layers: Sequence[tuple[int, bool, bool]], tensors: Sequence[Tensor],
    eps: Sequence[float],
) -> Tensor:  # fmt: skip
    """The layers by torch's fast path, without the places of ``left``, which become zeros."""
    out = torch._nested_tensor_from_mask(x, ~left, mask_check=False)
    evaluate: Any = torch._transformer_encoder_layer_fwd
    count = len(tensors) // len(layers)
    for i, ((heads, gelu, norm_first), e) in enumerate(zip(layers, eps, strict=True)):
        own = tensors[count * i : count * (i + 1)]
        out = evaluate(out, x.shape[2], heads, *own[:4], gelu, norm_first, e, *own[4:])
    return out.to_padded_tensor(0.0, x.shape)


def with_padding(x: Tensor, padding: Tensor, done: Tensor | None, skipped: bool) -> Tensor:
    """The result of the layers with that of the padded places: ``done`` if torch made it, else
    ``x``, of which they are zeros if they are ``skipped``.
    """
    if done is not None:
        return done
    return x.masked_fill(left_out(padding)[..., None], 0.0) if skipped else x


__all__ = ["layer_masks", "with_padding", "without_padding"]
