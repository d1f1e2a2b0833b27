"""The masks of torch's own attention functions, as ``recast::field_attention`` takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast.errors import InputError


def module_bias(
    q: Tensor, k: Tensor, attention: Tensor | None, padding: Tensor | None, causal: bool = False
) -> Tensor | None:
    """What an ``nn.MultiheadAttention`` adds to the scores of these masks.

    ``q``: (N, H, Q, d); ``k``: (N, H, K, d). ``attention``: its ``attn_mask``, (Q, K) or
    (N H, Q, K); ``padding``: its ``key_padding_mask``, (N, K). In both, True leaves a place out,
    and floats are added. ``causal``: it takes ``attention`` to be causal, and does not read it, as
    ``scaled_dot_product_attention`` with ``is_causal``. Returns floats that broadcast to
    (N, H, Q, K); None where both are None.
    Raises InputError for other shapes, also such as would broadcast: torch takes none.
    """
    samples, heads, queries, keys = *q.shape[:3], k.shape[2]
    if causal:
        return causal_bias(q, keys)
    if attention is not None:
        whole = (queries, keys) if attention.dim() == 2 else (samples * heads, queries, keys)
        _expect("attn_mask", attention, whole)
        attention = attention.unflatten(0, (samples, heads)) if attention.dim() == 3 else attention
    if padding is not None:
        _expect("key_padding_mask", padding, (samples, keys))
    rows = None if padding is None else padding[:, None, None, :]
    parts = [_added(mask, q.dtype) for mask in (attention, rows) if mask is not None]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _expect(name: str, mask: Tensor, shape: Sequence[int]) -> None:
    if tuple(mask.shape) != tuple(shape):
        raise InputError(f"{name} has shape {tuple(mask.shape)}", why=f"it must be {tuple(shape)}")


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def causal_bias(q: Tensor, keys: int) -> Tensor:
    """(Q, keys), -inf for the keys after a query's own place: ``is_causal``. ``q``: (.., Q, d)."""
    return torch.full((q.shape[-2], keys), -torch.inf, dtype=q.dtype, device=q.device).triu_(1)


def dead_rows_are_zero(training: bool, tensors: Sequence[Tensor | None]) -> bool:
    """Whether an ``nn.MultiheadAttention`` whose weights are not asked for gives a query without
    keys zeros in this call, as ``scaled_dot_product_attention`` does.

    Its fast path gives NaN. ``tensors``: its input and parameters. For modules that torch would
    evaluate by the fast path when nothing is recorded.
    """
    return not takes_fast_path(training, tensors)


def takes_fast_path(training: bool, tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch evaluates a module of attention by its fast path in this call: nothing is
    recorded, and nothing forbids it. ``tensors``: its input and parameters.
    """
    if training or not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return False
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return not recorded and not torch.overrides.has_torch_function(tensors)


def left_out(mask: Tensor) -> Tensor:
    """The places that the fast path takes ``mask`` to leave out: True, or any number but 0."""
    return mask if mask.dtype == torch.bool else mask != 0


__all__ = ["causal_bias", "dead_rows_are_zero", "left_out", "module_bias", "takes_fast_path"]
