"""Models of the literature, small: DLRM, DeepFM, DCN, xDeepFM, PNN, MMoE, wide and deep, SASRec."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batches import DIM, VOCAB, dense_and_bags, features, field_ids, sequences
from models.case import case


class MLP(nn.Module):
    """Linear [BatchNorm] activation [Dropout] ..., the last Linear alone."""

    def __init__(
        self, sizes: list[int], *, dropout: float = 0.0, norm: bool = False, act: type = nn.ReLU
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes[:-1]):
            layers.append(nn.Linear(a, b))
            layers += [nn.BatchNorm1d(b)] if norm else []
            layers.append(act())
            layers += [nn.Dropout(dropout)] if dropout else []
        layers.append(nn.Linear(sizes[-2], sizes[-1]))
        self.mlp = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class OffsetEmbedding(nn.Module):
    """One table for all fields; ids are shifted by the sizes of the fields before."""

    def __init__(self, vocab: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(vocab), dim)
        self.starts = [sum(vocab[:k]) for k in range(len(vocab))]

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x + x.new_tensor(self.starts).unsqueeze(0))


# ---------------------------------------------------------------- models


class DLRM(nn.Module):
    """The canonical DLRM: bags, dot interaction over a triangle, two MLPs, a sigmoid."""

    def __init__(
        self,
        vocab: tuple[int, ...] = VOCAB,
        dim: int = DIM,
        dense: int = 3,
        *,
        sparse: bool = False,
        dropout: float = 0.0,
        norm: bool = False,
        itself: bool = False,
        mode: str = "sum",
    ) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode=mode, sparse=sparse) for rows in vocab
        )
        self.bot_l = self.chain([dense, 8, dim], dropout, norm, nn.ReLU())
        self.itself = itself
        n = len(vocab) + 1
        pairs = n * (n + 1) // 2 if itself else n * (n - 1) // 2
        self.top_l = self.chain([dim + pairs, 8, 1], dropout, norm, nn.Sigmoid())

    @staticmethod
    def chain(sizes: list[int], dropout: float, norm: bool, last: nn.Module) -> nn.Sequential:
        layers: list[nn.Module] = []
        for k, (a, b) in enumerate(pairwise(sizes)):
            final = k == len(sizes) - 2
            layers.append(nn.Linear(a, b))
            layers += [nn.BatchNorm1d(b)] if norm and not final else []
            layers.append(last if final else nn.ReLU())
            layers += [nn.Dropout(dropout)] if dropout and not final else []
        return nn.Sequential(*layers)

    def interact(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        batch, d = x.shape
        t = torch.cat([x, *ly], dim=1).view((batch, -1, d))
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        _, ni, nj = z.shape
        extra = 1 if self.itself else 0
        li = torch.tensor([i for i in range(ni) for j in range(i + extra)])
        lj = torch.tensor([j for i in range(nj) for j in range(i + extra)])
        return torch.cat([x, z[:, li, lj]], dim=1)

    def forward(self, dense: Tensor, offsets: list[Tensor], indices: list[Tensor]) -> Tensor:
        x = self.bot_l(dense)
        ly = [emb(indices[k], offsets[k]) for k, emb in enumerate(self.emb_l)]
        return self.top_l(self.interact(x, ly))


@case("dlrm", dense_and_bags, lookups=4)
def dlrm(**options: Any) -> DLRM:
    return DLRM(**options)


@case("dlrm_sparse", dense_and_bags, lookups=4)
def dlrm_sparse() -> DLRM:
    return DLRM(sparse=True)


@case("dlrm_dropout_norm", dense_and_bags, lookups=4, random=True)
def dlrm_dropout_norm() -> DLRM:
    return DLRM(dropout=0.3, norm=True, itself=True, mode="mean")


@case("dlrm_stacked", lambda r, s: dense_and_bags(r, s, stacked=True), lookups=4)
def dlrm_stacked() -> DLRM:
    """Offsets as one (tables, batch) matrix."""
    return DLRM()


class DeepFM(nn.Module):
    """Two offset tables (dimension d and 1), FM, an MLP with BatchNorm and Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = OffsetEmbedding(VOCAB, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.embedding = OffsetEmbedding(VOCAB, DIM)
        self.mlp = MLP([len(VOCAB) * DIM, 8, 8, 1], dropout=0.2, norm=True)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        square_of_sum = torch.sum(e, dim=1) ** 2
        sum_of_square = torch.sum(e**2, dim=1)
        fm = 0.5 * torch.sum(square_of_sum - sum_of_square, dim=1, keepdim=True)
        wide = torch.sum(self.linear(x), dim=1) + self.bias
        return torch.sigmoid((wide + fm + self.mlp(e.view(-1, len(VOCAB) * DIM))).squeeze(1))


@case("deepfm", field_ids, lookups=2, random=True)
def deepfm() -> DeepFM:
    return DeepFM()


class DCN(nn.Module):
    """A table per feature of a dict, cross network, deep network."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                "user": nn.Embedding(VOCAB[0], DIM),
                "item": nn.Embedding(VOCAB[1], DIM, padding_idx=0),
                "city": nn.Embedding(VOCAB[2], DIM),
            }
        )
        d = 3 * DIM + 1
        self.w = nn.ModuleList(nn.Linear(d, 1, bias=False) for _ in range(2))
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(d)) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(d, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(d + 8, 1)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        embedded = [table(x[name].long()).unsqueeze(1) for name, table in self.tables.items()]
        x0 = torch.cat([torch.cat(embedded, dim=1).flatten(1), x["price"].unsqueeze(1)], dim=1)
        cross = x0
        for w, b in zip(self.w, self.b, strict=True):
            cross = x0 * w(cross) + b + cross
        return torch.sigmoid(self.head(torch.cat([cross, self.deep(x0)], dim=1)))


@case("dcn", features, lookups=3)
def dcn() -> DCN:
    return DCN()


class XDeepFM(nn.Module):
    """Compressed interaction network (outer products and 1x1 convolutions) beside an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = OffsetEmbedding(VOCAB, DIM)
        f = len(VOCAB)
        self.convs = nn.ModuleList([nn.Conv1d(f * f, 6, 1), nn.Conv1d(f * 3, 6, 1)])
        self.fc = nn.Linear(3 + 6, 1)
        self.mlp = MLP([f * DIM, 8, 1], dropout=0.2, norm=True)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        x0, h, found = e.unsqueeze(2), e, []
        for k, conv in enumerate(self.convs):
            z = x0 * h.unsqueeze(1)
            batch, f0, f1, d = z.shape
            y = F.relu(conv(z.view(batch, f0 * f1, d)))
            if k == 0:
                y, h = torch.split(y, y.shape[1] // 2, dim=1)
            found.append(y)
        cin = self.fc(torch.sum(torch.cat(found, dim=1), 2))
        return torch.sigmoid((cin + self.mlp(e.flatten(1))).squeeze(1))


@case("xdeepfm", field_ids, lookups=1, random=True)
def xdeepfm() -> XDeepFM:
    return XDeepFM()


class PNN(nn.Module):
    """Inner products of all pairs of fields beside the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(rows, DIM) for rows in VOCAB)
        n = len(VOCAB)
        self.register_buffer("row", torch.tensor([i for i in range(n) for j in range(i + 1, n)]))
        self.register_buffer("col", torch.tensor([j for i in range(n) for j in range(i + 1, n)]))
        self.mlp = MLP([n * DIM + n * (n - 1) // 2, 8, 1], act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        e = torch.stack([emb(x[:, k]) for k, emb in enumerate(self.embs)], dim=1)
        inner = torch.sum(e[:, self.row] * e[:, self.col], dim=2)
        return self.mlp(torch.cat([e.flatten(1), inner], dim=1)).squeeze(1)


@case("pnn", field_ids, lookups=4)
def pnn() -> PNN:
    return PNN()


class MMoE(nn.Module):
    """Two tasks, three experts, a softmax gate per task; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(rows, DIM) for rows in VOCAB)
        d = len(VOCAB) * DIM
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3)
        )
        self.gates = nn.ModuleList(nn.Linear(d, 3) for _ in range(2))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 1))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        e = torch.cat([emb(x[:, k]) for k, emb in enumerate(self.embs)], dim=1)
        experts = torch.stack([expert(e) for expert in self.experts], dim=1)
        out = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            mix = torch.softmax(gate(e), dim=1).unsqueeze(2)
            out.append(torch.sigmoid(tower((experts * mix).sum(1))))
        return {"click": out[0], "buy": out[0] * out[1]}


