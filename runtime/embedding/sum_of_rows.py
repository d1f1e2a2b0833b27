"""Sums of looked-up rows where a padding row counts: what ``embedding_bag`` cannot say.

``nn.EmbeddingBag`` leaves ids equal to padding_idx out of a bag. ``nn.Embedding`` followed by a sum
adds that row, whatever it holds, and gives it no gradient. Passes write this call; in
``embedding_bags`` it is the mode "total".
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def sum_of_rows(
    ids: Tensor,
    weight: Tensor,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    sparse: bool = False,
) -> Tensor:
    """``out[b] = Σ_l w[b, l] W[ids[b, l]]``, (B, D), of ids (B, L) and weights w (B, L) or none.

    The row ``padding_idx`` of W (rows, D) is summed like any other, and gets no gradient.
    """
    rows = F.embedding(ids, weight, padding_idx=padding_idx, sparse=sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return rows.sum(1)
