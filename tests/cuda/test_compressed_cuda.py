"""``compressed_interaction`` as a GPU runs it, on the emulator, with float64 as the judge."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recast.runtime.interactions import compressed_cuda
from recast.runtime.interactions.compressed_interaction import compressed_interaction
from recast.runtime.tolerances import excess

F32, BF16 = torch.float32, torch.bfloat16
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


def layer(batch: int, left: int, right: int, dim: int, outputs: int, *, bias: bool) -> Inputs:
    g = torch.Generator().manual_seed(batch + left + right)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    weight = rand(outputs, left * right) / (left * right) ** 0.5
    return rand(batch, left, dim), rand(batch, right, dim), weight, rand(outputs) if bias else None


def run(inputs: Inputs, relu: bool, low: torch.dtype | None = None) -> list[Tensor]:
    """The result, and the gradients of all inputs; under autocast to ``low``."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.autocast("cpu", low or BF16, enabled=low is not None):
        out = compressed_interaction.target(*leaves, relu)
    g = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=g).to(out.dtype))
    grads = [leaf.grad for leaf in leaves if leaf is not None]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def judged(found: list[Tensor], plain: list[Tensor], truth: list[Tensor]) -> None:
    assert len(found) == len(plain) == len(truth)
    scale = max(float(t.abs().max()) for t in truth)
    for a, b, c in zip(found, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert excess(a, b, c.double(), scale=scale) <= 1


def widened(inputs: Inputs) -> Inputs:
    x, y, weight, bias = (None if t is None else t.double() for t in inputs)
    assert x is not None and y is not None and weight is not None
    return x, y, weight, bias


@pytest.mark.parametrize(
    ("left", "right", "dim", "bias"), [(9, 4, 12, True), (4, 17, 5, False), (1, 3, 33, True)]
)
def test_many_chunks(
    left: int, right: int, dim: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of eight samples at a time, and of five at the end."""
    monkeypatch.setattr(compressed_cuda, "GOAL", 1)
    inputs = layer(21, left, right, dim, 7, bias=bias)
    with emulated_gpu.serve() as emulated:
        found = run(inputs, True)
    products = "cin_products" if dim % 4 else "cin_products_4"
    assert emulated.launched == [*[products] * 3, *[products, "cin_gradients"] * 3]
    judged(found, run(inputs, True), run(widened(inputs), True))


def test_under_autocast() -> None:
    """Products of float32 features, rounded as they are made, as a convolution would round them."""
    x, y, weight, bias = layer(9, 5, 3, 8, 6, bias=True)
    with emulated_gpu.serve() as emulated:
        found = run((x, y, weight, bias), False, BF16)
        mixed = run((x, y.to(BF16), weight, bias), False, BF16)
    assert emulated.launched.count("cin_weight") == 2
    assert found[0].dtype == mixed[0].dtype == BF16
    assert [t.dtype for t in mixed[1:]] == [F32, BF16, F32, F32]
    plain, truth = run((x, y, weight, bias), False, BF16), run(
        widened((x, y, weight, bias)), False
    )  # fmt: skip
    scale = max(float(t.abs().max()) for t in truth)
    for a, b, c in zip(found, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert excess(a.to(BF16), b.to(BF16), c, scale=scale) <= 1


def test_second_derivatives_under_autocast() -> None:
    """Through plain torch, with the roundings of autocast."""
    x, y, weight, bias = layer(4, 2, 3, 4, 2, bias=True)
    leaf = x.requires_grad_()
    with emulated_gpu.serve():
        with torch.autocast("cpu", BF16):
            out = compressed_interaction.target(leaf, y, weight, bias, False)
        (first,) = torch.autograd.grad(out.float().pow(2).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), leaf)
    wide = x.detach().double().requires_grad_()
    products = (wide.unsqueeze(2) * y.double().unsqueeze(1)).flatten(1, 2)
    assert bias is not None
    made = F.conv1d(products, weight.double().unsqueeze(2), bias.double())
    (first,) = torch.autograd.grad(made.pow(2).sum(), wide, create_graph=True)
    (truth,) = torch.autograd.grad(first.sum(), wide)
    torch.testing.assert_close(
        second.double(), truth, rtol=0.05, atol=0.05 * float(truth.abs().max())
    )


def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    inputs = layer(40, 5, 6, 4, 3, bias=True)
    runs = []
    for workers, seed in ((1, 0), (2, 7)):
        with emulated_gpu.serve(workers, seed):
            runs.append(run(inputs, True))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_dtypes_that_do_not_fit_are_refused_as_by_torch() -> None:
    x, y, weight, bias = layer(4, 2, 2, 4, 3, bias=False)
    with emulated_gpu.serve(), pytest.raises(RuntimeError, match="type"):
        compressed_interaction.target(x, y, weight.to(BF16), bias, False)
