"""DLRM-DCNv2: the low-rank cross network of MLPerf's DLRM, over bags of ids (Wang et al., 2020).

    x_{l+1} = x₀ * (U_l (V_l x_l) + b_l) + x_l

recast diff examples/models/dcn_v2.py:model
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from criteo import Subject, loss, mlp
from mlperf_dlrm import ROWS, bags
from torch import Tensor, nn


class DCNv2(nn.Module):
    def __init__(
        self, rows: Sequence[int], dim: int, rank: int, bottom: Sequence[int], top: Sequence[int]
    ):
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum") for n in rows)
        width = (len(rows) + 1) * dim
        self.bottom = mlp([13, *bottom, dim], last=True)
        self.v = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(3))
        self.u = nn.ModuleList(nn.Linear(rank, width) for _ in range(3))
        self.top = mlp([width, *top, 1])

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        pooled = [emb(indices[k], offsets[k]) for k, emb in enumerate(self.emb)]
        x0 = torch.cat([self.bottom(dense), *pooled], 1)
        xl = x0
        for u, v in zip(self.u, self.v, strict=True):
            xl = x0 * u(v(xl)) + xl
        return self.top(xl).squeeze(1)


def model(batch: int = 128, full: bool = False) -> Subject:
    """Likewise; ``full``: MLPerf's DLRM-DCNv2, 105 GB of tables, so on the meta device."""
    torch.manual_seed(0)
    if full:
        with torch.device("meta"):
            return DCNv2(ROWS, 128, 512, [512, 256], [1024, 1024, 512, 256]), None, loss
    sizes = [min(n, 500) for n in ROWS[:8]]
    return DCNv2(sizes, 8, 16, [32], [64, 32]), bags(sizes, batch, most=4), loss
