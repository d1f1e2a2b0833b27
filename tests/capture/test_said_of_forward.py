"""What the report says of a forward that prints, branches or raises by itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import UsageError

log = logging.getLogger(__name__)
X = torch.randn(6, 4)


class Talks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "print":
            print("a word")
        if self.how == "log":
            log.warning("a word")
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("how", ["print", "log", ""])
def test_what_the_graph_does_not_print_is_named(how: str, capsys: Any) -> None:
    fast = recast.optimize(Talks(how), example=X)
    capsys.readouterr()
    fast(X)
    assert capsys.readouterr().out == ""
    told = [n for n in fast.report.told_notes() if n.startswith("printed or logged")]
    assert len(told) == bool(how)
    assert all("not by the graph: test_said_of_forward.py:" in n for n in told)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1


def test_a_branch_on_values_is_explained() -> None:
    (told,) = recast.explain(Branches(), example=X.abs()).told_notes()
    assert told.startswith("python branches on values: test_said_of_forward.py:")
    assert "the plain forward runs" in told


class OfADict(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return features["x"] @ torch.zeros(3, 3)


def test_the_error_of_a_model_that_was_given_its_arguments_speaks_of_no_dict() -> None:
    with pytest.raises(UsageError, match="the plain model raises on it") as caught:
        recast.optimize(OfADict(), example=({"x": X},))
    assert caught.value.where is not None
    assert caught.value.where.startswith("test_said_of_forward.py:")
    assert caught.value.tries == ("call the plain model yourself: model(*example)",)


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y


@pytest.mark.parametrize(
    ("model", "example", "call"),
    [
        (nn.Linear(9, 2), X, "model(example)"),
        (nn.Linear(9, 2), [X, X[:2]], "model(example[0])"),
        (nn.GRU(9, 2), X, "model(example)"),  # its second argument has a default
        (nn.Linear(9, 2), (X,), "model(*example)"),
        (Two(), {"x": X, "y": X}, "model(**example)"),
        (Two(), [{"x": X, "y": X.T}, {"x": X, "y": X}], "model(**example[1])"),
    ],
)
def test_the_call_to_try_is_one_that_passes_the_example(
    model: nn.Module, example: Any, call: str
) -> None:
    with pytest.raises(UsageError, match="the plain model raises on it") as caught:
        recast.optimize(model, example=example)
    assert caught.value.tries == (f"call the plain model yourself: {call}",)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y * 2


class OnlyEvaluated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("it is not trained")
        return x * 2


def test_where_a_model_raises_in_training_is_named() -> None:
    report = recast.explain(OnlyEvaluated().eval(), example=X)
    assert report.captured != "whole" and "not trained" in str(report.why)
    assert str(report.where).startswith("test_said_of_forward.py:")
