"""The backward of a layer with one output by one kernel: its numbers, and that chains use it when
it is faster.
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
from torch.nn import functional as F

from recast.errors import RecastWarning
from recast.runtime import device, fastest
from recast.runtime.mlp import mask as mlp_mask
from recast.runtime.mlp import one_output as mlp_one_output
from recast.runtime.mlp import products as mlp_products
from recast.runtime.mlp.chain import there
from recast.runtime.mlp.mask import Gate
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
    gpu: Emulated, rows: int, n: int, dtype: torch.dtype, like: torch.dtype, by: str = "bits",
    has_bias: bool = True, scale: float = 1.25,
) -> Layer:  # fmt: skip
    """``by``: where the relu gradient below comes from: mask bits, its output x, or nothing."""
    x, gate = rand(rows, n, seed=1).to(dtype), None
    if by == "bits":
        bits = mlp_mask.empty(rows, n, x)
        mlp_mask.activate(gpu, rand(rows, n, seed=4), None, bits, relu=True)
        gate = Gate(bits, scale=scale)
    elif by == "output":
        gate = Gate(None, x.relu_())
    weight = rand(1, n, seed=3).to(dtype)
    wanted = None if gate is None else like
    g = rand(rows, 1, seed=2).to(dtype)
    return Layer(g, weight, x, gate, weight.to(like), has_bias, wanted)


def plainly(of: Layer, dtype: torch.dtype) -> list[Tensor]:
    """By products of torch in ``dtype``."""
    g, weight, x = (t.to(dtype) for t in of[:3])
    dx, gate = g.mm(weight), of.gate
    if gate is not None:
        passes = of.x > 0 if gate.bits is None else mlp_mask.unpack(gate.bits, x.shape[1])
        dx = torch.where(passes, dx * gate.scale, 0.0)
    return [dx, dx.sum(0), g.t().mm(x), g.sum(0)]


def in_one(gpu: Emulated, of: Layer) -> Grads:
    """Finished."""
    found = mlp_one_output.in_one(gpu, of)
    assert found.finish is not None
    found.finish()
    return found


def near(of: Layer, found: Grads) -> None:
    plain, truth = plainly(of, of.x.dtype), plainly(of, torch.float64)
    for a, b, c in zip(found[:4], plain, truth, strict=True):
        if a is not None:
            assert excess(a, b.to(a.dtype), c, scale=float(c.abs().max())) <= 1


@pytest.mark.parametrize("by", ["bits", "output", "nothing"])
@pytest.mark.parametrize("like", [F32, BF16], ids=["fp32 sums", "bf16 sums"])
@pytest.mark.parametrize(
    "dtype", [F32, pytest.param(F16, marks=pytest.mark.long), BF16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("shape", [*SHAPES, *LATER], ids=str)
def test_the_numbers(
    gpu: Emulated, shape: tuple[int, int], dtype: torch.dtype, like: torch.dtype, by: str
) -> None:
    of, masked = layer(gpu, *shape, dtype, like, by), by != "nothing"
    found = in_one(gpu, of)
    near(of, found)
    assert [t.dtype for t in found[:4] if t is not None][1:] == [like] * (2 + masked)
    assert found.weight.shape == (1, shape[1]) and (found.below is None) is not masked
    without = in_one(gpu, of._replace(has_bias=False))
    assert without.bias is None and torch.equal(without.weight, found.weight)


def test_rows_that_lie_apart(gpu: Emulated) -> None:
    """As the first columns of a wider matrix, and a gradient that is a column of one."""
    of = layer(gpu, 40, 24, BF16, F32)
    wanted = in_one(gpu, of)
    for width in (32, 27):
        x, g = torch.full((40, width), torch.nan).bfloat16(), torch.zeros(40, 3).bfloat16()
        x[:, :24], g[:, 1:2] = of.x, of.g
        found = in_one(gpu, of._replace(x=x[:, :24], g=g[:, 1:2]))
        assert all(torch.equal(a, b) for a, b in zip(found[:4], wanted[:4], strict=True))  # type: ignore[arg-type]


def test_what_is_not_masked_is_read_and_what_is_becomes_zero(gpu: Emulated) -> None:
    """Even if the gradient is NaN."""
    of = layer(gpu, 9, 20, F32, F32)
    of.g[4] = torch.inf
    found = in_one(gpu, of)
    assert of.gate is not None and of.gate.bits is not None
    passes = mlp_mask.unpack(of.gate.bits, 20)
    assert torch.equal(found.x.isinf()[4], passes[4]) and not found.x[4][~passes[4]].any()


def test_sums_do_not_depend_on_the_order_of_threads() -> None:
    found = []
    for seed in (0, 1, 2):
        with emulated_gpu.serve(workers=2, seed=seed) as gpu:
            found.append(in_one(gpu, layer(gpu, 700, 70, F32, F32)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][:4], other[:4], strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES, (9, 20), (130, 520)], ids=str)
def test_forward(gpu: Emulated, shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    """Also of rows that lie apart."""
    rows, n = shape
    x, weight = rand(rows, n, seed=1).to(dtype), rand(1, n, seed=3).to(dtype)
    b = rand(1, seed=4).to(dtype) if bias else None
    found = mlp_one_output.read_once(gpu, x, weight, b)
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    scale = float(exact.abs().max())
    assert found.shape == (rows, 1)
    assert excess(found, F.linear(x, weight, b), exact, scale=scale) <= 1
    apart = torch.full((rows, n + 8), torch.nan).to(dtype)
    apart[:, :n] = x
    assert torch.equal(found, mlp_one_output.read_once(gpu, apart[:, :n], weight, b))


def test_wide_rows_start_as_many_blocks(gpu: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them goes through all columns of its rows; of sums there are none to be kept few."""
    grids: list[Any] = []
    monkeypatch.setattr(gpu, "launch", lambda kernel, grid, *rest: grids.append(grid))
    for n in (256, 257, 512, 3000):
        mlp_one_output.read_once(gpu, torch.empty(4096, n), torch.empty(1, n), None)
    blocks = mlp_mask.BLOCKS["mlp_one_output_forward"] * gpu.multiprocessors
    assert grids == [(1, blocks, 1)] * 4


