"""Dropout masks drawn by our kernel are torch's own, and leave its generator where torch does."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from recast.runtime import device
from recast.runtime.mlp import torch_draws

DTYPES = (torch.float32, torch.float64)
SIZES = (1, 2, 311, 312, 313, 623, 624, 625, 1250, 4999, 70_001)
ISAS = [isa for isa in device.ISAS if device.why_not(isa)() is None]

pytestmark = pytest.mark.skipif(
    torch_draws.why_not() is not None, reason=f"masks are torch's: {torch_draws.why_not()}"
)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    with device.use(name):
        yield name


def ours(size: int, p: float, dtype: torch.dtype, in_place: bool) -> torch.Tensor:
    noise, x = torch.empty(size, dtype=dtype), torch.full((size,), 2.0, dtype=dtype)
    torch_draws._draw(None if in_place else noise, x if in_place else None, p)
    return x / 2 if in_place else noise


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("before", [0, 1, 622, 623, 624, 625])
def test_the_same_numbers_and_the_same_state(isa: str, before: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        for p in (0.2, 0.5, 0.97, 1e-7):
            torch.manual_seed(size)
            torch.randint(0, 2**31, (before,))
            want = torch.empty(size, dtype=dtype).bernoulli_(1 - p).div_(1 - p)
            state = torch.get_rng_state()
            for in_place in (False, True):
                torch.manual_seed(size)
                torch.randint(0, 2**31, (before,))
                assert torch.equal(ours(size, p, dtype, in_place), want)
                assert torch.equal(torch.get_rng_state(), state)


def test_a_normal_number_kept_for_later_stays_kept() -> None:
    def numbers(draw: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        found = [torch.randn(3)]
        found.append(
            ours(700, 0.3, torch.float32, False) if draw else F.dropout(torch.ones(700), 0.3)
        )
        return [*found, torch.randn(3), torch.rand(5)]

    for a, b in zip(numbers(True), numbers(False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_is_torchs(p: float) -> None:
    for x in (torch.randn(40, 33), torch.randn(33, 40).t(), torch.randn(8, 9), torch.randn(0, 4)):
        torch.manual_seed(5)
        want = F.dropout(x, p)
        for of in (
            lambda x: x * torch_draws.noise_like(x, p),
            lambda x: torch_draws.drop_(x + 0, p),
        ):
            if not p or not x.numel():
                continue
            torch.manual_seed(5)
            assert torch.equal(of(x), want)


def test_infinite_values_are_not_hidden() -> None:
    x = torch.full((1000,), float("inf"))
    out = torch_draws.drop_(x, 0.5)
    assert out.isnan().any() and out.isinf().any() and (out.isnan() | out.isinf()).all()


def test_what_does_not_fit_is_refused() -> None:
    bernoulli = device.extension().bernoulli
    state = torch.get_rng_state()
    for noise, x in (
        (torch.empty(4), torch.empty(5)),
        (torch.empty(4), torch.empty(4).double()),
        (torch.empty(4).bfloat16(), None),
        (torch.empty(4, 4).t(), None),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            bernoulli(state, 0.5, 2.0, noise, x)
    with pytest.raises(ValueError, match="generator state"):
        bernoulli(state[:100], 0.5, 2.0, torch.empty(4), None)
