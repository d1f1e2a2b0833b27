"""share-values: what a model computes twice is computed once, and what must stay two stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import journal, same
from torch import Tensor, nn

DIM = 4


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, DIM, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 7, (rows,), generator=g)


BATCHES = [batch(6, 0), batch(9, 1)]


class Model(nn.Module):
    """``forward(x, ids) = form(self, x, ids)`` with layers for the form to call."""

    def __init__(self, form: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.form = form
        self.scale = nn.Parameter(torch.full((DIM,), 1.5))
        self.linear = nn.Linear(DIM, DIM)
        self.table = nn.Embedding(7, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.form(self, x * self.scale, ids)


def shared(fast: Any) -> list[str]:
    return [entry.what for entry in journal(fast).fired if entry.rule == "share-values"]


SHARED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], int]] = {
    "a layer": (lambda m, x, i: m.linear(x) * m.linear(x).relu(), 1),
    "a chain": (lambda m, x, i: m.linear(x).relu() * 2 + m.linear(x).relu() * 3, 2),
    "a lookup": (lambda m, x, i: m.table(i) * m.table(i).sin(), 1),
    "slices": (lambda m, x, i: x[:, 1:3].sum(1) * x[:, 1:3].mean(1), 1),
}


@pytest.mark.parametrize("form", SHARED)
def test_repeated_values_are_computed_once(form: str) -> None:
    function, count = SHARED[form]
    noun = "repeated value" + "s" * (count > 1)
    assert shared(same(Model(function), BATCHES)) == [f"{count} {noun} computed once"]


KEPT: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "random numbers": lambda m, x, i: m.dropout(x) * m.dropout(x),
    "statistics": lambda m, x, i: m.norm(x) * m.norm(x),
    "written in place": lambda m, x, i: m.linear(x).add_(1) * m.linear(x),
    "returned": lambda m, x, i: (m.linear(x), m.linear(x)),
    "other numbers": lambda m, x, i: torch.full((1,), 1) * x + torch.full((1,), 1.0) * x,
}


@pytest.mark.parametrize("form", KEPT)
def test_what_must_stay_two_stays_two(form: str) -> None:
    fast = same(Model(KEPT[form]), BATCHES, steps=False)
    assert not shared(fast)


def test_values_beside_a_write_in_place_are_shared() -> None:
    def form(m: Any, x: Tensor, ids: Tensor) -> Tensor:
        written = (x * 2).relu_()
        return written + m.table(ids) * m.table(ids).sin()

    assert shared(same(Model(form), BATCHES)) == ["1 repeated value computed once"]


@pytest.mark.parametrize(
    "hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_run_as_often_as_before(hook: str) -> None:
    model = Model(SHARED["a layer"][0])
    ran: list[int] = []
    getattr(model.linear, hook)(lambda *args: ran.append(1))
    fast = same(model, BATCHES, steps=False)
    assert not shared(fast)
    ran.clear()
    fast(*BATCHES[0]).sum().backward()
    assert len(ran) == 2


def test_a_hook_added_later_runs_once_for_each_call_of_the_plain_model() -> None:
    model = Model(SHARED["a layer"][0])
    fast = same(model, BATCHES, steps=False)
    assert shared(fast)
    ran: list[int] = []
    fast.get_submodule("linear").register_forward_hook(lambda *args: ran.append(1))
    with pytest.warns(match="hook"):
        fast(*BATCHES[0])
    assert len(ran) == 2
