"""What autocast makes of the result of a matrix product.

A sum that replaces one is not cast by autocast, and would be of another dtype than the model's.
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
