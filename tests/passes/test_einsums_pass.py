"""split-einsums: einsums of three factors, one of which only scales the result."""

from __future__ import annotations

import pytest
import torch
from passkit import calls, fired, journal, same
from torch import Tensor, nn

D, EXPERTS = 6, 3


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, D, generator=g, dtype=torch.float64),)


BATCHES = [batch(5, 0), batch(8, 1)]


class Model(nn.Module):
    def __init__(self, equation: str, order: str) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.equation, self.order = equation, order
        self.experts = nn.Parameter(torch.randn(EXPERTS, D, D, generator=g))
        self.matrix = nn.Parameter(torch.randn(D, D, generator=g))
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        held = {"x": x, "y": x * self.scale, "W": self.experts, "M": self.matrix}
        return torch.einsum(self.equation, *(held[name] for name in self.order))


SPLIT = {
    "experts": ("bi,eij,bj->bei", "xWy", "bi,eij,bj->bei"),
    "weight first": ("eij, bi, bj -> bei", "Wxy", "bi,eij,bj->bei"),
    "bilinear": ("bi,ij,bj->bi", "xMy", "bi,ij,bj->bi"),
}


@pytest.mark.parametrize("form", SPLIT)
def test_the_scale_comes_last(form: str) -> None:
    equation, order, wanted = SPLIT[form]
    fast = same(Model(equation, order), BATCHES, steps=False)
    assert fired(fast) == {"split-einsums": 1}, journal(fast).missed
    (call,) = calls(fast, "scaled_einsum")
    assert call.args[3] == wanted


LEFT = {
    "two factors": ("bi,ij->bj", "xM"),
    "all summed": ("bi,ij,bj->b", "xMy"),
    "the last scales": ("ij,bj,bi->bi", "Mxy"),
    "repeated letters": ("bi,ii,bi->bi", "xMy"),
}


@pytest.mark.parametrize("form", LEFT)
def test_others_are_left_alone(form: str) -> None:
    fast = same(Model(*LEFT[form]), BATCHES, steps=False)
    assert not calls(fast, "scaled_einsum")
