"""xDeepFM: compressed interactions of all fields beside an MLP (Lian et al., 2018).

    z_k = conv₁ₓ₁(x₀ ⊗ z_{k-1}),  logit = Σ w_i + linear(Σ_d z) + MLP(v)

recast diff examples/models/xdeepfm.py:model
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from criteo import Subject, ids, lookup, loss, mlp, rows, tables
from torch import Tensor, nn


class XDeepFM(nn.Module):
    def __init__(
        self, rows: Sequence[int], dim: int, units: Sequence[int], hidden: Sequence[int], p: float
    ):
        super().__init__()
        self.wide, self.emb = tables(rows, 1), tables(rows, dim)
        before = [len(rows), *units[:-1]]
        self.cin = nn.ModuleList(
            nn.Conv1d(len(rows) * a, b, 1) for a, b in zip(before, units, strict=True)
        )
        self.out = nn.Linear(sum(units), 1)
        self.deep = mlp([len(rows) * dim, *hidden, 1], p)

    def forward(self, x: Tensor) -> Tensor:
        v = lookup(self.emb, x)
        z, found = v, []
        for conv in self.cin:
            outer = torch.einsum("bmd,bnd->bmnd", v, z).flatten(1, 2)
            z = conv(outer)
            found.append(z)
        crossed = self.out(torch.cat(found, 1).sum(2))
        return (lookup(self.wide, x).sum(1) + crossed + self.deep(v.flatten(1))).squeeze(1)


def model(batch: int = 128, full: bool = False) -> Subject:
    """A model, one batch and a loss; ``full``: Criteo x4, three CIN layers of 16."""
    torch.manual_seed(0)
    sizes, hidden = rows(full), [1000] * 5 if full else [64] * 2
    units = [16] * 3 if full else [6] * 3
    net = XDeepFM(sizes, 16 if full else 8, units, hidden, 0.2)
    return net, (ids(sizes, batch),), loss
