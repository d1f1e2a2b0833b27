"""What models write by hand and no rule takes: each is named, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import journal, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH, LENGTH = 11, 4, 3


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=g, dtype=torch.float64)
    ids = torch.randint(ROWS, (rows, LENGTH), generator=g)
    return x, ids, torch.randint(1, LENGTH + 1, (rows,), generator=g)


BATCHES = [batch(5, 0), batch(8, 1)]


class Model(nn.Module):
    """``form(self, x, ids, lengths)``, with parameters that it may want."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.form = form
        self.rows = nn.Embedding(ROWS, WIDTH)
        self.weight, self.bias = nn.Parameter(torch.randn(5, WIDTH)), nn.Parameter(torch.randn(5))
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.table, self.numbers = (
            nn.Parameter(torch.randn(ROWS, 2)),
            nn.Parameter(torch.ones(ROWS)),
        )
        self.chosen = nn.Parameter(torch.randn(6))
        self.register_buffer("places", torch.tensor([4, 0, 3, 1]))

    def forward(self, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.form(self, x, ids, lengths)


def _masked(m: Any, x: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    behind = torch.arange(LENGTH) >= lengths.unsqueeze(1)
    return m.rows(ids).masked_fill(behind.unsqueeze(2), 0.0).sum(1)


def _deviation(m: Any, x: Tensor, *_: Tensor) -> Tensor:
    mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return m.scale * (x - mean) / (deviation + 1e-6) + m.shift


NAMED: dict[str, tuple[str, Callable[..., Tensor], str]] = {
    "a layer": (
        "fuse-mlp", lambda m, x, *_: torch.relu(x @ m.weight.T + m.bias), "by hand join no chain",
    ),
    "a layer, across": (
        "fuse-mlp", lambda m, x, *_: torch.tanh(m.bias + torch.mm(x, m.weight.t())), "by hand",
    ),
    "addmm": (
        "fuse-mlp", lambda m, x, *_: torch.relu(torch.addmm(m.bias, x, m.weight.t())), "an addmm",
    ),
    "a layer norm": ("fuse-layer-norm", _deviation, "divides by a standard deviation"),
    "rows within lengths": ("pool-sequences", _masked, "other rows than those of one id"),
    "numbers by ids": (
        "look-up-rows", lambda m, x, ids, _: m.numbers[ids].sum(1), "indexed by ids",
    ),
    "one-hot": (
        "group-embeddings",
        lambda m, x, ids, _: F.one_hot(ids[:, 0], ROWS).to(m.table.dtype) @ m.table,
        "a one-hot vector times a Parameter is a lookup",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", NAMED)
def test_it_is_named_and_keeps_its_numbers(form: str) -> None:
    rule, written, why = NAMED[form]
    fast = same(Model(written), BATCHES, steps=False)
    found = [entry for entry in journal(fast).missed if entry.rule == rule and why in entry.why]
    assert found and found[0].tries, journal(fast).missed
    assert (found[0].where or "").startswith("test_by_hand_pass.py:")


UNNAMED: dict[str, Callable[..., Tensor]] = {
    "a sum of values": lambda m, x, *_: torch.relu(x @ x.T.mean(1, keepdim=True) + m.bias[:1]),
    "weights of features": lambda m, x, *_: x * m.chosen[m.places],
    "a deviation of something else": lambda m, x, *_: (
        (x - x.mean(-1, keepdim=True)) / (x.abs().std(-1, keepdim=True) + 1e-6)
    ),
}


@pytest.mark.parametrize("form", UNNAMED)
def test_what_is_something_else_is_not(form: str) -> None:
    fast = same(Model(UNNAMED[form]), BATCHES, steps=False)
    rules = ("fuse-mlp", "fuse-layer-norm", "look-up-rows", "group-embeddings")
    assert not [why for rule in rules for why in misses(fast, rule)]
