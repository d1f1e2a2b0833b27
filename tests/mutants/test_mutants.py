"""Mutants of small models are optimised to the same numbers, and what is not so is found.

``pytest tests/passes --mutants 4`` tries four mutants of each model that these tests optimise.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import changes
import pytest
import torch
from mutants import mutant
from torch import Tensor, nn
from torch.nn import functional as F
from trials import failures

import recast

FIELDS, ROWS, DIM = 4, 11, 3


class Tables(nn.Module):
    """Some tables, a deep part, and what all models below are made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(FIELDS))
        self.first = nn.Embedding(ROWS, 1)
        self.deep = nn.Sequential(nn.Linear(FIELDS * DIM, 6), nn.ReLU(), nn.Linear(6, 1))
        self.cross = nn.ModuleList(nn.Linear(FIELDS * DIM, FIELDS * DIM) for _ in range(2))
        self.gate = nn.Linear(FIELDS * DIM, 2)

    def rows(self, ids: Tensor) -> Tensor:
        return torch.stack([table(ids[:, k]) for k, table in enumerate(self.tables)], dim=1)


class Machine(Tables):
    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        pairs = 0.5 * (rows.sum(1).pow(2) - rows.pow(2).sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.first(ids).sum(1) + pairs + self.deep(rows.flatten(1)))


class Crossed(Tables):
    def forward(self, ids: Tensor) -> Tensor:
        start = x = self.rows(ids).flatten(1)
        for layer in self.cross:
            x = start * layer(x) + x
        return self.deep(x) + x.mean(1, keepdim=True)


class Dotted(Tables):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows(ids)
        products = torch.bmm(rows, rows.transpose(1, 2))
        li, lj = torch.tril_indices(FIELDS, FIELDS, offset=-1)
        flat = torch.cat([rows.flatten(1), products[:, li, lj]], dim=1)
        return flat, self.deep(flat[:, : FIELDS * DIM])


class Mixture(Tables):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids).flatten(1)
        weights = F.softmax(self.gate(x), dim=1)
        experts = torch.stack([F.relu(layer(x)) for layer in self.cross], dim=1)
        mixed = (weights.unsqueeze(2) * experts).sum(1)
        return self.deep(F.dropout(mixed, 0.2, self.training))


MODELS: tuple[type[nn.Module], ...] = (Machine, Crossed, Dotted, Mixture)
BATCHES = [torch.randint(ROWS, (n, FIELDS), generator=torch.Generator().manual_seed(n))
           for n in (7, 5)]  # fmt: skip


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_mutants_of(kind: type[nn.Module]) -> None:
    assert failures(kind(), BATCHES, 8, random.Random(kind.__name__)) == []


def test_a_compiler_that_misses_the_change_is_found() -> None:
    model = Machine().double()

    def unchanged(mutated: nn.Module, **options: Any) -> Any:
        old = copy.deepcopy(model)
        old.load_state_dict(mutated.state_dict())
        return recast.optimize(old, **options)

    found = failures(model, BATCHES, 12, random.Random(0), unchanged)
    assert len(found) > 4 and all("def " in text for text in found)


def test_each_kind_of_change_is_made() -> None:
    rng, done = random.Random(0), set[str]()
    for _ in range(200):
        made = mutant(Mixture(), rng)
        done |= {made.what} if made is not None else set()
    for part in ("=>", "other way", "another operator", "other arguments", "another name",
                 "and then", "with torch.", ", twice", ", earlier"):  # fmt: skip
        assert any(part in what for what in done), part
    assert len(done) > 100 and len(changes.VALUES) > 50
