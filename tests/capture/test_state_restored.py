"""What forward writes to in the model, besides parameters and buffers, is as before optimize."""

from __future__ import annotations

import copy
import types
from collections import deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import recast


class Base(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.a, self.held = nn.Linear(4, 4), held

    def step(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) * self.step(x.detach().mean(0))
        return y


class InPlace(Base):
    def step(self, x: Tensor) -> Any:
        self.held.mul_(0.5).add_(x)
        return self.held


class Counted(Base):
    def step(self, x: Tensor) -> Any:
        self.held += 1
        return self.held * x


class Data(Base):
    def step(self, x: Tensor) -> Any:
        self.held.data = self.held.data * 0.5 + x
        return self.held


class InObject(Base):
    def step(self, x: Tensor) -> Any:
        self.held.n = self.held.n + 1
        return self.held.n


class InObjectOfDict(Base):
    def step(self, x: Tensor) -> Any:
        one = self.held["one"][0]
        one.n = one.n + 1
        return one.n


class TensorOfObject(Base):
    def step(self, x: Tensor) -> Any:
        self.held.n.mul_(0.5).add_(x)
        return self.held.n


class TensorOfList(Base):
    def step(self, x: Tensor) -> Any:
        self.held.n[0].data = self.held.n[0] * 0.5 + x
        return self.held.n[0]


class ListOfObject(Base):
    def step(self, x: Tensor) -> Any:
        self.held.n.append(1)
        return len(self.held.n)


class InArray(Base):
    def step(self, x: Tensor) -> Any:
        self.held[1] += 1
        return float(self.held[1])


class ArrayOfObject(Base):
    def step(self, x: Tensor) -> Any:
        self.held.n[1] += 1
        return float(self.held.n[1])


class Window(Base):
    def step(self, x: Tensor) -> Any:
        self.held.append(x)
        return sum(self.held) / len(self.held)


def holding(**held: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**held)


KINDS: dict[type[Base], Any] = {
    InPlace: torch.zeros(4),
    Counted: torch.zeros(()),
    Data: torch.ones(4),
    InObject: holding(n=0),
    InObjectOfDict: {"one": [holding(n=0)]},
    TensorOfObject: holding(n=torch.ones(4)),
    TensorOfList: holding(n=[torch.ones(4)]),
    ListOfObject: holding(n=[]),
    InArray: numpy.zeros(3),
    ArrayOfObject: holding(n=numpy.zeros(3)),
    Window: deque(maxlen=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_as_before(kind: type[Base]) -> None:
    torch.manual_seed(0)
    model = kind(copy.deepcopy(KINDS[kind]))
    plain, held = copy.deepcopy(model), model.held
    fast = recast.optimize(model, example=torch.randn(6, 4))
    assert model.held is held
    assert str(held) == str(plain.held)  # all of it is short
    for rows in (6, 3, 6, 5):
        x = torch.randn(rows, 4)
        for mode in (True, False):
            torch.testing.assert_close(fast.train(mode)(x), plain.train(mode)(x))


@pytest.mark.parametrize("kind", [InPlace, Counted])
def test_a_graph_that_writes_to_an_attribute(kind: type[Base]) -> None:
    fast = recast.optimize(kind(torch.zeros(4)), example=torch.randn(6, 4))
    assert fast.report.to_dict()["captured"] == "whole"


@pytest.mark.parametrize("rows", [6, 64])
def test_the_example_is_left_as_it_is(rows: int) -> None:
    """Also by a forward that writes to its input."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.mul_(2))

    example = torch.randn(rows, 4)
    before = example.clone()
    recast.optimize(Writes(), example=example)
    assert torch.equal(example, before)
