"""The report says when matrix products bound a model, and only then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recast


class Wide(nn.Module):
    """Wide layers behind a small table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.top = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.square = nn.Parameter(torch.randn(512, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.table(ids).flatten(1)) @ self.square


class Lookups(nn.Module):
    """Sums of looked-up rows, and one column of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.last(self.table(ids))
        return out


def _report(model: nn.Module) -> recast.Report:
    g = torch.Generator().manual_seed(1)
    batches = [(torch.randint(50, (rows, 2), generator=g),) for rows in (8, 5)]
    return recast.optimize(model, example=batches, strict=True).report


def test_a_model_of_wide_layers_is_bound_by_them() -> None:
    report = _report(Wide())
    said = report.bound
    assert said is not None
    flops = 2 * (32 * 512 + 512 * 512 + 512)  # a sample's
    assert f"({flops / 1e3:.3g} kflop a sample" in said
    assert "2 calls of them" in said
    assert "most in top.{0..3} test_bound.py:22 (" in said
    assert "recast.mlp" in said
    assert said.split()[-1] == "there"
    assert f"note  {said}" in report.text()
    assert said not in report.text(times=False)
    assert report.to_dict()["bound"] == said


class Sorts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x, 1)[0]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(4, 4), "bound by matrix products: 1 call of them takes "),
        (Sorts(), "left to torch: 1 call of torch that no rule takes holds "),
    ],
)
def test_a_single_call_is_told_of_in_the_singular(model: nn.Module, said: str) -> None:
    bound = recast.optimize(model, example=torch.randn(6, 4)).report.bound
    assert bound is not None and bound.startswith(said)


def test_a_model_of_lookups_is_not() -> None:
    report = _report(Lookups())
    assert report.bound is None
    assert "bound by" not in report.text()


class Left(nn.Module):
    """Sorted rows: no rule matches them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.last = nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        for _ in range(3):
            rows = torch.sort(rows.cumsum(1), 1)[0]
        out: Tensor = self.last(rows.amax(1))
        return out


def test_what_no_rule_takes_is_told() -> None:
    said = _report(Left()).bound
    assert said is not None
    assert said.startswith("left to torch")
    assert "calls of torch that no rule takes" in said
    assert "most in test_bound.py:" in said  # the model's own lines: no module to name
    assert "(sort" in said or "cumsum" in said


def test_nothing_is_told_where_lengths_are_unknown() -> None:
    g = torch.Generator().manual_seed(1)
    batches = [(torch.randint(50, shape, generator=g),) for shape in ((8, 2), (5, 3))]
    assert recast.optimize(Left(), example=batches).report.bound is None


class Mixed(nn.Module):
    """Neither products nor the rest dominates, and no rule matches either."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        rows = rows[torch.arange(len(ids)).flip(0)]
        return torch.bmm(rows, rows.transpose(1, 2).sigmoid()).logsumexp(1)


def test_products_and_the_rest_count_together() -> None:
    said = _report(Mixed()).bound
    assert said is not None
    assert said.startswith("left to torch")
    assert "in 1 matrix product)" in said
    assert "getitem" in said or "bmm" in said


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(3, 4, 2),
        nn.GRU(3, 4),
        nn.LSTM(3, 4),
        nn.LSTMCell(3, 4),
        nn.MultiheadAttention(4, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_of_torch_count_their_weights(layer: nn.Module) -> None:
    from recast.passes import limit
    from recast.rewriter.ir import Spec, annotate

    graph = torch.fx.Graph()
    root = nn.Module()
    root.layer = layer
    width = 4 if isinstance(layer, nn.MultiheadAttention) else 3
    x = graph.placeholder("x")
    annotate(x, spec=Spec(torch.float32, (5, "B", width)))
    call = graph.call_module("layer", (x,))
    annotate(call, spec=Spec(torch.float32, ("B", 4, 5)))
    found = limit._call(call, root)
    assert found is not None
    assert found.product
    weights = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    places = 5 * limit.ROWS  # of a convolution: 4 channels at 5 places
    assert found.cost.flops == 2 * places * weights
