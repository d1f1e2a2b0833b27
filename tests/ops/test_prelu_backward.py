"""The gradients of prelu are torch's, element for element; those of the slopes, up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from recast.runtime.layers.prelu_backward import gradients
from recast.runtime.mlp import mlp, run

SHAPES = [((40, 7), 1), ((40, 7), 7), ((9, 5, 6), 1), ((9, 5, 6), 5), ((3, 4, 2, 5), 4), ((11,), 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "slopes"), SHAPES)
def test_they_are_torchs(shape: tuple[int, ...], slopes: int, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=gen).to(dtype)
    x.view(-1)[::4] = 0.0  # as dropout leaves it: the slope counts there
    g, weight = torch.randn(shape, generator=gen).to(dtype), torch.rand(slopes, generator=gen) - 0.2
    leaves = [x.clone().requires_grad_(), weight.to(dtype).requires_grad_()]
    expected = torch.autograd.grad(F.prelu(*leaves), leaves, g)
    into, of_weight = gradients(g, x, weight.to(dtype))
    torch.testing.assert_close(into, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(of_weight, expected[1])


@pytest.mark.parametrize("slopes", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", ["gradient above 0", "gradient below 0", "input", "slope"])
def test_what_is_not_finite_counts_as_in_torch(at: str, bad: float, slopes: int) -> None:
    x, g, weight = torch.ones(4, 3), torch.full((4, 3), 2.0), torch.full((slopes,), 0.25)
    x[1:3] = -1.0
    changed, index = {
        "gradient above 0": (g, (0, 1)), "gradient below 0": (g, (1, 1)),
        "input": (x, (1, 1)), "slope": (weight, 0),
    }[at]  # fmt: skip
    changed[index] = bad
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.autograd.grad(F.prelu(*leaves), leaves, g)
    for mine, theirs in zip(gradients(g, x, weight), expected, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_many_numbers_of_a_prelu_make_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "FUSED_FROM", float("inf"))
    monkeypatch.setattr(mlp, "FUSED_FROM_ONEDNN", float("inf"))
    params = [torch.rand(64, 8, requires_grad=True), None, torch.full((1,), 0.25)]
    for rows, one in ((10, False), (400, True)):
        x = torch.rand(rows, 8)
        out = torch.ops.recast.mlp(x, params, [], ["linear", "prelu"], [], [])
        assert (type(out.grad_fn).__name__ == f"{run.Mlp.__name__}Backward") == one
