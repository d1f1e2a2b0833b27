"""The kernels of batch norm against torch in float64: strides, odd sizes, tiles, threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recast.runtime import device, tolerances
from recast.runtime.mlp import batch_norm

pytestmark = pytest.mark.skipif(device.why_missing() is not None, reason="no kernels here")
SIZES = [(2, 1), (7, 3), (65, 17), (130, 64), (70, 133), (2048, 80)]


def _case(rows: int, columns: int, apart: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows + columns)
    wide = torch.randn(rows, columns + 9, generator=g) * 2 + 3
    x = wide[:, 4 : 4 + columns] if apart else wide[:, :columns].contiguous()
    weight, bias = (torch.randn(columns, generator=g) for _ in range(2))
    return x, weight, bias, torch.randn(rows, columns, generator=g)


def _torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (x, weight, bias)]
    assert leaves[0] is not None
    mean, var = torch.zeros(x.shape[1], dtype=dtype), torch.ones(x.shape[1], dtype=dtype)
    out = F.batch_norm(leaves[0], mean, var, leaves[1], leaves[2], True, 0.3, 1e-3)
    given = [t for t in leaves if t is not None]
    return [out.detach(), mean, var, *torch.autograd.grad(out, given, grad.to(dtype))]


def _ours(x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    mean, var = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    native = batch_norm.takes(x, weight, bias, mean, var)
    assert native is not None
    out, *saved = batch_norm.forward(native, x, weight, bias, (mean, var), 0.3, 1e-3)
    of_x, of_weight, of_bias = batch_norm.backward(native, grad, x, weight, *saved, into=True)
    assert of_x is not None
    found = [out, mean, var, of_x]
    return found if weight is None else [*found, of_weight, of_bias]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("apart", [False, True], ids=["dense", "rows apart"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_numbers(size: tuple[int, int], apart: bool, affine: bool) -> None:
    x, weight, bias, grad = _case(*size, apart)
    args = (x, weight, bias, grad) if affine else (x, None, None, grad)
    ours = _ours(*args)
    plain, truth = _torch(*args, torch.float32), _torch(*args, torch.float64)
    for a, b, c in zip(ours, plain, truth, strict=True):
        scale = float(grad.abs().max()) * size[0] ** 0.5  # a gradient of zero is a sum of these
        assert tolerances.excess(a, b, c, scale=scale) <= 1


def test_any_number_of_threads_gives_the_same() -> None:
    args = _case(2048, 80, True)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(_ours(*args))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_it_does_not_take() -> None:
    x = torch.randn(6, 4)
    for other in (x[:1], x.double(), x.t(), x[:, ::2], x[:, :0], x.view(3, 2, 4)):
        assert batch_norm.takes(other) is None
    assert batch_norm.takes(x, torch.randn(8)[::2]) is None
