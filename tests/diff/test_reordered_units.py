"""A model with reordered hidden units computes the same, with sums in another order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recast.rewriter.diff.reordered_units import reordered_units


def random() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def same(model: nn.Module, x: Tensor) -> list[str]:
    """The parameters that ``reordered_units`` moved; the outputs must not change."""
    model.double()
    before = {n: p.clone() for n, p in model.named_parameters()}
    other = reordered_units(model, random())
    assert torch.allclose(model(x), other(x), rtol=1e-13, atol=1e-13)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    return [n for n, p in other.named_parameters() if not torch.equal(p, before[n])]


def test_every_layer_of_a_chain() -> None:
    chain = nn.Sequential(
        nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7, bias=False), nn.GELU(), nn.Linear(7, 2)
    )
    x = torch.randn(11, 5, generator=random(), dtype=torch.float64)
    assert same(chain, x) == ["0.weight", "0.bias", "2.weight", "4.weight"]


def test_the_sums_are_others() -> None:
    chain = nn.Sequential(nn.Linear(50, 90), nn.Tanh(), nn.Linear(90, 1))
    x = torch.randn(11, 50, generator=random())
    assert not torch.equal(chain(x), reordered_units(chain, random())(x))


def test_only_where_it_is_the_same() -> None:
    """A normalisation between, a layer called twice, a shared weight: left alone."""
    x = torch.randn(11, 5, generator=random(), dtype=torch.float64)
    norm = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2))
    for p in norm[1].parameters():
        nn.init.normal_(p, generator=random())
    assert same(norm, x) == []
    square = nn.Linear(5, 5)
    assert same(nn.Sequential(square, nn.ReLU(), square), x) == []
    tied = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    tied[2].weight = tied[0].weight
    assert same(tied, x) == []