@pytest.fixture
def timed(gpu: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """A machine on which one kernel is the faster way."""
    if device.extension() is None:
        pytest.skip(f"the extension: {device.why_missing()}")

    def seconds(way: Any) -> float:
        ours = (mlp_one_output.in_one, mlp_one_output.read_once)
        return 1.0 if isinstance(way, functools.partial) and way.func in ours else 2.0

    monkeypatch.setattr(fastest, "_chosen", {})
    monkeypatch.setattr(fastest, "timer_of", lambda like: seconds)
    monkeypatch.setattr(mlp_products, "MANY", 64)
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
        assert timed.launched.count("mlp_one_output_forward") == 1


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


def test_sums_whose_terms_cancel_are_compared_by_their_terms(timed: Emulated) -> None:
    """As of the scores of a softmax: of the bias gradient nothing but rounding is left."""
    of = layer(timed, 2100, 6, F32, F32)
    scores = rand(100, 21, seed=8).requires_grad_()
    (scores.softmax(1) * rand(100, 21, seed=9)).sum().backward()
    of = of._replace(g=there(scores.grad).view(-1, 1))
    one, products = in_one(timed, of), mlp_one_output.apart(timed, of)
    a, b = there(one.bias), there(products.bias)
    assert (a - b).abs() > 0.05 * b.abs(), "which looks as if one of them were wrong"
    assert mlp_one_output.backward(timed, of) is not None


@pytest.mark.parametrize("wrong", ["x", "below", "weight", "bias"])
def test_what_is_wrong_is_still_seen(
    timed: Emulated, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = mlp_one_output.apart

    def off(gpu: Emulated, of: Layer) -> Grads:
        found = right(gpu, of)
        if found.finish is not None:
            found.finish()
        there(getattr(found, wrong)).mul_(1.2)
        return found._replace(finish=None)

    monkeypatch.setattr(mlp_one_output, "apart", off)
    with pytest.warns(RecastWarning, match="one kernel gives another result than products"):
        assert mlp_one_output.backward(timed, layer(timed, 2100, 6, F32, F32)) is None


def test_it_is_told(timed: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "_times", {})
    compare(MLP, chain(70, [8, 9, 1], 0.3), F32)
    rows = [r for r in fastest.timings() if "one output" in str(r["key"])]
    assert len(rows) == 2
    assert all(r["chosen"] == "one kernel" and r["products"] == 2000.0 for r in rows)
