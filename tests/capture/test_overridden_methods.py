"""What the user's class, or a trainer, has instead of methods of ``nn.Module``."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import recast

IDS = torch.randint(9, (6, 4), generator=torch.Generator().manual_seed(0))


class Field(NamedTuple):
    name: str
    rows: int


class Named(Field):
    """As libraries describe columns: named tuples with more to them."""


class Trained(nn.Module):
    """As libraries write it: its own ``compile`` and ``fit``, a norm that stays frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.fields = [Named("a", 9)]
        self.tables = nn.ModuleDict({f.name: nn.EmbeddingBag(f.rows, 8) for f in self.fields})
        self.norm, self.top = nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.moved = 0

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(
            self.norm(torch.cat([self.tables[f.name](ids) for f in self.fields]))
        )
        return out

    def train(self, mode: bool = True) -> Trained:
        super().train(mode)
        self.norm.eval()
        return self

    def compile(self, optimizer: str, lr: float) -> None:  # type: ignore[override]
        self.optim = getattr(torch.optim, optimizer)(self.parameters(), lr=lr)

    def to(self, *args: Any, **kwargs: Any) -> Trained:
        self.moved += 1
        return super().to(*args, **kwargs)


def test_what_the_class_overrides_is_called() -> None:
    fast = recast.optimize(Trained(), example=IDS)
    assert fast.train() is fast and fast.training
    assert not fast.norm.training
    fast.compile("SGD", lr=0.5)
    assert fast.optim.param_groups[0]["lr"] == 0.5
    assert fast.to(torch.float64) is fast and fast.moved == 1
    assert "_apply" not in vars(fast._root)
    assert fast(IDS).dtype == torch.float64


def test_frozen_norm_trains_to_the_same_numbers() -> None:
    model = Trained()
    fast = recast.optimize(copy.deepcopy(model), example=IDS)
    weights = torch.randn(6, 1)
    for one in (model, fast):
        one.train()
        (one(IDS) * weights).sum().backward()
    assert torch.equal(model.norm.running_mean, fast.norm.running_mean)
    assert torch.allclose(model.top.weight.grad, fast.top.weight.grad)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_replaced_on_the_object_is_called(when: str) -> None:
    model, calls = Trained(), []
    if when == "before":
        model.zero_grad = lambda: calls.append(1)  # type: ignore[method-assign, assignment]
    fast = recast.optimize(model, example=IDS)
    if when == "after":
        fast.zero_grad = lambda: calls.append(1)
    fast.zero_grad()
    assert calls == [1]
    del fast.zero_grad
    fast.zero_grad()
    assert calls == [1]


def test_loaded_result_knows_its_named_tuples() -> None:
    fast = pickle.loads(pickle.dumps(recast.optimize(Trained(), example=IDS)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", recast.RecastWarning)
        fast(IDS)
    fast._root.fields[0] = Named("a", 8)
    with pytest.warns(recast.RecastWarning, match="plain forward"):
        fast(IDS)


class OfGraphs(nn.Module):
    """With names that the result has, too, as an attribute, a buffer, a module and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 4)
        self.graphs = [[0, 1]]
        self.register_buffer("graph", torch.eye(4))
        self.parts = nn.ModuleList([nn.Linear(4, 4)])
        self.forms = self.running = False

    def code(self) -> str:
        return "its own"

    def forward(self, ids: Tensor) -> Tensor:
        return self.parts[0](self.rows(ids) @ self.graph)


def test_names_that_the_result_has_are_the_users() -> None:
    model = OfGraphs()
    ids = torch.randint(9, (6,))
    fast: Any = recast.optimize(model, example=ids)
    assert fast.graph is model.graph and fast.graphs is fast._root.graphs
    assert isinstance(fast.parts[0], nn.Linear) and fast.code() == "its own"
    assert fast.forms is False and fast.running is False
    assert "recast.embedding_bags" in str(fast) and fast.report.captured == "whole"
    assert copy.deepcopy(fast).graphs == [[0, 1]]
    torch.testing.assert_close(fast(ids), model(ids))


def test_a_name_that_is_given_later_is_the_users() -> None:
    fast: Any = recast.optimize(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), example=torch.rand(5, 3))
    assert list(fast.graph.nodes)
    fast.graph = "the user's"
    assert fast.graph == "the user's" and fast._root.graph == "the user's"
    del fast.graph
    assert list(fast.graph.nodes)
