"""A result of optimize inside a model that is optimized in its turn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import recast

IDS = torch.randint(9, (6, 4), generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4)
        self.top = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(self.bag(ids))
        return out

    def predict(self, ids: Tensor) -> Tensor:
        return self(ids).sigmoid()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(ids))
        return out


def trained(plain: nn.Module, fast: nn.Module) -> None:
    """Both take the same steps, in either mode, with the same results and buffers."""
    for training in (True, False, True):
        for model in (plain, fast):
            model.train(training)
        results = []
        for model in (plain, fast):
            torch.manual_seed(1)
            out = model(IDS)
            out.square().sum().backward()
            results.append(out)
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(fast.state_dict(), plain.state_dict())
    for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(q.grad + 0, p.grad)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_result_inside_another_model(inplace: bool) -> None:
    torch.manual_seed(0)
    inner = Inner()
    plain = Outer(copy.deepcopy(inner))
    fast = recast.optimize(inner, example=IDS, inplace=inplace)
    outer = Outer(inner if inplace else fast)
    outer.last.load_state_dict(plain.last.state_dict())
    before = copy.deepcopy(outer.state_dict())
    again = recast.optimize(outer, example=IDS)
    torch.testing.assert_close(outer.state_dict(), before, rtol=0, atol=0)  # nothing ran on it
    assert again.report.to_dict()["captured"] == "whole"
    assert "1 of 1 embedding lookups grouped" in str(again.report)
    trained(plain, again)


@pytest.mark.parametrize("how", ["inplace", "calls itself"])
def test_a_result_that_runs_in_its_models_place(how: str) -> None:
    torch.manual_seed(0)
    inner = Inner()
    plain = copy.deepcopy(inner)
    fast = recast.optimize(inner, example=IDS, inplace=how == "inplace")
    if how == "calls itself":  # so that its root calls it
        fast.eval().predict(IDS)
    again = recast.optimize(inner if how == "inplace" else fast, example=IDS)
    assert again.report.to_dict()["captured"] == "whole"
    assert "1 of 1 embedding lookups grouped" in str(again.report)
    trained(plain, again)


def test_tables_that_are_stored_for_serving() -> None:
    inner = Inner().eval()
    served = recast.optimize(inner, example=IDS, precision="int8")
    for model in (served, Outer(served)):
        with pytest.raises(recast.UsageError, match=r"bag\.weight is stored in int8 already"):
            recast.optimize(model, example=IDS)
