"""An in-place write holds back the nodes whose values it may change, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from recast.rewriter import alias, order
from recast.rewriter.ir import KEY, Note, Spec


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(3, 3)
        self.act = nn.ReLU(inplace=True)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def hits(function: Callable[..., Any]) -> set[str]:
    """The names of the values that the first write of ``function`` may touch."""
    model = Model(function)
    graph = fx.Tracer().trace(model)
    for node in graph.nodes:
        node.meta[KEY] = Note(spec=Spec(torch.float32, ("B", 3)))
    known = alias.roots(graph, model)
    write = next(n for n in graph.nodes if order.writes(n, model))
    return {
        n.name
        for n in graph.nodes
        if n is not write and n.op != "output" and alias.clash(write, model, {n}, known)
    }


def _setitem(m: Any, x: Tensor) -> Any:
    y = x + 1
    z = y.view(-1)
    other = x * 2
    torch.fill_(z, 0.0)
    return y, other


def _private(m: Any, x: Tensor) -> Any:
    return m.act(m.linear(x)) + m.linear(x)


def _outside(m: Any, x: Tensor) -> Any:
    x.add_(1)
    return m.weight * 2


def _positional(m: Any, x: Tensor) -> Any:
    y = x * 2
    return F.leaky_relu(y, 0.1, True), x + 1


def _made_like(m: Any, x: Tensor) -> Any:
    y = x * 2
    z = torch.empty_like(y)
    z.copy_(y)
    return z, y + 1


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (_setitem, {"add", "view"}),
        (_private, {"linear", "add"}),
        (_outside, {"x", "weight", "mul"}),
        (_positional, {"mul"}),
        (_made_like, {"empty_like"}),
    ],
)
def test_what_a_write_may_touch(function: Callable[..., Any], want: set[str]) -> None:
    assert hits(function) == want
