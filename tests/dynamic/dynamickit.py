"""What the tests of dynamic tables share: a model, streams of ids, and its plain twin."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.optim import RowWiseAdagrad

KINDS: dict[str, tuple[Any, dict[str, Any], int]] = {  # numbers of a row with its state
    "sgd": (torch.optim.SGD, {}, 8),
    "adagrad": (torch.optim.Adagrad, {}, 16),
    "row-wise-adagrad": (RowWiseAdagrad, {}, 9),
    "lazy-adam": (torch.optim.Adam, {"sparse_semantics": "lazy"}, 24),
}


class Model(nn.Module):
    """Users by id, items by bags of ids, a plain table beside them."""

    def __init__(self, dim: int = 8, rows: int = 40, sparse: bool = False) -> None:
        super().__init__()
        self.user = nn.Embedding(rows, dim, sparse=sparse)
        self.items = nn.EmbeddingBag(rows, dim, mode="mean", sparse=sparse)
        self.day = nn.Embedding(7, dim, sparse=sparse)
        self.top = nn.Sequential(nn.Linear(3 * dim, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: Tensor, items: Tensor, offsets: Tensor, day: Tensor) -> Tensor:
        rows = [self.user(user), self.items(items, offsets), self.day(day)]
        return self.top(torch.cat(rows, 1)).squeeze(1)


class Stream:
    """Batches of raw ids out of a set of ``many`` for users and items each."""

    def __init__(self, seed: int, many: int = 30) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        spread = torch.randint(-(2**62), 2**62, (2, many), generator=self.generator)
        self.users, self.things = spread[0], spread[1]
        self.users[0], self.things[0] = 0, -1  # numbers that are something else to others

    def batch(self, size: int) -> tuple[Tensor, ...]:
        def draw(n: int, high: int) -> Tensor:
            return torch.randint(high, (n,), generator=self.generator)

        sizes = draw(size, 5)
        items = self.things[draw(int(sizes.sum()), len(self.things))]
        users = self.users[draw(size, len(self.users))]
        return users, items, sizes.cumsum(0) - sizes, draw(size, 7)


def example(stream: Stream) -> list[Any]:
    return [stream.batch(6), stream.batch(9)]


class Twin(nn.Module):
    """The plain model over ids that were numbered beforehand, with the rows a dynamic one gives."""

    def __init__(self, model: Model, fast: nn.Module, stream: Stream) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.numbers = [_sorted(stream.users), _sorted(stream.things)]
        tables = recast.dynamic.tables(fast)
        for module, ids, name in (
            (self.model.user, self.numbers[0], "user"),
            (self.model.items, self.numbers[1], "items"),
        ):
            rows = tables[name].initial_rows(ids, module.weight.dtype)
            module.weight = nn.Parameter(rows)
            module.num_embeddings = len(ids)

    def forward(self, user: Tensor, items: Tensor, offsets: Tensor, day: Tensor) -> Tensor:
        user = torch.searchsorted(self.numbers[0], user)
        items = torch.searchsorted(self.numbers[1], items)
        out: Tensor = self.model(user, items, offsets, day)
        return out

    def rows(self, name: str, ids: Tensor) -> Tensor:
        module, numbers = {
            "user": (self.model.user, self.numbers[0]),
            "items": (self.model.items, self.numbers[1]),
        }[name]
        return module.weight.detach()[torch.searchsorted(numbers, ids)]


def _sorted(ids: Tensor) -> Tensor:
    return torch.sort(ids).values


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, ...]]
) -> list[Tensor]:
    """Steps with random labels; the outputs before each."""
    return [train_one(model, optimizer, batch, k) for k, batch in enumerate(batches)]


def train_one(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], k: int
) -> Tensor:
    """Step ``k``; the output before it."""
    generator = torch.Generator().manual_seed(k)
    label = torch.rand(len(batch[0]), generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    out: Tensor = model(*batch)
    F.binary_cross_entropy_with_logits(out, label.to(out.dtype).round()).backward()
    optimizer.step()
    return out.detach()


def train_ahead(
    model: Any, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, ...]]
) -> list[Tensor]:
    """As ``train``, each next batch fetched between the lookup of this one and its update."""
    outs, tables = [], recast.dynamic.tables(model)
    for k, batch in enumerate(batches):

        def look_ahead(grad: Tensor, k: int = k) -> None:
            if k + 1 < len(batches):
                tables["user"].prefetch(batches[k + 1][0])
                tables["items"].prefetch(batches[k + 1][1])

        hook = model.top[0].weight.register_hook(look_ahead)
        outs.append(train_one(model, optimizer, batch, k))
        hook.remove()
    return outs


def same_rows(one: Any, other: Any, placed: list[tuple[Tensor, ...]] | None = None) -> None:
    """Both have the same ids with the same rows, to the bit.

    ``placed``: the batches of a GPU on which rows lie in other places of the two tables. Where they
    lie decides at which entries their sums are cut (csrc/cuda/row_sums.cuh), so that three entries
    of a row in one batch, or more, may be added in another order.
    """
    for place, name in enumerate(("user", "items")):
        mine, theirs = (recast.dynamic.export(m.get_submodule(name)) for m in (one, other))
        assert torch.equal(mine.ids, theirs.ids)
        differ = mine.ids[(mine.rows != theirs.rows).any(1)]
        assert set(differ.tolist()) <= _often(place, placed or [])
        torch.testing.assert_close(mine.rows, theirs.rows, rtol=4e-7, atol=1e-7)


def _often(place: int, batches: list[tuple[Tensor, ...]]) -> set[int]:
    """Ids with three entries or more in one of ``batches``."""
    found: set[int] = set()
    for batch in batches:
        ids, counts = batch[place].unique(return_counts=True)
        found |= set(ids[counts > 2].tolist())
    return found


def waiting(one: Any) -> dict[int, tuple[int, int]]:
    """Ids that wait for MinCount in a table: how often each was looked up, and when last."""
    ids, counts, stamps = one.candidates().tolist()
    return dict(zip(ids, zip(counts, stamps, strict=True), strict=True))
