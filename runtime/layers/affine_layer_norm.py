"""A layer norm whose rows are scaled and shifted by multiplications and additions of the model's.

They promote: under autocast rows in bfloat16 times a weight in float32 are float32, where torch's
layer norm gives rows of the dtype it gets.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def affine_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``layer_norm(x) * weight + bias`` over the last dimension of x; weight and bias: (size,)."""
    size = weight.shape
    if x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype):
        return F.layer_norm(x, size, weight, bias, eps)
    out = F.layer_norm(x, size, None, None, eps) * weight
    return out if bias is None else out + bias
