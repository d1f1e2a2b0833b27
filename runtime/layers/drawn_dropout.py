"""Dropout that is in no chain: torch's own, or one call of ``recast::mlp`` that draws it faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime import device
from recast.runtime.mlp import torch_draws

# From how many numbers the call is worth the 20 us that it takes; `mlp` fuses from there on too.
_WORTH = 10_000


def drawn_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """``F.dropout(x, p, training)``: of the same numbers, from the same random stream.

    ``x``: any shape, floating. As torch's, it returns ``x`` itself where nothing is dropped. Raises
    what torch raises for p outside of [0, 1].
    """
    if training and 0 < p < 1 and _faster(x):
        return torch.ops.recast.mlp(x, [], [], ["dropout"], [p], [True])
    return F.dropout(x, p, training)


def _faster(x: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False  # it fuses torch's own
    if device.held() == "fused":
        return True
    fits = x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()
    return fits and x.numel() >= _WORTH and torch_draws.why_not() is None
