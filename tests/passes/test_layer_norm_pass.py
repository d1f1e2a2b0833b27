"""fuse-layer-norm: every way to write a layer norm by hand, scaled ones too; others stay."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from passkit import fired, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.runtime.layers.affine_layer_norm import affine_layer_norm

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


class Affine(nn.Module):
    """The norm, with a weight and a bias in some form."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Tensor], norm: Form) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, 3)
        self.weight = nn.Parameter(torch.rand(COLUMNS) + 0.5)
        self.bias = nn.Parameter(torch.rand(COLUMNS))
        self.form, self.norm = form, norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.form(self.norm(self.first(x)), self.weight, self.bias))
        return out


AFFINE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weight and bias": lambda x, w, b: w * x + b,
    "the other way round": lambda x, w, b: b + x * w,
    "weight": lambda x, w, b: x.mul(w),
}


@pytest.mark.parametrize("norm", [_means, _unbiased])
@pytest.mark.parametrize("form", AFFINE)
def test_a_weight_and_a_bias_are_those_of_the_norm(form: str, norm: Form) -> None:
    torch.manual_seed(3)
    fast = same(Affine(AFFINE[form], norm), LONG)
    assert fired(fast)["fuse-layer-norm"] == 1
    (call,) = (n for n in fast.graph.nodes if n.target is affine_layer_norm)
    assert (call.args[2] is None) == (form == "weight")
    assert norm is _unbiased or not any(n.target is operator.mul for n in fast.graph.nodes)


@pytest.mark.parametrize("other", ["read twice", "a column", "computed", "bias alone"])
def test_other_factors_stay_outside(other: str) -> None:
    forms: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "read twice": lambda x, w, b: w * x + x,
        "a column": lambda x, w, b: w[:LENGTH].unsqueeze(1) * x,
        "computed": lambda x, w, b: torch.sigmoid(w) * x + b,
        "bias alone": lambda x, w, b: x + b,
    }
    fast = same(Affine(forms[other], _means), LONG, steps=False)
    assert fired(fast)["fuse-layer-norm"] == 1 and _norms(fast) == 1


def test_under_autocast_the_result_has_the_dtype_of_the_plain_one() -> None:
    model = Affine(AFFINE["weight and bias"], _means)
    x, y = LONG[0][0].float(), LONG[1][0].float()
    model.last = nn.Identity()  # type: ignore[assignment]
    fast = recast.optimize(model, example=[x, y])
    assert any(n.target is affine_layer_norm for n in fast.graph.nodes)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, got = model(x), fast(x)
    assert got.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


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
