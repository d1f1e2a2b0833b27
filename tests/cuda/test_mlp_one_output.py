"""Backward of a layer with one output by one kernel: its numbers, and that chains take it where it
is the faster way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import emulated_gpu
import pytest
import torch
from emulated_chains import MLP, chain, compare
from emulated_gpu import Emulated
from torch import Tensor

from recast.runtime import device, fastest
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import one_output as mlp_one_output
from recast.runtime.mlp.one_output import Grads, Layer
from recast.runtime.tolerances import excess

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = [(1, 1), (3, 7), (33, 256), (300, 70)]
LATER = [
    pytest.param(shape, marks=pytest.mark.long, id=str(shape)) for shape in ((9, 20), (130, 520))
]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def gpu() -> Iterator[Emulated]:
    with emulated_gpu.serve() as emulated:
        yield emulated


def layer(
    gpu: Emulated, rows: int, n: int, dtype: torch.dtype, like: torch.dtype, masked: bool = True,
    has_bias: bool = True, scale: float = 1.25,
) -> Layer:  # fmt: skip
    x, bits = rand(rows, n, seed=1).to(dtype), None
    if masked:
        bits = mlp_mask.empty(rows, n, x)
        mlp_mask.activate(gpu, rand(rows, n, seed=4), None, bits, relu=True)
    weight = rand(1, n, seed=3).to(dtype)
    wanted = like if masked else None
    g = rand(rows, 1, seed=2).to(dtype)
    return Layer(g, weight, x, bits, scale, weight.to(like), has_bias, wanted)


def plainly(of: Layer, dtype: torch.dtype) -> list[Tensor]:
    """By products of torch in ``dtype``."""
    g, weight, x = (t.to(dtype) for t in of[:3])
    dx = g.mm(weight)
    if of.bits is not None:
        passes = mlp_mask.unpack(of.bits, x.shape[1])
        dx = torch.where(passes, dx * of.scale, 0.0)
    else:
        dx = dx * of.scale
    return [dx, dx.sum(0), g.t().mm(x), g.sum(0)]


def near(of: Layer, found: Grads) -> None:
    plain, truth = plainly(of, of.x.dtype), plainly(of, torch.float64)
    for a, b, c in zip(found, plain, truth, strict=True):
        if a is not None:
            assert excess(a, b.to(a.dtype), c, scale=float(c.abs().max())) <= 1


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("like", [F32, BF16], ids=["fp32 sums", "bf16 sums"])
@pytest.mark.parametrize(
    "dtype", [F32, pytest.param(F16, marks=pytest.mark.long), BF16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("shape", [*SHAPES, *LATER], ids=str)
def test_the_numbers(
    gpu: Emulated, shape: tuple[int, int], dtype: torch.dtype, like: torch.dtype, masked: bool
) -> None:
    of = layer(gpu, *shape, dtype, like, masked)
    found = mlp_one_output.in_one(gpu, of)
    near(of, found)
    assert [t.dtype for t in found if t is not None][1:] == [like] * (2 + masked)
    assert found.weight.shape == (1, shape[1]) and (found.below is None) is not masked
    without = mlp_one_output.in_one(gpu, of._replace(has_bias=False))
    assert without.bias is None and torch.equal(without.weight, found.weight)


def test_rows_that_lie_apart(gpu: Emulated) -> None:
    """As the first columns of a wider matrix, and a gradient that is a column of one."""
    of = layer(gpu, 40, 24, BF16, F32)
    wanted = mlp_one_output.in_one(gpu, of)
    for width in (32, 27):
        x, g = torch.full((40, width), torch.nan).bfloat16(), torch.zeros(40, 3).bfloat16()
        x[:, :24], g[:, 1:2] = of.x, of.g
        found = mlp_one_output.in_one(gpu, of._replace(x=x[:, :24], g=g[:, 1:2]))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]


def test_what_is_not_masked_is_read_and_what_is_becomes_zero(gpu: Emulated) -> None:
    """Also where the gradient is no number."""
    of = layer(gpu, 9, 20, F32, F32)
    of.g[4] = torch.inf
    found = mlp_one_output.in_one(gpu, of)
    passes = mlp_mask.unpack(of.bits, 20)  # type: ignore[arg-type]
    assert torch.equal(found.x.isinf()[4], passes[4]) and not found.x[4][~passes[4]].any()


def test_sums_do_not_depend_on_the_order_of_threads() -> None:
    found = []
    for seed in (0, 1, 2):
        with emulated_gpu.serve(workers=2, seed=seed) as gpu:
            found.append(mlp_one_output.in_one(gpu, layer(gpu, 700, 70, F32, F32)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))  # type: ignore[arg-type]


@pytest.fixture
def timed(gpu: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """A machine on which one kernel is the faster way."""
    if device.extension() is None:
        pytest.skip(f"the extension: {device.why_missing()}")

    def seconds(way: Any) -> float:
        one = isinstance(way, functools.partial) and way.func is mlp_one_output.in_one
        return 1.0 if one else 2.0

    monkeypatch.setattr(fastest, "_chosen", {})
    monkeypatch.setattr(fastest, "timer_of", lambda like: seconds)
    yield gpu


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("widths", [[13, 24, 1], [16, 1], [8, 64, 17, 1], [5, 1, 1]], ids=str)
def test_chains(timed: Emulated, widths: list[int], p: float, bias: bool) -> None:
    for dtype in (F32, BF16):
        compare(MLP, chain(70, widths, p, bias), dtype)
        timed.launched.clear()
        compare(MLP, chain(70, widths, p, bias), dtype)
        assert timed.launched.count("mlp_one_output") == 1


def test_other_layers_are_left_to_the_products(timed: Emulated) -> None:
    """Of two outputs; behind a relu; whose input or weight wants no gradient."""
    compare(MLP, chain(70, [8, 9, 2], 0.0), F32)
    compare(MLP, chain(70, [8, 9, 1], 0.0, last=True), F32)
    x, params, *rest = chain(70, [8, 9, 1], 0.0)
    for wanted in (params[2:], [x, *params[:2]]):
        wanted = [t.requires_grad_() for t in wanted]
        out = MLP.target(x, params, *rest)
        torch.autograd.grad(out, wanted, torch.ones_like(out))
        for t in wanted:
            t.requires_grad_(False)
    assert "mlp_one_output" not in timed.launched


def test_nobody_can_tell_here(gpu: Emulated) -> None:
    """Without a timer the products are taken, as before."""
    compare(MLP, chain(70, [8, 9, 1], 0.0), F32)
    assert "mlp_one_output" not in gpu.launched


def test_it_is_told(timed: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "_times", {})
    compare(MLP, chain(70, [8, 9, 1], 0.3), F32)
    (row,) = [r for r in fastest.timings() if "one output" in str(r["key"])]
    assert row["chosen"] == "one kernel" and row["products"] == 2000.0
