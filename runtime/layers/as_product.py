"""What autocast makes of the result of a matrix product.

A sum that replaces one is not cast by autocast, and would be of another dtype than the model's. The
other way round, a product that replaces a sum is cast, where the model's is not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_product(x: Tensor) -> Tensor:
    """``x``, under autocast in the dtype that a matrix product would give; float64 stays."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def promoted(x: Tensor, other: Tensor) -> Tensor:
    """``x`` in the dtype of a sum with ``other``; ``x`` itself where that is its own."""
    return x.to(torch.promote_types(x.dtype, other.dtype))
