"""``fm_interaction`` as a GPU runs it, on the emulator, with float64 as the judge."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.interactions.fm_interaction import fm_interaction
from recast.runtime.tolerances import excess

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def apart(batch: int, dim: int, dtype: torch.dtype, spare: int) -> list[Tensor]:
    """Two vectors and a stack, each with so many elements between its rows."""
    g = torch.Generator().manual_seed(batch + dim)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    stack = rand(batch, 3, dim + spare)[:, :, :dim]
    return [rand(batch, dim + spare)[:, :dim], stack, rand(2 * batch, dim)[::2]]


def run(features: list[Tensor], reduce: bool, up: Tensor) -> list[Tensor]:
    """The result, and the gradients of the first two features."""
    leaves = [f.detach().clone() if k == 2 else f.detach() for k, f in enumerate(features)]
    for leaf in leaves[:2]:
        leaf.requires_grad_()
    out = fm_interaction.target(leaves, 0.5, reduce)
    out.backward(up.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves[:2] if leaf.grad is not None)]


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize(
    ("dim", "dtype", "spare"),
    [(1, F32, 2), (6, F32, 0), (16, F32, 4), (130, F32, 2), (24, F16, 8), (33, BF16, 1)],
)
def test_forward_and_backward(dim: int, dtype: torch.dtype, spare: int, reduce: bool) -> None:
    features = apart(5, dim, dtype, spare)
    up = torch.randn(5, 1 if reduce else dim, generator=torch.Generator().manual_seed(1))
    with emulated_gpu.serve() as emulated:
        found = run(features, reduce, up)
    assert emulated.launched == ["fm_forward", "fm_backward"]
    plain = run(features, reduce, up)
    truth = run([f.double() for f in features], reduce, up.to(dtype))
    assert len(found) == len(plain) == len(truth) == 3
    for a, b, c in zip(found, plain, truth, strict=True):
        assert a.dtype == dtype
        assert excess(a, b, c) <= 1


@pytest.mark.parametrize(("count", "dim"), [(39, 16), (20, 130), (2, 4), (1, 3)])
def test_however_the_features_are_shared_out(count: int, dim: int) -> None:
    """Among groups of lanes; more than they keep, or fewer than groups that there is room for."""
    g = torch.Generator().manual_seed(count)
    features = [torch.randn(3, dim, generator=g).requires_grad_() for _ in range(count)]
    up = torch.randn(3, 1, generator=g)

    def gradients(wide: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [f.detach().to(wide).requires_grad_() for f in features]
        out = fm_interaction.target(leaves, 0.5, True)
        return torch.autograd.grad(out, leaves, up.to(wide))

    with emulated_gpu.serve() as emulated:
        found = gradients(F32)
    assert emulated.launched == ["fm_forward", "fm_backward"]
    for a, b, c in zip(found, gradients(F32), gradients(torch.float64), strict=True):
        assert excess(a, b, c) <= 1


def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    features, up = apart(9, 40, F32, 0), torch.ones(9, 1)
    runs = []
    for workers, seed in ((1, 0), (2, 7)):
        with emulated_gpu.serve(workers, seed):
            runs.append(run(features, True, up))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_features_of_several_dtypes_go_to_torch() -> None:
    features = [torch.randn(4, 8), torch.randn(4, 8).double()]
    with emulated_gpu.serve() as emulated:
        out = fm_interaction.target(features, 0.5, True)
    assert not emulated.launched and out.dtype == torch.float64
