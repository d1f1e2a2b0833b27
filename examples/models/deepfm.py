"""DeepFM: a linear part, pairwise products of all fields, an MLP (Guo et al., 2017).

    logit = Σ w_i + ½ Σ_d ((Σ v_i)² - Σ v_i²)_d + MLP(v)

recast diff examples/models/deepfm.py:model
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from criteo import Subject, ids, lookup, loss, mlp, rows, tables
from torch import Tensor, nn


class DeepFM(nn.Module):
    def __init__(self, rows: Sequence[int], dim: int, hidden: Sequence[int], dropout: float):
        super().__init__()
        self.wide, self.emb = tables(rows, 1), tables(rows, dim)
        self.deep = mlp([len(rows) * dim, *hidden, 1], dropout)

    def forward(self, x: Tensor) -> Tensor:
        v = lookup(self.emb, x)
        linear = lookup(self.wide, x).sum(1)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True)
        return (linear + pairs + self.deep(v.flatten(1))).squeeze(1)


def model(batch: int = 128, full: bool = False) -> Subject:
    """A model, one batch and a loss; ``full``: Criteo x4, 548 M parameters."""
    torch.manual_seed(0)
    sizes, hidden = rows(full), [1000] * 5 if full else [64] * 2
    return DeepFM(sizes, 16 if full else 8, hidden, 0.2), (ids(sizes, batch),), loss
