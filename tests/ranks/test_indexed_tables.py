"""Lookups that a model spells without an embedding layer, on ranks: the numbers of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import run
from torch import Tensor, nn

import recast

ROWS, BATCH, STEPS = 11, 6, 3


class Indexed(nn.Module):
    """A Parameter that ids index, from its end too, beside a table whose padding row is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Parameter(torch.randn(ROWS, 4))
        self.words = nn.Embedding(ROWS, 4, padding_idx=3)
        nn.init.normal_(self.words.weight)
        self.last = nn.Linear(4, 1)

    def forward(self, ids: Tensor, words: Tensor) -> Tensor:
        rows = self.items[ids] * self.words(words).mean(1)
        return self.last(rows).squeeze(1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return (
        torch.randint(-ROWS, ROWS, (2 * BATCH,), generator=g),
        torch.randint(ROWS, (2 * BATCH, 5), generator=g),
    )


def train(model: Any, optimizer: torch.optim.Optimizer, rows: slice) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*(x[rows] for x in batch(step))).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_training_is_that_of_one_process(kind: str) -> None:
    torch.manual_seed(0)
    model = Indexed()
    plain = copy.deepcopy(model)
    train(plain, torch.optim.Adagrad(plain.parameters(), lr=0.1), slice(None))

    def one(rank: int) -> dict[str, Tensor]:
        own = slice(rank * BATCH, (rank + 1) * BATCH)
        mine = copy.deepcopy(model)
        optimizer: torch.optim.Optimizer = torch.optim.Adagrad(mine.parameters(), lr=0.1)
        given = tuple(x[own] for x in batch(0))
        fast, optimizer = recast.optimize(mine, optimizer, example=given, sharding=kind)
        tables = ("items", "words.weight")
        assert [fast.plan.placement(t).sharding_type for t in tables] == [kind, kind]
        train(fast, optimizer, own)
        state: dict[str, Tensor] = fast.full_state_dict(ranks="all")
        return state

    for state in run(2, one):
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(state[name], wanted, rtol=1e-5, atol=1e-6)
