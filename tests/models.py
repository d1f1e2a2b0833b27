"""Small plain PyTorch recommendation models, written as their users write them.

Every test that needs a model takes it from here. ``CASES[name]`` says how to make a model, how to
make a batch of any size for it, and a loss. ``build(name)`` gives ``(model, [batch, batch], loss)``
with two batches of different size. Nothing here imports this project.

All are tiny (tables of some ten rows, dimension 4) so that a thousand of them run in a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = (10, 6)  # the two batch sizes of build()
VOCAB = (11, 7, 13, 5)  # rows of the tables
DIM = 4


@dataclass(frozen=True)
class Case:
    """``make()`` a seeded model, ``batch(rows, seed)`` its arguments, ``loss(output)`` a scalar."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, ...]]
    loss: Callable[[Any], Tensor]
    lookups: int  # embedding lookups in its forward
    random: bool = False  # it draws random numbers in train mode


CASES: dict[str, Case] = {}

# torch warns at the first sparse gradient unless this default is asked for; here warnings fail.
torch.sparse.check_sparse_tensor_invariants.disable()


def build(name: str, rows: tuple[int, int] = ROWS, seed: int = 0) -> tuple[nn.Module, list, Any]:
    """``(model, [batch of rows[0], batch of rows[1]], loss)``; the model is new at each call."""
    case = CASES[name]
    return case.make(), [case.batch(rows[0], seed), case.batch(rows[1], seed + 1)], case.loss


def click_loss(output: Any) -> Tensor:
    """Binary cross entropy of every output (probabilities or logits) against fixed labels."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]
    total = torch.zeros((), dtype=tensors[0].dtype)
    for k, t in enumerate(tensors):
        label = (torch.arange(t.numel(), device=t.device) % (k + 3) == 0).to(t.dtype).view_as(t)
        total = total + F.binary_cross_entropy_with_logits(t, label) * (k + 1)
    return total


def case(
    name: str, batch: Callable[[int, int], tuple[Any, ...]], lookups: int, random: bool = False
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a builder under ``name``."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def seeded() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                return make()

        CASES[name] = Case(name, seeded, batch, click_loss, lookups, random)
        return make

    return register


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- batches


def field_ids(rows: int, seed: int, vocab: tuple[int, ...] = VOCAB) -> tuple[Tensor]:
    """One int64 matrix (rows, fields) of ids, each local to its field; many repeat."""
    g = generator(seed)
    return (torch.stack([torch.randint(v, (rows,), generator=g) for v in vocab], 1),)


def dense_and_bags(
    rows: int,
    seed: int,
    dense: int = 3,
    tables: int = 4,
    *,
    last: bool = False,
    stacked: bool = False,
) -> tuple[Any, ...]:
    """``(dense (rows, dense), offsets, ids)`` with a list entry per table; bags of 0 to 3 ids."""
    g = generator(seed)
    offsets, ids = [], []
    for k in range(tables):
        counts = torch.randint(0, 4, (rows,), generator=g)
        ends = torch.cumsum(counts, 0)
        start = torch.cat([torch.zeros(1, dtype=torch.long), ends])
        offsets.append(start if last else start[:-1])
        ids.append(torch.randint(VOCAB[k % len(VOCAB)], (int(ends[-1]),), generator=g))
    x = torch.randn(rows, dense, generator=g)
    return x, (torch.stack(offsets) if stacked else offsets), ids


def features(rows: int, seed: int) -> tuple[dict[str, Tensor]]:
    """A dict of named features: three ids, a sequence padded with 0, a number."""
    g = generator(seed)
    history = torch.randint(1, VOCAB[1], (rows, 5), generator=g)
    history[torch.arange(5) >= torch.randint(1, 6, (rows, 1), generator=g)] = 0
    return (
        {
            "user": torch.randint(VOCAB[0], (rows,), generator=g),
            "item": torch.randint(VOCAB[1], (rows,), generator=g),
            "city": torch.randint(VOCAB[2], (rows,), generator=g),
            "history": history,
            "price": torch.randn(rows, generator=g),
        },
    )


def packed(rows: int, seed: int) -> tuple[Tensor]:
    """One float matrix: four id columns, a sequence of four ids padded with 0, two numbers."""
    g = generator(seed)
    ids = field_ids(rows, seed)[0]
    history = torch.randint(1, VOCAB[0], (rows, 4), generator=g)
    history[torch.arange(4) >= torch.randint(1, 5, (rows, 1), generator=g)] = 0
    return (torch.cat([ids.float(), history.float(), torch.randn(rows, 2, generator=g)], 1),)


# ---------------------------------------------------------------- parts


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
