"""PNN: inner products of all pairs of fields, into an MLP (Qu et al., 2016).

    logit = MLP(v, (⟨v_i, v_j⟩) for i > j)

recast diff examples/models/pnn.py:model
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from criteo import Subject, ids, lookup, loss, mlp, rows, tables
from torch import Tensor, nn


class PNN(nn.Module):
    def __init__(self, rows: Sequence[int], dim: int, hidden: Sequence[int], dropout: float):
        super().__init__()
        self.emb = tables(rows, dim)
        f = len(rows)
        i, j = torch.tril_indices(f, f, offset=-1)
        self.register_buffer("i", i, persistent=False)
        self.register_buffer("j", j, persistent=False)
        self.deep = mlp([f * dim + f * (f - 1) // 2, *hidden, 1], dropout)

    def forward(self, x: Tensor) -> Tensor:
        v = lookup(self.emb, x)
        inner = torch.bmm(v, v.transpose(1, 2))[:, self.i, self.j]
        return self.deep(torch.cat([v.flatten(1), inner], 1)).squeeze(1)


def model(batch: int = 128, full: bool = False) -> Subject:
    """A model, one batch and a loss; ``full``: Criteo x4, 741 products."""
    torch.manual_seed(0)
    sizes, hidden = rows(full), [1000, 1000] if full else [64] * 2
    return PNN(sizes, 16 if full else 8, hidden, 0.2), (ids(sizes, batch),), loss
