"""Numbers that Python calls equal and torch does not: 1, 1.0 and True, and zeros of two signs. A
graph that has one of them baked is not run for another, wherever forward finds it.
"""

from __future__ import annotations

import array
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning

IDS = torch.arange(6)


class Pair(NamedTuple):
    one: Any
    other: Any


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class Net(nn.Module):
    def __init__(self, held: Any = 3) -> None:
        super().__init__()
        self.rows, self.top = nn.Embedding(20, 4), nn.Linear(4, 1)
        self.held = held

    def forward(self, ids: Tensor, given: Any = 3) -> Tensor:
        out = self.top(self.rows(ids)).squeeze(1)
        for number in (self.held, given):
            if isinstance(number, Box):
                number = number.value
            while not isinstance(number, (int, float, complex)):
                number = number[0]
            if isinstance(number, complex):
                number = number.imag
            out = out.copysign(torch.full((len(ids),), float(number)))
            out = out + (ids * number).dtype.itemsize + isinstance(number, bool)
        return out


# How a number is held, by a value or by an object in which it is written anew.
FORMS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "list": lambda x: [x],
    "dict": lambda x: {0: x},
    "beside an object": lambda x: [x, nn.Linear],
    "named tuple": lambda x: Pair(x, None),
    "object": Box,
    "list in an object": lambda x: Box([x]),
}
PAIRS = [(0.0, -0.0), (1, True), (2, 2.0)]


def told(fast: Any, model: Net, *given: Any) -> list[str]:
    """Warnings of a call that gives what the plain forward does."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", RecastWarning)
        torch.testing.assert_close(fast(IDS, *given), Net.forward(model, IDS, *given))
    return [str(w.message) for w in found]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("was", "now"), PAIRS)
def test_in_arguments_and_attributes(form: str, was: Any, now: Any) -> None:
    make = FORMS[form]
    fast = recast.optimize(model := Net(), example=(IDS, make(was)))
    assert fast.graphs and not told(fast, model, make(was))
    (said,) = told(fast, model, make(now))
    assert "other constants, than the example (given" in said
    fast = recast.optimize(model := Net(make(was)), example=IDS)
    model.held = fast.held = make(was)
    assert fast.graphs and not told(fast, model)
    model.held = fast.held = make(now)
    (said,) = told(fast, model)
    assert "held" in said


class First(nn.Module):
    """Reads what comes first in a dict, or the number in a set."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.rows, self.held = nn.Embedding(20, 4), held

    def forward(self, ids: Tensor) -> Tensor:
        out = self.rows(ids).abs()
        for one in self.held:
            if isinstance(one, (str, float)):
                return out.copysign(torch.tensor(-0.0 if one == "minus" else one == "plus" or one))
        return out


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({"plus": "x", "minus": "y"}, {"minus": "y", "plus": "x"}),
        ({"plus": Box, "minus": Box}, {"minus": Box, "plus": Box}),
        ({0.0, Box}, {-0.0, Box}),
    ],
)
def test_dicts_in_another_order_and_sets(was: Any, now: Any) -> None:
    fast = recast.optimize(model := First(was), example=IDS)
    assert fast.graphs
    torch.testing.assert_close(fast(IDS), model(IDS), rtol=0, atol=0)
    model.held = fast.held = now
    with pytest.warns(RecastWarning, match="held was"):
        found = fast(IDS)
    torch.testing.assert_close(found, First.forward(model, IDS), rtol=0, atol=0)


def test_a_number_of_numpy() -> None:
    fast = recast.optimize(model := Net(), example=(IDS, np.float64(0.0)))
    assert fast.graphs and not told(fast, model, np.float64(0.0))
    assert len(told(fast, model, np.float64(-0.0))) == 1


def test_in_an_array() -> None:
    fast = recast.optimize(model := Net(array.array("i", [2])), example=IDS)
    model.held = fast.held = array.array("i", [2])
    assert fast.graphs and not told(fast, model)
    model.held = fast.held = array.array("f", [2])
    assert len(told(fast, model)) == 1


@pytest.mark.parametrize("number", [0j, float("nan")])
def test_one_that_is_complex_or_no_number(number: Any) -> None:
    fast = recast.optimize(model := Net(), example=(IDS, number))
    assert fast.graphs and not told(fast, model, type(number)(repr(number).strip("()")))
    assert len(told(fast, model, number * -1)) == (number == 0)


def test_numbers_that_differ_between_the_batches_may_have_either_sign() -> None:
    class Scaled(Net):
        def forward(self, ids: Tensor, given: Any = 3) -> Tensor:
            return self.top(self.rows(ids)).squeeze(1) + (ids + 1) / torch.full((6,), 1e30) * given

    for second in (1.0, -0.0):
        fast = recast.optimize(model := Scaled(), example=[(IDS, 0.0), (IDS, second)])
        for given in (0.0, -0.0, 2.0):
            found, expected = fast(IDS, given), model(IDS, given)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
