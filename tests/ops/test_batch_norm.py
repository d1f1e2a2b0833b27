"""The kernels of batch norm against torch in float64: strides, odd sizes, tiles, threads."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.runtime import OPS, device, tolerances
from recast.runtime.mlp import batch_norm, mlp

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
    out, saved = batch_norm.forward(native, x, weight, bias, (mean, var), 0.3, 1e-3)
    of_x, of_weight, of_bias = batch_norm.backward(native, grad, x, weight, saved, into=True)
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


@pytest.mark.parametrize("size", [(2, 3, 1), (1, 4, 7), (7, 3, 5), (65, 17, 4), (130, 16, 64)])
@pytest.mark.parametrize("turned", [False, True], ids=["dense", "turned"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_numbers_of_places(size: tuple[int, int, int], turned: bool, affine: bool) -> None:
    """(N, C, L), through the chain, which copies what does not lie together; and once more."""
    rows, channels, places = size
    g = torch.Generator().manual_seed(rows + places)
    x = torch.randn(rows, places, channels, generator=g).transpose(1, 2) * 2 + 3
    x, grad = x if turned else x.contiguous(), torch.randn(size, generator=g)
    weight, bias = (torch.randn(channels, generator=g) if affine else None for _ in range(2))

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (x, weight, bias)]
        mean, var = torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)
        stats = [mean, var, torch.tensor(0)]
        out = OPS["mlp"].target(leaves[0], leaves[1:], stats, ["batch_norm"], [0.3, 1e-3], [True])
        given = [t for t in leaves if t is not None]
        first = torch.autograd.grad(out, given, grad.to(dtype), create_graph=True)
        torch.autograd.grad(out, given, grad.to(dtype), retain_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), given, allow_unused=True)
        found = torch.autograd.grad(out, given, grad.to(dtype))
        return [out.detach(), mean, var, *found, *(t for t in second if t is not None)]

    with device.use("fused"):
        ours = run(torch.float32)
    with device.use("torch"):
        plain, truth = run(torch.float32), run(torch.float64)
    for a, b, c in zip(ours, plain, truth, strict=True):
        scale = float(grad.abs().max()) * (rows * places) ** 0.5 + float(c.abs().max())
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
    places = x[:1].view(1, 4, 1), x.view(2, 3, 2, 2)  # four dimensions may be channels last
    for other in (x[:1], x.double(), x.t(), x[:, ::2], x[:, :0], x[0], *places):
        assert batch_norm.takes(other) is None
    assert batch_norm.takes(x, torch.randn(8)[::2]) is None


def test_a_forward_without_gradients_before_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves the running statistics, which torch's own layer holds but does not read."""
    monkeypatch.setattr(mlp, "FUSED_FROM", math.inf)  # a small batch trains on torch's own
    layers = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)
    model, x = nn.Sequential(*layers), torch.rand(32, 8)
    fast, plain = recast.optimize(model, example=x), copy.deepcopy(model)
    for net in (plain, fast):
        loss = net(x).square().mean()
        with torch.no_grad():
            net(x + 1)
        loss.backward()
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for name, held in plain.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], held)
