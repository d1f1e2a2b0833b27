"""name-activations: silu and gelu by hand, in every order; what only looks like them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from passkit import fired, journal, misses, optimized, same
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 5
C, K = math.sqrt(2 / math.pi), 0.044715


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, WIDTH, generator=g, dtype=torch.float64),)


BATCHES = [batch(4, 0), batch(7, 1)]


class Model(nn.Module):
    """A layer, ``activation`` and a layer."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.activation = activation
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x)))


def _cdf(x: Tensor) -> Tensor:
    return x * (0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))))


SILU: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": lambda x: x * torch.sigmoid(x),
    "turned": lambda x: x.sigmoid() * x,
    "by mul": lambda x: torch.mul(x, F.sigmoid(x)),
}
GELU: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "erf, times": lambda x: 0.5 * x * (torch.erf(x * 0.7071067811865476) + 1),
    "erf, halved last": lambda x: x * (1 + torch.special.erf(x / 2**0.5)) / 2,
    "a distribution": _cdf,
    "tanh": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + K * torch.pow(x, 3)))),
    "tanh, by **": lambda x: x * 0.5 * (1.0 + torch.tanh((x + x**3 * K) * C)),
    "tanh, by products": lambda x: 0.5 * x * (1 + torch.tanh(C * (K * x * x * x + x))),
    "tanh, of a square": lambda x: 0.5 * x * (1 + torch.tanh(C * x * (1 + K * x.square()))),
    "tanh, of two factors": lambda x: 0.5 * x * (torch.tanh(x * C * (K * x * x + 1)) + 1),
}


@pytest.mark.parametrize("form", SILU)
def test_silu_joins_the_chain(form: str) -> None:
    fast = same(Model(SILU[form]), BATCHES)
    assert fired(fast) == {"name-activations": 1, "fuse-mlp": 1}, journal(fast).missed


@pytest.mark.parametrize("form", GELU)
def test_gelu_in_every_order(form: str) -> None:
    fast = same(Model(GELU[form]), BATCHES)
    assert fired(fast)["name-activations"] == 1, journal(fast).missed
    assert fired(fast)["fuse-mlp"] == (0 if "tanh" in form else 1)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a gate of another value": lambda x: x * torch.sigmoid(x + 1),
    "a gate that is read again": lambda x: (lambda p: x * p + p)(torch.sigmoid(x)),
    "another constant": lambda x: 0.5 * x * (1 + torch.tanh(0.7979 * (x + K * x**3))),
    "another power": lambda x: 0.5 * x * (1 + torch.tanh(C * (x + K * x**2))),
    "not halved": lambda x: x * (1 + torch.erf(x / math.sqrt(2.0))),
    "of another value": lambda x: 0.5 * x * (1 + torch.erf((x + 1) / math.sqrt(2.0))),
    "two above": lambda x: 0.5 * x * (2 + torch.erf(x / math.sqrt(2.0))),
    "divided by it": lambda x: 0.5 / (x + 9) * (1 + torch.erf(x / math.sqrt(2.0))),
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_only_looks_like_one(form: str) -> None:
    fast = same(Model(OTHERS[form]), BATCHES, steps=False)
    assert not fired(fast)["name-activations"], journal(fast).fired


SHORT: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": lambda x: 0.5 * x * (1 + torch.erf(x * 0.70710678)),
    "tanh": lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + K * x * x * x))),
}


@pytest.mark.parametrize("form", SHORT)
def test_constants_that_are_rounded_are_others_once_the_model_is_double(form: str) -> None:
    single = [tuple(t.float() for t in given) for given in BATCHES]
    plain = Model(SHORT[form])
    fast = optimized(plain, single)
    assert not fired(fast)["name-activations"]
    (why,) = misses(fast, "name-activations")
    assert "rounded" in why
    got, expected = fast.double()(*BATCHES[0]), plain.double()(*BATCHES[0])
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
