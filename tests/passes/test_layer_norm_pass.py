"""fuse-layer-norm: every way to write a layer norm by hand, scaled ones too; others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import fired, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

COLUMNS, LENGTH = 6, 4
Form = Callable[[Tensor], Tensor]


def batch(rows: int, seed: int, *more: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, *more, COLUMNS, generator=g, dtype=torch.float64),)


FLAT = [batch(6, 0), batch(9, 1)]
LONG = [batch(6, 0, LENGTH), batch(9, 1, LENGTH)]


def _unsqueezed(x: Tensor) -> Tensor:
    mean = x.mean(dim=1).unsqueeze(dim=1)
    spread = (torch.pow(x - mean, 2) + 1e-3).sum(dim=1).unsqueeze(dim=1)
    return (x - mean) / torch.sqrt(spread)


def _means(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def _variance(x: Tensor) -> Tensor:
    spread = torch.var(x, dim=-1, unbiased=False, keepdim=True)
    return (x - x.mean(dim=-1, keepdim=True)) / torch.sqrt(spread + 1e-5)


def _unbiased(x: Tensor) -> Tensor:
    return (x - x.mean(-1, True)) * torch.rsqrt(1e-2 + x.var(-1, keepdim=True))


def _products(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred * centred).sum(-1, keepdim=True) + 1e-2) ** 0.5


def _twice(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-2) + centred


FORMS: dict[str, Form] = {
    "summed, unsqueezed": _unsqueezed,
    "means": _means,
    "variance": _variance,
    "unbiased variance, inverse root": _unbiased,
    "products": _products,
    "centred rows used elsewhere": _twice,
}


class Net(nn.Module):
    """A Linear, the norm in one of its forms, and a Linear."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, COLUMNS)
        self.last = nn.Linear(COLUMNS, 3)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.form(self.first(x)))
        return out


def _norms(fast: nn.Module) -> int:
    return sum(n.target is F.layer_norm for n in fast.graph.nodes)  # type: ignore[union-attr]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batches", [FLAT, LONG], ids=["rows", "sequences"])
def test_every_form_is_one_call(form: str, batches: list[tuple[Tensor]]) -> None:
    if form == "summed, unsqueezed" and batches is LONG:
        pytest.skip("it names dimension 1")
    torch.manual_seed(2)
    fast = same(Net(FORMS[form]), batches, steps=form == "means")
    assert fired(fast)["fuse-layer-norm"] == _norms(fast) == 1
    assert not any(n.target is torch.sqrt for n in fast.graph.nodes)


def _other_rows(x: Tensor) -> Tensor:
    return (x - x.mean(0, keepdim=True)) / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-2)


def _not_centred(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-2)


def _outside(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (torch.sqrt((centred**2).mean(-1, keepdim=True)) + 1e-2)


def _all(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean() + 1e-2)


OTHERS: dict[str, Form] = {
    "over another dimension": _other_rows,
    "squares not centred": _not_centred,
    "epsilon outside the root": _outside,
    "mean of all": _all,
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_only_looks_like_it_stays(form: str) -> None:
    fast = same(Net(OTHERS[form]), FLAT, steps=False)
    assert not _norms(fast)


def test_without_an_epsilon_it_stays_and_is_told() -> None:
    def form(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(-1, keepdim=True))

    fast = same(Net(form), FLAT, steps=False)
    assert not _norms(fast)
    assert any("positive epsilon" in why for why in misses(fast, "fuse-layer-norm"))
