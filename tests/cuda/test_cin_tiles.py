"""``compressed_interaction`` on tensor cores, on the emulator, with float64 as the judge."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.interactions import cin_tiles
from recast.runtime.interactions.compressed_interaction import compressed_interaction

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Inputs = list[Tensor | None]
KERNELS = ["cin_pack", "cin_forward", "cin_pack", "cin_inputs", "cin_weight"]
ROUNDING = {F32: 2**-11, F16: 2**-11, BF16: 2**-8}


def layer(sizes: tuple[int, int, int], outputs: int, batch: int, *, bias: bool) -> Inputs:
    left, right, dim = sizes
    g = torch.Generator().manual_seed(batch + left + right)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    weight = rand(outputs, left * right) / (left * right) ** 0.5
    return [
        rand(batch, left, dim),
        rand(batch, right, dim),
        weight,
        rand(outputs) if bias else None,
    ]


def run(inputs: Inputs, relu: bool, up: Tensor) -> list[Tensor]:
    """The result, and the gradients of all inputs."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    out = compressed_interaction.target(*leaves, relu)
    out.backward(up.to(out.dtype))
    grads = [leaf.grad for leaf in leaves if leaf is not None]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def judged(found: list[Tensor], inputs: Inputs, relu: bool, up: Tensor) -> None:
    """The error is at most that of rounding the factors, and the sums to their dtype."""
    wide = [None if t is None else t.double() for t in inputs]
    dtype = found[0].dtype
    low = run(inputs, relu, up)
    # Where the result is nearly 0, a relu may let through what another does not: the same mask.
    mask = up.double() * (found[0] > 0) if relu else up.double()
    truth = [run(wide, relu, up.double())[0], *run(wide, False, mask)[1:]]
    assert len(found) == len(truth) == len(low)
    for a, b, c in zip(found, low, truth, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        off = float((a.double() - c).norm() / c.norm())
        assert off <= 2 * ROUNDING[dtype], off
        assert float((a.double() - c).abs().max()) <= 16 * ROUNDING[dtype] * float(c.abs().max())


@pytest.mark.usefixtures("conv_tf32")
@pytest.mark.parametrize(
    ("sizes", "outputs", "batch", "dtype"),
    [
        ((3, 10, 8), 20, 40, F32),  # two steps of inner features, two tiles of outputs
        ((9, 5, 12), 7, 21, BF16),  # a last block with columns behind the last
        ((5, 4, 3), 5, 30, F16),  # columns of several samples side by side
    ],
)
def test_forward_and_backward(
    sizes: tuple[int, int, int], outputs: int, batch: int, dtype: torch.dtype
) -> None:
    inputs: Inputs = [
        None if t is None else t.to(dtype) for t in layer(sizes, outputs, batch, bias=dtype != F16)
    ]
    g = torch.Generator().manual_seed(1)
    up = torch.randn(batch, outputs, sizes[2], generator=g).to(dtype)
    relu = dtype != F16
    with emulated_gpu.serve() as emulated:
        found = run(inputs, relu, up)
    assert emulated.launched == KERNELS
    judged(found, inputs, relu, up)


@pytest.mark.usefixtures("conv_tf32")
def test_more_features_than_registers_hold() -> None:
    """Inner features in two lots, several blocks of outer ones and of outputs, of few columns."""
    inputs = layer((50, 51, 2), 33, 3, bias=True)
    up = torch.randn(3, 33, 2, generator=torch.Generator().manual_seed(1))
    assert cin_tiles.depth(50, 8) == (4, 8)
    of = cin_tiles.split_of(51, 50)
    assert of.outers < 51 or of.inners < 50
    with emulated_gpu.serve() as emulated:
        found = run(inputs, True, up)
    assert emulated.launched == KERNELS
    judged(found, inputs, True, up)


@pytest.mark.usefixtures("conv_tf32")
def test_the_side_that_wastes_less_may_be_too_long() -> None:
    """A second layer: its 128 features would fill 16s, but not fit into registers."""
    inputs = layer((3, 128, 1), 128, 4, bias=False)
    up = torch.randn(4, 128, 1, generator=torch.Generator().manual_seed(1))
    assert cin_tiles.width(16, 8) == 0
    with emulated_gpu.serve() as emulated:
        found = run(inputs, False, up)
    assert emulated.launched == KERNELS
    judged(found, inputs, False, up)


@pytest.mark.usefixtures("conv_tf32")
def test_shared_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Architectures that end in 6 or 9 have 99 KiB a block."""
    x, weight = torch.zeros(2, 39, 4), torch.zeros(200, 39 * 39)
    assert cin_tiles.takes(x, x, weight)
    monkeypatch.setattr(cin_tiles, "_EMULATED", 99 << 10)
    assert not cin_tiles.takes(x, x, weight)


@pytest.mark.usefixtures("conv_tf32")
def test_infinite_features_and_gradients_spoil_no_more_than_their_column() -> None:
    """A product with the zero padding after the last feature and output would be NaN."""
    x, y, weight, _ = layer((2, 3, 4), 5, 8, bias=False)
    assert x is not None and y is not None and weight is not None
    y, weight = y.abs(), weight.abs()
    x[3, 0, 1] = float("inf")
    up = torch.ones(8, 5, 4)
    up[5, 2, 3] = float("inf")
    with emulated_gpu.serve():
        out, *grads = run([x, y, weight, None], False, up)
    assert bool((out[3, :, 1] == float("inf")).all())
    assert int((~out.isfinite()).sum()) == 5
    plain = run([x, y, weight, None], False, up)[1:3]
    for a, b in zip(grads[:2], plain, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())


@pytest.mark.usefixtures("conv_tf32")
def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    inputs = layer((5, 6, 4), 3, 200, bias=True)
    runs = []
    for workers, seed in ((1, 0), (2, 7)):
        with emulated_gpu.serve(workers, seed):
            runs.append(run(inputs, True, torch.ones(200, 3, 4)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_widths() -> None:
    """Every depth has all steps, and at most one more; blocks are there for all features."""
    for inner in range(1, 300):
        for step in (8, 16):
            deep, steps = cin_tiles.depth(inner, step)
            assert steps % deep == 0 and 0 <= steps - -(-inner // step) <= 1 <= deep <= 5
    for outer, inner in ((1, 1), (26, 26), (200, 39), (39, 200), (13, 64)):
        of = cin_tiles.split_of(outer, inner)
        assert of.outer * of.inner <= 14 and of.outers * of.split == 8 * of.outer
    assert (cin_tiles.width(4, 2), cin_tiles.width(25, 3), cin_tiles.width(100, 4)) == (4, 2, 0)


CHUNKS = "cin_products"


@pytest.mark.parametrize(
    ("conv", "products", "cudnn", "wanted"),
    [
        (True, "ieee", True, "cin_forward"),  # by torch's default
        (False, "ieee", True, CHUNKS),
        (False, "tf32", True, None),  # products that torch.mm would round
        (True, "ieee", False, CHUNKS),  # a convolution that is a matrix product
        (False, "tf32", False, "cin_forward"),
    ],
)
def test_as_precise_as_the_convolution(
    conv: bool, products: str, cudnn: bool, wanted: str | None
) -> None:
    inputs, matmul = layer((3, 5, 3), 4, 6, bias=True), torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = products
    try:
        with (
            emulated_gpu.serve() as emulated,
            torch.backends.cudnn.flags(enabled=cudnn, allow_tf32=conv),
        ):
            found = run(inputs, True, torch.ones(6, 4, 3))
    finally:
        matmul.fp32_precision = before
    assert (wanted in emulated.launched) if wanted else not emulated.launched
    if wanted != "cin_forward":
        for a, b in zip(found, run(inputs, True, torch.ones(6, 4, 3)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("conv_tf32", "tf32")
@pytest.mark.parametrize("relu", [True, False])
def test_convolutions_that_must_be_exact_since_forward(relu: bool) -> None:
    """Neither the kernels of TF32 nor products that torch.mm would round: as plain torch does."""
    inputs, up = layer((3, 5, 3), 4, 6, bias=True), torch.ones(6, 4, 3)
    leaves = [t.requires_grad_() for t in inputs if t is not None]
    plain = run(inputs, relu, up)
    with emulated_gpu.serve() as emulated:
        out = compressed_interaction.target(*inputs, relu)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            found = torch.autograd.grad(out, leaves, up)
    assert emulated.launched == ["cin_pack", "cin_forward"]
    for a, b in zip(found, plain[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
