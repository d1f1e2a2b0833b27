"""multiply-windows: layers and calls, columns and whole rows; each named Miss; the limits."""

from __future__ import annotations

import pytest
import torch
from passkit import calls, fired, misses, same
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.runtime import device
from recast.runtime.layers.window_conv import FEWEST, differentiable, reference

FIELDS, DIM = 9, 5


def batch(rows: int, seed: int) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 20, (rows, FIELDS), generator=g),)


BATCHES = [batch(6, 0), batch(4, 1)]


class Model(nn.Module):
    """Columns, padded, as in CCPM, then windows of whole rows, as in Caser."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(20, DIM)
        self.columns = nn.Conv2d(1, 3, (4, 1), padding=(3, 0))
        self.rows = nn.Conv2d(1, 2, (3, DIM), **options)
        self.last = nn.Linear(3 * DIM + 2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).unsqueeze(1)
        a = torch.tanh(self.columns(x)).amax(2)
        return self.last(torch.cat([a.flatten(1), self.rows(x).relu().flatten(2).amax(2)], 1))


class Calls(Model):
    """The same by functions; the weight is the user's own."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)[:, None]
        a = F.conv2d(x, self.columns.weight, self.columns.bias, 1, (3, 0)).tanh().amax(2)
        b = torch.conv2d(x, self.rows.weight, padding=[0, 0]).amax((2, 3))
        return self.last(torch.cat([a.flatten(1), b], -1))


@pytest.mark.parametrize("model", [Model(), Model(bias=False), Calls()])
def test_every_form(model: Model) -> None:
    torch.manual_seed(2)
    fast = same(model, BATCHES, steps=True)
    assert fired(fast)["multiply-windows"] == len(calls(fast, "window_conv")) == 2


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"dilation": (2, 1)}, {"padding": 1},
     {"padding": (1, 0), "padding_mode": "circular"}],
    ids=["stride", "dilation", "columns of zeros", "circular"],
)  # fmt: skip
def test_others_stay(options: dict[str, object]) -> None:
    torch.manual_seed(2)
    fast = same(Model(**options), BATCHES, steps=False)
    assert len(calls(fast, "window_conv")) == 1


class Square(nn.Module):
    def __init__(self, channels: int, window: tuple[int, int]) -> None:
        super().__init__()
        self.table = nn.Embedding(20, DIM)
        self.wide = nn.Linear(1, channels)
        self.conv = nn.Conv2d(channels, 2, window)

    def forward(self, ids: Tensor) -> Tensor:
        maps = self.wide(self.table(ids).unsqueeze(-1)).permute(0, 3, 1, 2)
        return self.conv(maps).sum((1, 2, 3))


@pytest.mark.parametrize(
    ("channels", "window", "why"),
    [(1, (2, 2), "along both axes"), (8, (4, 1), "of 8 channels"), (1, (1, DIM), "as fast")],
)
def test_what_torch_does_as_well_is_a_miss(
    channels: int, window: tuple[int, int], why: str
) -> None:
    torch.manual_seed(2)
    fast = same(Square(channels, window), BATCHES, steps=False)
    assert not calls(fast, "window_conv")
    assert any(why in said for said in misses(fast, "multiply-windows"))


def test_many_samples_take_the_product() -> None:
    torch.manual_seed(3)
    x = torch.randn(FEWEST + 3, 2, FIELDS, DIM, requires_grad=True)
    w, b = torch.randn(3, 2, 4, 1, requires_grad=True), torch.randn(3, requires_grad=True)
    wanted = [t.detach().double().requires_grad_() for t in (x, w, b)]
    out, truth = differentiable(x, w, b, 1), reference(*wanted, 1)
    assert type(out.grad_fn).__name__ == "WindowConvBackward"
    up = torch.randn(out.shape)
    got = torch.autograd.grad(out, (x, w, b), up)
    expected = torch.autograd.grad(truth, wanted, up.double())
    for a, e in zip((out.detach(), *got), (truth.detach(), *expected), strict=True):
        scale = float(e.abs().max())
        assert float((a.double() - e).abs().max()) < 1e-5 * scale


@pytest.mark.parametrize("wide", [False, True])
def test_infinite_values_stay_where_they_are(wide: bool) -> None:
    """The matrix's zeros would turn them into NaN in other places."""
    x, w = torch.randn(5, 1, FIELDS, DIM), torch.randn(2, 1, 3, DIM if wide else 1)
    x[1, 0, 2] = float("inf")
    with device.use("fused"):
        torch.testing.assert_close(
            differentiable(x, w, None, 1), reference(x, w, None, 1), equal_nan=True
        )
    x = torch.randn(5, 1, FIELDS, DIM, requires_grad=True)
    up = torch.zeros_like(reference(x, w, None, 1))
    up[0, 0, 0] = float("inf")
    with device.use("fused"):
        (got,) = torch.autograd.grad(differentiable(x, w, None, 1), x, up)
    (wanted,) = torch.autograd.grad(reference(x, w, None, 1), x, up)
    torch.testing.assert_close(got, wanted, equal_nan=True)


def test_the_report_tells_of_it() -> None:
    text = recast.optimize(Model(), example=BATCHES[0]).report.text()
    assert "a convolution as a product with its matrix" in text
