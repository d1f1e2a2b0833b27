"""``y = x.t().contiguous(); y += 1``: a copy of the example, and a view of a batch of one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast


class Writes(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.write = nn.Embedding(20, 8), nn.Linear(8, 8), write
        self.dropout, self.flat = nn.Dropout(0.5), nn.Flatten()

    def forward(self, ids: Tensor) -> Any:
        return self.write(self, self.layer(self.table(ids)))


def _add(view: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
    def write(net: Any, x: Tensor) -> Any:
        y = view(net, x)
        y += 1
        return y, x

    return write


def _under(net: Any, x: Tensor) -> Tensor:
    y = x.t().contiguous()
    x += 1
    return y


FORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "contiguous": _add(lambda net, x: x.t().contiguous()),
    "reshape": _add(lambda net, x: x.t().reshape(-1)),
    "flatten": _add(lambda net, x: torch.flatten(x.t())),
    "Flatten": _add(lambda net, x: net.flat(x.unsqueeze(2).transpose(0, 1))),
    "through a dropout": _add(lambda net, x: net.dropout(x.t().contiguous())),
    "dropout": _add(lambda net, x: net.dropout(x)),
    "F.dropout": _add(lambda net, x: F.dropout(x, 0.5, net.training)),
    "from below": _under,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("training", [True, False])
def test_what_it_changes(form: str, training: bool) -> None:
    model = Writes(FORMS[form]).train(training)
    fast = recast.optimize(model, example=torch.arange(6))
    assert fast.report.to_dict()["captured"] == "whole"
    for mode in (training, not training):
        model.train(mode)
        fast.train(mode)
        for rows in (6, 1, 3):
            outputs = []
            for one in (model, fast):
                torch.manual_seed(1)
                outputs.append(one(torch.arange(rows)))
            torch.testing.assert_close(*outputs)


def test_what_a_cast_makes_of_it() -> None:
    """A copy of float32, and the very tensor of float64."""
    model = Writes(_add(lambda net, x: x.to(torch.float64)))
    fast = recast.optimize(model, example=torch.arange(6))
    torch.testing.assert_close(fast(torch.arange(4)), model(torch.arange(4)))
    model.double()
    torch.testing.assert_close(fast(torch.arange(4)), model(torch.arange(4)))


def test_it_is_a_new_value_where_nothing_else_sees_it() -> None:
    def write(net: Any, x: Tensor) -> Tensor:
        y = net.dropout(x.t().contiguous())
        y += 1
        return y  # type: ignore[no-any-return]

    fast = recast.optimize(Writes(write), example=torch.arange(6))
    (graph,) = fast._runner.graphs.values()
    assert "iadd" not in str(graph)
