"""DCN: a cross network beside an MLP (Wang et al., 2017).

    x_{l+1} = x₀ (x_l · w_l) + b_l + x_l

recast diff examples/models/dcn.py:model
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from criteo import Subject, ids, lookup, loss, mlp, rows, tables
from torch import Tensor, nn


class DCN(nn.Module):
    def __init__(self, rows: Sequence[int], dim: int, layers: int, hidden: Sequence[int], p: float):
        super().__init__()
        self.emb, width = tables(rows, dim), len(rows) * dim
        self.w = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(layers))
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(layers))
        self.deep = mlp([width, *hidden], p, last=True)
        self.head = nn.Linear(width + hidden[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        x0 = lookup(self.emb, x).flatten(1)
        xl = x0
        for w, b in zip(self.w, self.b, strict=True):
            xl = x0 * w(xl) + b + xl
        return self.head(torch.cat([xl, self.deep(x0)], 1)).squeeze(1)


def model(batch: int = 128, full: bool = False) -> Subject:
    """A model, one batch and a loss; ``full``: Criteo x4, four cross layers."""
    torch.manual_seed(0)
    sizes, hidden = rows(full), [1000] * 5 if full else [64] * 2
    return DCN(sizes, 16 if full else 8, 4, hidden, 0.2), (ids(sizes, batch),), loss