@case("mmoe", field_ids, lookups=4, random=True)
def mmoe() -> MMoE:
    return MMoE()


class WideDeep(nn.Module):
    """A linear part over dim-1 tables and a deep part over the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(rows, 1) for rows in VOCAB)
        self.deep = nn.ModuleList(
            nn.Embedding(rows, DIM, sparse=k == 1) for k, rows in enumerate(VOCAB)
        )
        self.hidden = nn.ModuleList([nn.Linear(len(VOCAB) * DIM, 8), nn.Linear(8, 8)])
        self.dropout = nn.Dropout(0.25)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = sum(t(x[:, k]) for k, t in enumerate(self.wide))
        h = torch.cat([t(x[:, k]) for k, t in enumerate(self.deep)], dim=-1)
        for layer in self.hidden:
            h = self.dropout(F.relu(layer(h)))
        return torch.sigmoid(wide + self.out(h)).view(-1)


@case("widedeep", field_ids, lookups=8, random=True)
def widedeep() -> WideDeep:
    return WideDeep()


class SASRec(nn.Module):
    """A block of masked attention over a history, and two convolutions of single places."""

    def __init__(self, items: int = VOCAB[0], length: int = 6, dim: int = 8) -> None:
        super().__init__()
        self.item = nn.Embedding(items, dim, padding_idx=0)
        self.place = nn.Parameter(torch.randn(length, dim))
        self.before, self.between, self.after = (nn.LayerNorm(dim) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.one, self.two = nn.Conv1d(dim, dim, 1), nn.Conv1d(dim, dim, 1)
        self.drop, self.drop_one, self.drop_two = (nn.Dropout(0.2) for _ in range(3))

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        x = self.item(history) * 8**0.5 + self.place
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        first = self.before(x)
        q, k, v = (
            layer(y).unflatten(2, (2, -1)).transpose(1, 2)
            for layer, y in ((self.q, first), (self.k, x), (self.v, x))
        )
        scores = (q @ k.transpose(2, 3) / 2).masked_fill(later, -1e9)
        y = self.drop(F.softmax(scores, -1)) @ v
        x = self.between(first + y.transpose(1, 2).flatten(2))
        y = self.two(self.drop_one(self.one(x.transpose(-1, -2))).relu())
        x = self.after(self.drop_two(y).transpose(-1, -2) + x)
        return (x * self.item(items)).sum(-1)


@case("sasrec", sequences, 2, random=True)
def sasrec() -> SASRec:
    return SASRec()
