"""clean-up and fuse-relu-dropout: what goes, what stays, and what does not pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from passkit import calls, fired, journal, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

from recast.runtime import OPS


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 4, generator=g, dtype=torch.float64),)


BATCHES = [batch(5, 0), batch(8, 1)]


class Model(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.function = function
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def names(fast: Any) -> list[str]:
    return [str(getattr(n.target, "__name__", n.target)) for n in fast.graph.nodes]


def test_what_nobody_uses_goes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        torch.exp(x)
        return x * m.weight

    assert "exp" not in names(same(Model(forward), BATCHES, steps=False))


def test_a_dropped_draw_would_move_all_that_follow() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.drop(x)
        return m.drop(x * m.weight)

    assert names(same(Model(forward), BATCHES, steps=False)).count("drawn_dropout") == 2


def test_a_write_stays() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x * m.weight
        y.add_(1.0)
        y[:, 0] = 0.0
        return y

    same(Model(forward), BATCHES, steps=False)


def test_an_attribute_is_read_once() -> None:
    fast = same(Model(lambda m, x: x * m.weight + m.weight - m.weight), BATCHES, steps=False)
    assert names(fast).count("weight") == 1


def test_relu_and_dropout_outside_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(lambda m, x: m.drop(torch.relu(x * m.weight)))
    functional = Model(lambda m, x: F.dropout(F.relu(x * m.weight), 0.4, m.training))
    for one in (model, functional):
        fast = same(one, BATCHES, steps=False)
        if OPS["relu_dropout"].pays("cpu"):
            assert fired(fast) == {"fuse-relu-dropout": 1} and calls(fast, "relu_dropout")
        else:
            (why,) = misses(fast, "fuse-relu-dropout")
            assert "does not pay on cpu" in why and not calls(fast, "relu_dropout")


def test_the_other_answer_of_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["relu_dropout"]
    other = {} if not op.pays("cpu") else {"cpu": "it is slow here"}
    monkeypatch.setitem(op.__dict__, "not_worth", other)
    fast = same(Model(lambda m, x: m.drop(torch.relu(x * m.weight))), BATCHES, steps=False)
    assert bool(calls(fast, "relu_dropout")) == op.pays("cpu")
    assert bool(misses(fast, "fuse-relu-dropout")) != op.pays("cpu")
    assert not journal(fast).raised
