"""fuse-dice: every way to write it, over rows and over sequences, each named Miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import calls, fired, misses, same
from torch import Tensor, nn

COLUMNS, LENGTH = 6, 4


def batch(rows: int, seed: int, *more: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, *more, COLUMNS, generator=g, dtype=torch.float64),)


FLAT = [batch(6, 0), batch(9, 1)]
LONG = [batch(6, 0, LENGTH), batch(9, 1, LENGTH)]
Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, p, alpha

FORMS: dict[str, Form] = {
    "paper": lambda x, p, a: p * x + (1 - p) * a * x,
    "alpha first": lambda x, p, a: a * (1 - p) * x + p * x,
    "nested": lambda x, p, a: x * p + a * (x * (1.0 - p)),
    "methods": lambda x, p, a: x.mul(p).add(a.mul(1 - p).mul(x)),
    "factored": lambda x, p, a: x * (p + a * (1 - p)),
    "factored the other way": lambda x, p, a: ((1 - p) * a + p) * x,
    "subtracted": lambda x, p, a: torch.rsub(p, 1) * a * x + p * x,
}


class Dice(nn.Module):
    """A Linear, a gate, and the activation in one of its forms."""

    def __init__(self, form: Form, gate: str = "norm", alpha: int = COLUMNS) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)
        self.bn = nn.BatchNorm1d(COLUMNS, eps=1e-8)
        self.alpha = nn.Parameter(torch.randn(alpha))
        self.form, self.gate = form, gate

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.gate == "norm":
            z = self.bn(h)
        elif self.gate == "rows":
            centred = h - h.mean(-1, keepdim=True)
            z = centred / torch.sqrt((centred**2 + 1e-3).sum(-1, keepdim=True))
        else:
            z = h
        return self.form(h, torch.sigmoid(z), self.alpha)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_call(form: str) -> None:
    torch.manual_seed(2)
    fast = same(Dice(FORMS[form]), FLAT, steps=form == "paper")
    assert fired(fast)["fuse-dice"] == len(calls(fast, "dice")) == 1
    assert not misses(fast, "fuse-mlp")  # of the linear before it: it has to be read twice


@pytest.mark.parametrize("gate", ["rows", "itself"])
@pytest.mark.parametrize("alpha", [1, COLUMNS])
def test_other_gates_and_one_alpha(gate: str, alpha: int) -> None:
    for batches in (FLAT, LONG):
        fast = same(Dice(FORMS["paper"], gate, alpha), batches, steps=False)
        assert len(calls(fast, "dice")) == 1


class Turned(nn.Module):
    """The batch norm of a sequence takes (B, C, L), so all of it is transposed and back."""

    def __init__(self, back: bool = True, norm: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)
        self.bn = nn.BatchNorm1d(COLUMNS) if norm else nn.Identity()
        self.alpha = nn.Parameter(torch.randn(COLUMNS, 1))
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        x = torch.transpose(self.linear(x), 1, 2)
        p = torch.sigmoid(self.bn(x))
        out = self.alpha * (1 - p) * x + p * x
        return torch.transpose(out, 1, 2) if self.back else out


def test_a_sequence_is_normalised_over_its_rows() -> None:
    torch.manual_seed(3)
    fast = same(Turned(), LONG)
    assert fired(fast)["fuse-dice"] == len(calls(fast, "dice")) == 1
    assert not any(n.target is torch.transpose for n in fast.graph.nodes)


REFUSED = {
    "not turned back": (Turned(back=False), LONG, "not transposed back"),
    "no norm": (Turned(norm=False), LONG, "no nn.BatchNorm1d of its input"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_every_miss_says_why_and_keeps_the_numbers(form: str) -> None:
    model, batches, why = REFUSED[form]
    fast = same(model, batches, steps=False)
    assert not calls(fast, "dice")
    assert any(why in text for text in misses(fast, "fuse-dice")), misses(fast, "fuse-dice")


OTHERS: dict[str, Form] = {
    "another p": lambda x, p, a: p * x + (1 - torch.sigmoid(x * 2)) * a * x,
    "two minus": lambda x, p, a: p * x + (2 - p) * a * x,
    "another x": lambda x, p, a: p * (x + 1) + (1 - p) * a * x,
    "p twice": lambda x, p, a: p * p * x + (1 - p) * a * x,
    "tanh": lambda x, p, a: torch.tanh(p) * x + (1 - torch.tanh(p)) * a * x,
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_only_looks_like_it_stays(form: str) -> None:
    fast = same(Dice(OTHERS[form]), FLAT, steps=False)
    assert not calls(fast, "dice")
