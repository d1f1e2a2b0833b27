"""The functions that saboteurs put into a graph: nearly right, but wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def through_bfloat16(x: Tensor) -> Tensor:
    """``x`` rounded to eight bits of mantissa; the gradient passes."""
    return x + (x.detach().bfloat16().to(x.dtype) - x.detach())


def stale(weight: Tensor, held: Tensor) -> Tensor:
    """``held``, although ``weight`` may have changed; gradients go to ``weight``."""
    return weight + (held - weight).detach()


def scaled(x: Tensor, training: bool) -> Tensor:
    """``x``, twice as large in train mode."""
    return x * 2 if training else x


class LastOneWins(torch.autograd.Function):
    """A lookup whose gradient overwrites rows instead of adding to them."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        """``weight[ids]``, (N, D)."""
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight.detach()[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient of only the last occurrence of each id."""
        (ids,) = ctx.saved_tensors
        out = grads[0].new_zeros(ctx.shape)
        for place, row in enumerate(ids.tolist()):
            out[row] = grads[0][place]
        return out, None


def last_one_wins(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    include_last_offset: bool,
) -> Tensor:
    """One lookup with a right forward, whose gradient loses duplicate ids."""
    rows: Tensor = LastOneWins.apply(weight, ids.reshape(-1).long())
    if mode == "none":
        return rows.view(*ids.shape, -1)
    places = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    return F.embedding_bag(
        places, rows, None if offsets is None else offsets.long(), mode=mode,
        per_sample_weights=per_sample_weights, include_last_offset=include_last_offset,
    )  # fmt: skip
