"""First layers whose input has rows of any width, on the emulator and a stand-in for cublasLt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import cublaslt_stand_in
import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime import OPS, aligned, device, fastest
from recast.runtime.tolerances import excess

MLP, DOT = OPS["mlp"], OPS["dot_interaction"]
STEPS = ["linear", "relu", "linear"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

pytestmark = pytest.mark.skipif(
    device.extension() is None, reason=f"the extension: {device.why_missing()}"
)


@pytest.fixture
def machine() -> Iterator[None]:
    with cublaslt_stand_in.serve(), emulated_gpu.serve():
        yield


@pytest.fixture(params=["aligned", "as given"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine for which this first layer is the fastest, and plain torch for other products."""
    chosen: str = request.param

    def choose(key: Any, ways: Any, like: Tensor, results: Any) -> str:
        names = [*ways]
        if key[0] != "first layer":
            return names[-1]
        assert len(names) == 2
        alike = [results(ways[name]())[0] for name in names]
        torch.testing.assert_close(*alike, rtol=0.02, atol=0.02)
        return chosen

    monkeypatch.setattr(fastest, "_chosen", {})
    monkeypatch.setattr(fastest, "choose", choose)
    return chosen


def params(width: int, hidden: int = 6) -> list[Tensor]:
    g = torch.Generator().manual_seed(width)
    shapes = [(hidden, width), (hidden,), (2, hidden), (2,)]
    return [torch.randn(s, generator=g) / (width if len(s) > 1 else 1) ** 0.5 for s in shapes]


def gradients(
    call: Callable[..., Tensor], x: Tensor, weights: list[Tensor], upstream: Tensor
) -> list[Tensor]:
    """The result, and the gradients of the input and the parameters."""
    leaves = [x.detach().requires_grad_(), *(w.detach().requires_grad_() for w in weights)]
    out = call(leaves[0], leaves[1:], [], STEPS, [], [])
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def check(x: Tensor, weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The op against plain torch, both against float64."""
    upstream = torch.randn(*x.shape[:-1], 2, generator=torch.Generator().manual_seed(3)).to(dtype)
    cast = [w.to(dtype) for w in weights]
    ours = gradients(MLP.target, x, cast, upstream)
    plain = gradients(MLP.reference, x, cast, upstream)
    truth = gradients(MLP.reference, x.double(), [w.double() for w in cast], upstream)
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert excess(a, b, c, scale=max(1.0, float(c.abs().max()))) <= 1
    return ours


def test_how_far_apart_rows_are() -> None:
    assert [aligned.stride(n, torch.float32) for n in (1, 4, 479)] == [4, 4, 480]
    assert [aligned.stride(n, torch.bfloat16) for n in (1, 8, 479)] == [8, 8, 480]
    assert [aligned.stride(n, torch.float64) for n in (1, 2, 3)] == [2, 2, 4]
    made = aligned.empty(3, 5, torch.float32, torch.device("cpu"))
    assert made.shape == (3, 5) and made.stride() == (8, 1) and not aligned.is_marked(made)
    # To lines of 128 bytes, or sectors of 32, where that adds little, and only if padded at all.
    widths = (2522, 682, 684, 37)
    assert [aligned.stride(n, torch.float32) for n in widths] == [2528, 688, 684, 40]
    assert aligned.stride(2522, torch.bfloat16) == 2528
    with aligned.least_padding():
        assert [aligned.stride(n, torch.float32) for n in widths] == [2524, 684, 684, 40]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_width(machine: None, way: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    for width, rows in itertools.product((1, 3, 7, 8, 37), (1, 9)):
        x = torch.randn(rows, width, generator=g).to(dtype)
        _, _, of_weight, *_ = check(x, params(width), dtype)
        assert of_weight.is_contiguous()
    check(torch.randn(5, 322, generator=g).to(dtype), params(322), dtype)  # to a sector: 328
    check(torch.randn(3, 2, 5, generator=g).to(dtype), params(5), dtype)
    check(torch.randn(5, 9, generator=g).to(dtype).t(), params(5), dtype)


def test_what_stands_behind_a_slice_is_not_read(machine: None, way: str) -> None:
    """Rows of 37 at a stride of 40, not declared to be padded with zeros."""
    whole = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    whole[:, 37:] = float("nan")
    ours = check(whole[:, :37], params(37), torch.float32)
    assert all(bool(t.isfinite().all()) for t in ours)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_interaction_leaves_zeros_behind_its_rows(machine: None, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    li, lj = torch.tril_indices(6, 6, -1)
    features = [torch.randn(11, 12, generator=g).to(dtype) for _ in range(6)]
    weights = [w.to(dtype) for w in params(27)]

    def both(dot: Any, mlp: Any, of: torch.dtype, is_aligned: bool) -> list[Tensor]:
        leaves = [t.to(of).requires_grad_() for t in (*features, *weights)]
        x = dot(leaves[:6], leaves[0], li, lj, 0, is_aligned)
        assert aligned.is_marked(x) == (is_aligned and dot is DOT.target)
        out = mlp(x, leaves[6:], [], STEPS, [], [])
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(of)
        return [x.detach(), out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    ours = both(DOT.target, MLP.target, dtype, True)
    plain = both(DOT.reference, MLP.reference, dtype, False)
    truth = both(DOT.reference, MLP.reference, torch.float64, False)
    assert ours[0].stride() == (aligned.stride(27, dtype), 1)
    assert not aligned.whole(ours[0])[:, 27:].any()
    scale = max(float(t.abs().max()) for t in truth)
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert a.dtype == b.dtype and excess(a, b, c, scale=scale) <= 1
    # The same bits as without zeros, of the interaction itself.
    assert torch.equal(ours[0], DOT.target(features, features[0], li, lj, 0))


def test_no_row_at_all(machine: None) -> None:
    li, lj = torch.tril_indices(3, 3, -1)
    x = DOT.target([torch.randn(0, 3, 4)], None, li, lj, 0, True)
    assert x.shape == (0, 3)
    out = MLP.target(x, params(3), [], STEPS, [], [])
    assert out.shape == (0, 2)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_autocast_casts_and_aligns_at_once(machine: None, dtype: torch.dtype) -> None:
    """A float32 input is cast into rows aligned to 16 bytes: the cast is the only copy."""
    g = torch.Generator().manual_seed(5)
    x, weights = torch.randn(9, 13, generator=g), params(13)
    upstream = torch.randn(9, 2, generator=g)
    with torch.autocast("cpu", dtype):
        ours = gradients(MLP.target, x, weights, upstream)
        plain = gradients(MLP.reference, x, weights, upstream)
    truth = gradients(MLP.reference, x.double(), [w.double() for w in weights], upstream)
    assert ours[0].dtype == dtype and {t.dtype for t in ours[1:]} == {torch.float32}
    scale = max(float(t.abs().max()) for t in truth)
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert a.shape == b.shape
        # Of the precision of the products, whatever the dtype of the result.
        assert excess(a.to(dtype), b.to(dtype), c, scale=scale) <= 1


def test_gradients_of_gradients(machine: None, way: str) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(6)).requires_grad_()
    weights = [w.requires_grad_() for w in params(7)]
    found = []
    for call in (MLP.target, MLP.reference):
        out = call(x, weights, [], STEPS, [], [])
        (first,) = torch.autograd.grad((out * out).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((first * first).sum(), weights[0])[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
