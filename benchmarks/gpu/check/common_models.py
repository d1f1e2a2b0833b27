"""Five models in common styles, in plain torch, for machines without a library of models.

Each stands for a form of input and of interaction that the models of ``examples`` do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = (30, 7, 200, 50, 11)
DIM = 8


class Subject(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, ...]]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def field_ids(rows: int, seed: int) -> tuple[Tensor]:
    g = _generator(seed)
    return (torch.stack([torch.randint(v, (rows,), generator=g) for v in VOCAB], 1),)


class OffsetTable(nn.Module):
    """One table for all fields; ids are shifted by the sizes of the fields before."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(VOCAB), dim)
        self.starts = [sum(VOCAB[:k]) for k in range(len(VOCAB))]

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x + x.new_tensor(self.starts).unsqueeze(0))


class AttentionalFM(nn.Module):
    """Products of all pairs, weighted by attention (Xiao et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = OffsetTable(1), OffsetTable(DIM)
        self.attention, self.score = nn.Linear(DIM, 6), nn.Linear(6, 1)
        self.out = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        pairs = [(i, j) for i in range(len(VOCAB)) for j in range(i + 1, len(VOCAB))]
        p, q = e[:, [i for i, _ in pairs]], e[:, [j for _, j in pairs]]
        products = p * q
        weights = F.softmax(self.score(F.relu(self.attention(products))), dim=1)
        return (self.linear(x).sum(1) + self.out((weights * products).sum(1))).squeeze(1)


class PackedFactors(nn.Module):
    """One float matrix holds ids, a padded history and numbers, cut by slices (NFM style)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(v, DIM, padding_idx=0) for v in VOCAB)
        self.norm = nn.BatchNorm1d(DIM)
        self.deep = nn.Sequential(nn.Linear(DIM + 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, packed: Tensor) -> Tensor:
        n = len(VOCAB)
        fields = [t(packed[:, k : k + 1].long()) for k, t in enumerate(self.tables)]
        history = packed[:, n : n + 6].long()
        mask = (history != 0).float().unsqueeze(2)
        seen = (self.tables[0](history) * mask).sum(1, keepdim=True) / (
            mask.sum(1, keepdim=True) + 1e-8
        )
        e = torch.cat([*fields, seen], 1)
        pooled = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1))
        return self.deep(torch.cat([self.norm(pooled), packed[:, -2:]], 1)).squeeze(1)


def packed(rows: int, seed: int) -> tuple[Tensor]:
    g = _generator(seed)
    history = torch.randint(VOCAB[0], (rows, 6), generator=g)
    ids = field_ids(rows, seed)[0]
    return (torch.cat([ids, history, torch.randn(rows, 2, generator=g)], 1),)


class InterestAttention(nn.Module):
    """A history attended by the candidate, from a dict of features (Zhou et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(VOCAB[0], DIM), nn.Embedding(VOCAB[2], DIM)
        self.unit = nn.Sequential(nn.Linear(4 * DIM, 12), nn.PReLU(), nn.Linear(12, 1))
        self.deep = nn.Sequential(nn.Linear(3 * DIM, 16), nn.PReLU(), nn.Linear(16, 1))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        user, target = self.user(x["user"]), self.item(x["target"])
        history = self.item(x["history"])
        query = target.unsqueeze(1).expand_as(history)
        both = torch.cat([query, history, query - history, query * history], 2)
        weight = self.unit(both) * (x["history"] > 0).unsqueeze(2)
        return self.deep(torch.cat([user, target, (weight * history).sum(1)], 1)).squeeze(1)


def interests(rows: int, seed: int) -> tuple[dict[str, Tensor]]:
    g = _generator(seed)
    return (
        {
            "user": torch.randint(VOCAB[0], (rows,), generator=g),
            "target": torch.randint(VOCAB[2], (rows,), generator=g),
            "history": torch.randint(VOCAB[2], (rows, 5), generator=g),
        },
    )


class FieldAttention(nn.Module):
    """Fields attend to each other (AutoInt, Song et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = OffsetTable(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.keep = nn.Linear(DIM, DIM)
        self.out = nn.Linear(len(VOCAB) * DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        crossed, _ = self.attention(e, e, e)
        return self.out(F.relu(crossed + self.keep(e)).flatten(1)).squeeze(1)


class SharedBags(nn.Module):
    """Bags with offsets and weights, two from one ``sparse=True`` table, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(VOCAB[2], DIM, mode="sum", sparse=True)
        self.tags = nn.EmbeddingBag(VOCAB[3], DIM, mode="mean")
        self.deep = nn.Sequential(nn.Linear(3 * DIM, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(
        self, seen: Tensor, bought: Tensor, weights: Tensor, tags: Tensor, offsets: Tensor
    ) -> dict[str, Tensor]:
        rows = torch.cat(
            [
                self.items(seen, offsets),
                self.items(bought, offsets, per_sample_weights=weights),
                self.tags(tags),
            ],
            1,
        )
        click, buy = self.deep(rows).unbind(1)
        return {"click": click, "buy": click * buy}


def shared_bags(rows: int, seed: int) -> tuple[Tensor, ...]:
    g = _generator(seed)
    counts = torch.randint(0, 5, (rows,), generator=g)
    total, offsets = int(counts.sum()), counts.cumsum(0) - counts
    return (
        torch.randint(VOCAB[2], (total,), generator=g),
        torch.randint(VOCAB[2], (total,), generator=g),
        torch.rand(total, generator=g),
        torch.randint(VOCAB[3], (rows, 3), generator=g),
        offsets,
    )


ZOO = {
    "attentional FM": Subject(AttentionalFM, field_ids),
    "packed factors": Subject(PackedFactors, packed),
    "interest attention": Subject(InterestAttention, interests),
    "field attention": Subject(FieldAttention, field_ids),
    "shared bags": Subject(SharedBags, shared_bags),
}
