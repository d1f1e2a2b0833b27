"""Models of what users do besides: packed inputs, attention, all kinds of bags, flags, towers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import DIM, VOCAB, dense_and_bags, features, field_ids, generator, packed
from models.case import case
from models.published import MLP


class Packed(nn.Module):
    """Ids in columns of a float matrix, a padded sequence pooled by its mask, a shared Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dict = nn.ModuleDict(
            {f"C{k}": nn.Embedding(rows, DIM) for k, rows in enumerate(VOCAB)}
        )
        self.linears = nn.ModuleList([nn.Linear(5 * DIM + 2, 8), nn.Linear(8, 6)])
        self.bn = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(6)])
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(6, 1, bias=False)

    def forward(self, X: Tensor) -> Tensor:
        parts = [self.embedding_dict[f"C{k}"](X[:, k : k + 1].long()) for k in range(len(VOCAB))]
        ids = X[:, 4:8].long()
        sequence = self.embedding_dict["C0"](ids)
        mask = (ids != 0).unsqueeze(-1).float()
        pooled = (sequence * mask).sum(1, keepdim=True) / (mask.sum(1, keepdim=True) + 1e-8)
        h = torch.cat([torch.cat([*parts, pooled], dim=1).flatten(1), X[:, 8:10]], dim=-1)
        for linear, bn in zip(self.linears, self.bn, strict=True):
            h = self.dropout(torch.relu(bn(linear(h))))
        return torch.sigmoid(self.out(h))


@case("packed", packed, lookups=5, random=True)
def packed_slices() -> Packed:
    return Packed()


class Attention(nn.Module):
    """Dict input, one table shared by item and history, attention pooling (DIN)."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(VOCAB[0], DIM)
        self.item = nn.Embedding(VOCAB[1], DIM, padding_idx=0)
        self.score = nn.Sequential(nn.Linear(4 * DIM, 6), nn.PReLU(), nn.Linear(6, 1))
        self.head = MLP([3 * DIM, 8, 1], norm=True, act=nn.PReLU)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        target, keys = self.item(x["item"]), self.item(x["history"])
        query = target.unsqueeze(1).expand(-1, keys.shape[1], -1)
        score = self.score(torch.cat([query, keys, query - keys, query * keys], dim=-1))
        score = score.masked_fill((x["history"] == 0).unsqueeze(-1), -1e9)
        pooled = torch.bmm(torch.softmax(score, dim=1).transpose(1, 2), keys).squeeze(1)
        return torch.sigmoid(self.head(torch.cat([self.user(x["user"]), target, pooled], dim=1)))


@case("attention", features, lookups=3)
def attention() -> Attention:
    return Attention()


class Bags(nn.Module):
    """Pooled lookups: mean, max, weights, padding, last offset, functional, 2-D ids."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(VOCAB[0], DIM, mode="mean", padding_idx=0)
        self.max = nn.EmbeddingBag(VOCAB[1], DIM, mode="max")
        self.weighted = nn.EmbeddingBag(VOCAB[2], DIM, mode="sum", include_last_offset=True)
        self.table = nn.Parameter(torch.randn(VOCAB[3], DIM))
        self.square = nn.EmbeddingBag(VOCAB[0], 2, mode="sum", padding_idx=2)
        self.head = nn.Sequential(nn.Linear(4 * DIM + 2, 6), nn.LeakyReLU(0.1), nn.Linear(6, 2))

    def forward(
        self, a: tuple[Tensor, Tensor], b: Tensor, c: tuple[Tensor, Tensor, Tensor], d: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = [
            self.mean(a[0], a[1]),
            self.max(b),
            self.weighted(c[0], c[1], per_sample_weights=c[2]),
            F.embedding_bag(d, self.table, mode="mean"),
            self.square(d + 1),
        ]
        left, right = self.head(torch.cat(parts, dim=1)).chunk(2, dim=1)
        return left, right


def bag_batch(rows: int, seed: int) -> tuple[Any, ...]:
    g = generator(seed)
    _, offsets, ids = dense_and_bags(rows, seed, last=True)
    b = torch.randint(VOCAB[1], (rows, 3), generator=g)
    d = torch.randint(VOCAB[3], (rows, 4), generator=g)
    c = (ids[2], offsets[2], torch.randn(ids[2].shape, generator=g))
    return (ids[0], offsets[0][:-1]), b, c, d


@case("bags", bag_batch, lookups=5)
def bags() -> Bags:
    return Bags()


class Flags(nn.Module):
    """Python control flow on the training flag, functional dropout, plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(rows, DIM) for rows in VOCAB)
        self.p = 0.3
        self.temperature = 2.0
        self.first = nn.Linear(len(VOCAB) * DIM, 8)
        self.second = nn.Linear(8, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([emb(x[:, k]) for k, emb in enumerate(self.embs)], dim=1)
        h = F.dropout(F.relu(self.first(h)), self.p, self.training)
        if self.training:  # noqa: SIM108
            h = h + 0.5 * torch.tanh(self.second(h))
        else:
            h = self.second(h)
        return self.out(h) / self.temperature


@case("flags", field_ids, lookups=4, random=True)
def flags() -> Flags:
    return Flags()


class TwoTower(nn.Module):
    """User and item towers, cosine similarity, an unused table whose gradient stays None."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(VOCAB[0], DIM)
        self.item = nn.Embedding(VOCAB[1], DIM)
        self.city = nn.Embedding(VOCAB[2], DIM)
        self.unused = nn.Embedding(3, DIM)
        self.user_tower = nn.Sequential(nn.Linear(2 * DIM, 8), nn.GELU(), nn.Linear(8, 4))
        self.item_tower = nn.Sequential(nn.Linear(DIM + 1, 8), nn.SiLU(), nn.Linear(8, 4))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        u = self.user_tower(torch.cat([self.user(x["user"]), self.city(x["city"])], dim=1))
        v = self.item_tower(torch.cat([self.item(x["item"]), x["price"].view(-1, 1)], dim=1))
        return F.cosine_similarity(u, v, dim=1)


@case("two_tower", features, lookups=3)
def two_tower() -> TwoTower:
    return TwoTower()
