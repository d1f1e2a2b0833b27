"""Small models for recorded steps: bags of any size, padding, pairs of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(400, 16, mode="sum", include_last_offset=True)
        self.top = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.top(self.emb(ids, offsets)).squeeze(1)


class Padded(nn.Module):
    """Bags of one size; id 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(400, 16, mode="sum", padding_idx=0)
        self.top = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.emb(ids)).squeeze(1)


class Dots(nn.Module):
    """Products of all pairs of rows and what is given with them."""

    pairs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.top = nn.Linear(14, 1)
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, x: Tensor, ids: list[Tensor]) -> Tensor:
        t = torch.stack([x, *[emb(i) for emb, i in zip(self.emb, ids, strict=True)]], 1)
        li, lj = self.pairs
        return self.top(torch.cat([x, torch.bmm(t, t.mT)[:, li, lj]], 1)).squeeze(1)


class Listed(nn.Module):
    """Products of pairs that are lists: they stay on the host when the model moves to a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(50, 8) for _ in range(4))
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.stack([emb(ids[:, k]) for k, emb in enumerate(self.emb)], 1)
        products = rows[:, [0, 0, 0, 1, 1]] * rows[:, [1, 2, 3, 2, 3]]
        return self.top(F.relu(products).mean(1)).squeeze(1)
