"""The feature vectors of an interaction: a list of (B, D), or of (B, f, D) that hold f of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast.errors import InputError


def check_features(features: Sequence[Tensor], what: str) -> None:
    """Raise InputError where the features of ``what`` do not fit each other; their dtypes may
    differ.
    """
    if not features:
        raise InputError(f"{what} of no features")
    first = features[0]
    for k, f in enumerate(features):
        if f.dim() not in (2, 3):
            raise InputError(f"feature {k} has shape {tuple(f.shape)}, not (B, D) or (B, f, D)")
        if f.shape[0] != first.shape[0] or f.shape[-1] != first.shape[-1]:
            raise InputError(
                f"feature {k} has shape {tuple(f.shape)}, feature 0 {tuple(first.shape)}",
                why="all features share the batch size and the vector length",
            )


def stacked(features: Sequence[Tensor]) -> Tensor:
    """(B, F, D): all vectors of ``features``."""
    if len(features) == 1 and features[0].dim() == 3:
        return features[0]
    return torch.cat([f.unsqueeze(1) if f.dim() == 2 else f for f in features], 1)
