"""multiply-windows of conv1d with windows of one place: each way it is computed, what stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from passkit import fired, misses, optimized, same
from torch import Tensor, nn

from recast.runtime.layers.pointwise_conv import pointwise_conv

LENGTH, DIM = 7, 6


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, LENGTH, DIM, generator=g, dtype=torch.float64),)


BATCHES = [batch(6, 0), batch(4, 1)]


class FeedForward(nn.Module):
    """SASRec's: convolutions between two transposes, with dropout."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(DIM, 9, 1), nn.Conv1d(9, DIM, 1, **options)
        self.drop_one, self.drop_two = nn.Dropout(0.3), nn.Dropout(0.3)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x.transpose(-1, -2))
        y = self.drop_two(self.two(self.relu(self.drop_one(y))))
        return y.transpose(-1, -2) + x


class Calls(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        y = F.conv1d(x.permute(0, 2, 1), self.one.weight, self.one.bias, 1, "valid").relu()
        return torch.conv1d(y, weight=self.two.weight, padding=(0,)).mT + x


def pointwise(fast: Any) -> int:
    return sum(n.target is pointwise_conv for n in fast.graph.nodes)


@pytest.mark.parametrize("model", [FeedForward(), FeedForward(bias=False), Calls()])
def test_every_form(model: nn.Module) -> None:
    fast = same(model, BATCHES)
    assert fired(fast)["multiply-windows"] == pointwise(fast) == 2


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(("length", "channels", "out"), [(7, 6, 9), (1, 3, 2), (2, 40, 31)])
def test_in_float32_it_is_torchs_own(
    rows: int, bias: bool, turned: bool, length: int, channels: int, out: int
) -> None:
    """Values, strides, gradients, and so the mask of a dropout after it."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, length, channels, generator=g).transpose(1, 2)
    x = x if turned else x.contiguous()
    weight = torch.randn(out, channels, 1, generator=g)
    given = [x, weight, *([torch.randn(out, generator=g)] if bias else [None])]
    made = []
    for function, dtype in ((pointwise_conv, torch.float32), (F.conv1d, torch.float64)):
        own = [None if t is None else t.to(dtype).requires_grad_() for t in given]
        result = function(*own)
        up = torch.randn(result.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        held = [t for t in own if t is not None]
        made.append((result.detach(), torch.autograd.grad(result, held, up)))
    (ours, grads), (truth, wanted) = made
    assert ours.is_contiguous() and F.conv1d(*given).is_contiguous()
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-5)


def test_dropout_draws_the_same_masks() -> None:
    model = FeedForward().train()
    plain = copy.deepcopy(model)
    fast = optimized(model, [(x.float(),) for (x,) in BATCHES])
    assert pointwise(fast) == 2
    x = BATCHES[0][0].float()
    found = []
    for m in (plain, fast):
        torch.manual_seed(5)
        found.append(m(x))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


STAY: dict[str, Callable[[], nn.Module]] = {
    "stride": lambda: nn.Conv1d(DIM, 4, 1, stride=2),
    "groups": lambda: nn.Conv1d(DIM, 4, 1, groups=2),
    "padding": lambda: nn.Conv1d(DIM, 4, 1, padding=1),
    "window": lambda: nn.Conv1d(DIM, 4, 2),
}


@pytest.mark.parametrize("name", STAY)
def test_others_stay(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = STAY[name]()

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.transpose(1, 2))

    assert not pointwise(same(Model(), BATCHES, steps=False))


def test_few_places_of_many_channels_are_a_miss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(LENGTH, 40, 1)  # of places that are the channels of x
            self.two = nn.Conv1d(40, 40, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.conv(x)))

    fast = same(Model(), BATCHES, steps=False)
    assert pointwise(fast) == 1
    (why,) = misses(fast, "multiply-windows")
    assert why == "torch's convolution of 6 places is as fast as products for 40 channels"
