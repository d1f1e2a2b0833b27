"""fuse-rms-norm: every way to write one, with and without weight; what is none stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passkit import calls, fired, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

import recast

COLUMNS, LENGTH = 6, 4
Form = Callable[[Tensor, Tensor], Tensor]  # x, weight


def batch(rows: int, seed: int, *more: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, *more, COLUMNS, generator=g, dtype=torch.float64),)


FLAT = [batch(6, 0), batch(9, 1)]
LONG = [batch(6, 0, LENGTH), batch(9, 1, LENGTH)]


def _mean(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def _twice(x: Tensor, w: Tensor) -> Tensor:
    spread = _mean(x) + 1e-3
    return x * torch.rsqrt(spread) * w + spread


FORMS: dict[str, Form] = {
    "weight behind": lambda x, w: x * torch.rsqrt(_mean(x) + 1e-3) * w,
    "weight in front": lambda x, w: w * (x * (1e-3 + _mean(x)).rsqrt()),
    "no weight": lambda x, w: x * torch.rsqrt(_mean(x) + 1e-3),
    "products": lambda x, w: x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-3) * w,
    "square": lambda x, w: x.square().mean(-1, True).add(1e-3).sqrt().reciprocal() * x * w,
    "one over": lambda x, w: w * ((1 / torch.sqrt(torch.mean(x**2, [-1], True) + 1e-3)) * x),
    "powers": lambda x, w: x * (_mean(x) + 1e-3) ** -0.5 * w,
    "unsqueezed": lambda x, w: x / ((x**2).mean(-1).unsqueeze(-1) + 1e-3) ** 0.5 * w,
    "from zero": lambda x, w: x * torch.rsqrt(_mean(x) + 1e-3) * (1.0 + w),
    "the root read elsewhere": _twice,
    "torch's": lambda x, w: F.rms_norm(x, (COLUMNS,), w, 1e-3),
    "torch's, its own epsilon": lambda x, w: F.rms_norm(x, [COLUMNS], weight=w),
    "torch's, no weight": lambda x, w: torch.rms_norm(x, (COLUMNS,), eps=1e-3),
}


class Net(nn.Module):
    """A Linear, the norm in one of its forms, and a Linear."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, COLUMNS)
        self.last = nn.Linear(COLUMNS, 3)
        self.weight = nn.Parameter(torch.randn(COLUMNS))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.form(self.first(x), self.weight))
        return out


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_call(form: str) -> None:
    torch.manual_seed(2)
    fast = same(Net(FORMS[form]), LONG, steps=form == "weight behind")
    assert fired(fast)["fuse-rms-norm"] == len(calls(fast, "rms_norm")) == 1
    (call,) = calls(fast, "rms_norm")
    assert (call.args[1] is None) is ("no weight" in form)


@pytest.mark.parametrize("affine", [True, False])
def test_a_module_reads_its_epsilon_at_each_call(affine: bool) -> None:
    torch.manual_seed(2)
    norm = nn.RMSNorm(COLUMNS, eps=1e-2, elementwise_affine=affine)
    fast = same(nn.Sequential(nn.Linear(COLUMNS, COLUMNS), norm, nn.Tanh()), FLAT)
    assert len(calls(fast, "rms_norm")) == 1
    before = fast(*FLAT[0])
    fast.get_submodule("1").eps = 1.0
    assert not torch.allclose(fast(*FLAT[0]), before)


class Rounded(nn.Module):
    """As language models have it: in float32, rounded to the input's dtype before the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(67))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(_mean(wide) + 1e-6)).type_as(x) * self.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_roundings_of_language_models_are_kept(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = Rounded()
    x = torch.randn(9, 67)
    fast = recast.optimize(model, example=x, strict=True)
    (call,) = calls(fast, "rms_norm")
    assert call.args[3] == "unit"
    x = x.to(dtype).requires_grad_()
    model.to(dtype)
    up = torch.randn(9, 67).to(dtype)
    plain, ours = model(x), fast(x)
    assert ours.dtype == plain.dtype == dtype
    exact: dict[str, Any] = {} if dtype is torch.float32 else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(ours, plain, **exact)
    leaves = (x, model.weight)
    wanted = torch.autograd.grad(plain, leaves, up)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves, up), wanted, **exact)


OTHERS: dict[str, Form] = {
    "over another dimension": lambda x, w: x * torch.rsqrt((x**2).mean(1, True) + 1e-3) * w,
    "no epsilon": lambda x, w: x * torch.rsqrt(_mean(x)) * w,
    "epsilon outside the root": lambda x, w: x / (torch.sqrt(_mean(x)) + 1e-3) * w,
    "of something else": lambda x, w: torch.tanh(x) * torch.rsqrt(_mean(x) + 1e-3) * w,
    "a sum": lambda x, w: x * torch.rsqrt((x**2).sum(-1, keepdim=True) + 1e-3) * w,
    "a cube": lambda x, w: x * torch.rsqrt((x**3).mean(-1, keepdim=True).abs() + 1e-3) * w,
    "of all": lambda x, w: x * torch.rsqrt((x**2).mean() + 1e-3) * w,
    "over two dimensions": lambda x, w: F.rms_norm(x, (LENGTH, COLUMNS)) * w,
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_none_stays(form: str) -> None:
    torch.manual_seed(2)
    fast = same(Net(OTHERS[form]), LONG, steps=False)
    assert not calls(fast, "rms_norm")


def test_a_weight_of_another_shape_stays_outside() -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__(FORMS["weight behind"])
            self.weight = nn.Parameter(torch.randn(LENGTH, COLUMNS))

    torch.manual_seed(2)
    (call,) = calls(same(Wide(), LONG, steps=False), "rms_norm")
    assert call.args[1] is None


def test_hooks_are_a_miss() -> None:
    norm = nn.RMSNorm(COLUMNS)
    norm.register_forward_hook(lambda m, args, out: out * 2)
    fast = same(nn.Sequential(nn.Linear(COLUMNS, COLUMNS), norm), FLAT, steps=False)
    assert not calls(fast, "rms_norm")
    assert any("hooks" in why for why in misses(fast, "fuse-rms-norm"))
