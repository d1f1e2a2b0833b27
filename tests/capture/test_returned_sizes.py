"""Forwards that return ``x.shape``, or keep it: a ``torch.Size``, as of the plain model."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast


class Sized(nn.Module):
    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.returns = nn.Embedding(20, 8), returns
        self.kept: Any = None

    def forward(self, ids: Tensor) -> Any:
        rows = self.table(ids)
        self.kept = rows.shape
        return rows, self.returns(rows)


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "alone": lambda x: x.shape,
    "in containers": lambda x: {"a": x.shape, "b": [x.size(), (x.shape[0], tuple(x.shape))]},
    "sliced": lambda x: (x.shape[:1], x.shape[1:], x.shape[::-1], x.shape[-1]),
    "joined": lambda x: (x.shape[:-1] + (2, 4), (3,) + x.shape, x.shape * 2, 2 * x.shape),  # noqa: RUF005
    "asked": lambda x: isinstance(x.shape, torch.Size) and x.shape.numel(),
}


def _flat(value: Any) -> list[Any]:
    """What is in ``value``, with the class of each container."""
    if isinstance(value, dict):
        return [dict, *value, *_flat([*value.values()])]
    if isinstance(value, (tuple, list)):
        return [type(value), *(one for held in value for one in _flat(held))]
    return [type(value), value]


@pytest.mark.parametrize("form", FORMS)
def test_a_returned_shape_is_a_size_of_torch(form: str) -> None:
    model = Sized(FORMS[form])
    fast = recast.optimize(model, example=torch.arange(6))
    assert fast.report.to_dict()["captured"] == "whole"
    for rows in (6, 3, 1):
        ids = torch.arange(rows)
        (wanted, sizes), (got, ours) = model(ids), fast(ids)
        torch.testing.assert_close(got, wanted)
        assert _flat(ours) == _flat(sizes)
        assert type(fast.kept) is torch.Size
        assert fast.kept == (rows, 8)
    recast.diff(model, fast, [torch.arange(n) for n in (6, 4)], steps=2).check()


def test_its_place_in_the_output_can_be_saved() -> None:
    fast = recast.optimize(Sized(lambda x: [x.shape]), example=torch.arange(6))
    (traced,) = fast._runner.traced.values()
    again = pickle.loads(pickle.dumps(traced.template))
    assert type(again[1][0]) is type(traced.template[1][0])
    assert len(again[1][0]) == 2


class Told(nn.Module):
    """Says beside a size, in its argument and in itself in which mode it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mode = nn.Embedding(20, 8), ""

    def forward(self, batch: dict[str, Any]) -> Any:
        rows = self.table(batch["ids"])
        batch["told"] = self.training
        self.mode = "train" if self.training else "eval"
        return rows, rows.shape, 1 if self.training else 2


def test_constants_of_each_mode() -> None:
    model = Told()
    fast = recast.optimize(model, example={"batch": {"ids": torch.arange(6)}})
    for training in (True, False):
        fast.train(training)
        batch: dict[str, Any] = {"ids": torch.arange(4)}
        assert fast(batch)[1:] == (torch.Size([4, 8]), 1 if training else 2)
        assert batch["told"] is training
        assert fast.mode == ("train" if training else "eval")
