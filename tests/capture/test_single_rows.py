"""Examples with a single row, as one serves: batch norm does not train on it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import recast

IDS = torch.randint(0, 50, (9, 4), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.norm = nn.Embedding(50, 8), nn.BatchNorm1d(8)
        self.top = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.top(self.norm(self.e(x).sum(1)))
        return out


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.training else out.sigmoid()


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x)


def batch(rows: int) -> Tensor:
    return IDS[:rows]


@pytest.mark.parametrize("kind", [Net, Branching, Counting])
def test_a_model_with_batch_norm_is_captured_whole(kind: type[Net]) -> None:
    """In both modes, for any number of rows that the model takes: warnings are errors here."""
    plain, given = kind(), kind().eval()
    fast = recast.optimize(given, example=batch(1))
    assert fast.report.captured == "whole"
    assert any("takes no single row" in note for note in fast.report.notes)
    for rows, training in ((1, False), (4, True), (9, True), (1, False), (2, False)):
        results = []
        for model in (plain, fast):
            model.train(training)
            results.append(model(batch(rows)))
            if training:
                results[-1].sum().backward()
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(list(fast.buffers()), list(plain.buffers()))
    grads = [p.grad for p in plain.parameters()]
    torch.testing.assert_close([p.grad for p in fast.parameters()], grads)


def test_training_on_a_single_row_raises_as_the_model_does() -> None:
    fast = recast.optimize(Net().eval(), example=batch(1)).train()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fast(batch(1))


@pytest.mark.parametrize("turned", [False, True])
def test_one_of_two_examples_may_have_a_single_row(turned: bool) -> None:
    example = [batch(1), batch(9)][:: -1 if turned else 1]
    assert recast.optimize(Net(), example=example).report.captured == "whole"


class Simple(Net):
    """Without batch norm the row that was given is the example."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.top(self.e(x).sum(1))
        return out


def test_no_more_rows_where_one_will_do() -> None:
    report = recast.explain(Simple().eval(), example=batch(1))
    assert report.captured == "whole" and not any("row" in note for note in report.notes)


class Learning(Net):
    """Calls backward in forward."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            out.sum().backward()
        return out.detach()


def test_gradients_are_left_alone() -> None:
    model = Learning().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recast.optimize(model, example=batch(1))
    assert all(p.grad is None for p in model.parameters())


class Bags(Net):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 8)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.top(self.norm(self.bags(x, offsets)))
        return out


def test_what_helps_where_nothing_tells_which_dimension_has_the_row() -> None:
    report = recast.explain(Bags().eval(), example=(IDS[0], torch.tensor([0])))
    assert report.captured == "partial" and "more than 1 value" in str(report.why)
    assert "an example of several rows" in str(report)
