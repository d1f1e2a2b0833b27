"""``scaled_einsum`` and ``contraction`` as a GPU runs them, on the emulator: what is launched when.

Their numbers are those of all ops' samples (tests/ops).
"""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.interactions import outer_cuda
from recast.runtime.interactions.contraction import contraction
from recast.runtime.interactions.scaled_einsum import scaled_einsum
from recast.runtime.tolerances import excess


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("shapes", "equation"),
    [
        (((7, 8), (3, 8, 5), (7, 5)), "bi,eij,bj->bei"),
        (((7, 4), (3, 8, 4, 5), (7, 5)), "bk,eikj,bj->beki"),  # not all in one place: torch
        (((7, 3, 8), (3, 8, 5), (7, 5)), "bei,eij,bj->bei"),  # a factor of every number
    ],
)
def test_scaled_products(shapes: tuple[tuple[int, ...], ...], equation: str) -> None:
    args = [rand(*shape) for shape in shapes]
    served = equation != "bk,eikj,bj->beki"
    with emulated_gpu.serve() as emulated:
        with torch.no_grad():
            scaled_einsum.target(*args, equation)
        leaves = [t.clone().requires_grad_() for t in args]
        out = scaled_einsum.target(*leaves, equation)
        out.backward(torch.ones_like(out), retain_graph=True)
        (first,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    kernels = ["scaled_forward", "scaled_forward", "scaled_backward"]
    assert emulated.launched == (kernels if served else [])
    wide = [t.double().requires_grad_() for t in args]
    truth = torch.einsum(equation, *wide)
    truth.backward(torch.ones_like(truth))
    assert excess(out.detach(), torch.einsum(equation, *args), truth.detach()) <= 1
    for leaf, t in zip(leaves, wide, strict=True):
        assert leaf.grad is not None and t.grad is not None
        torch.testing.assert_close(leaf.grad.double(), t.grad, rtol=1e-4, atol=1e-5)
    (second,) = torch.autograd.grad(first.sum(), leaves[1])
    (judge,) = torch.autograd.grad(
        torch.autograd.grad(torch.einsum(equation, *wide).sum(), wide[0], create_graph=True)[
            0
        ].sum(),
        wide[1],
    )
    torch.testing.assert_close(second.double(), judge, rtol=1e-4, atol=1e-5)


def test_outer_products() -> None:
    """More rows than blocks and threads; long vectors and other equations are torch's."""
    x, w = rand(900, 5, 3).requires_grad_(), rand(4, 5, 3).requires_grad_()
    with emulated_gpu.serve() as emulated:
        out = contraction.target(x, w, "acd,bcd->abc")
        up = torch.randn_like(out)
        found = [out.detach(), *torch.autograd.grad(out, (x, w), up)]
        contraction.target(rand(4, 3, 33), rand(2, 3, 33), "acd,bcd->abc")
        contraction.target(rand(7, 5), rand(3, 5), "ac,bc->ab")
    assert emulated.launched == ["outer_forward", "outer_backward"]
    plain = torch.einsum("acd,bcd->abc", x, w)
    for a, b in zip(found, [plain.detach(), *torch.autograd.grad(plain, (x, w), up)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("samples", "vectors", "outputs", "dim", "dtype"),
    [
        (900, 5, 4, 16, torch.float32),  # many tiles of each block
        (3, 45, 16, 16, torch.float32),  # a tile that is not full
        (70, 7, 3, 8, torch.bfloat16),  # results that are no multiple of 16 bytes
        (1, 3, 9, 32, torch.float16),
        (50, 1, 1, 4, torch.float32),
        (3, 600, 1, 4, torch.float32),  # more than the threads of a block
    ],
)
def test_outer_products_in_tiles(
    samples: int, vectors: int, outputs: int, dim: int, dtype: torch.dtype
) -> None:
    x, w = rand(samples, vectors, dim).to(dtype), rand(outputs, vectors, dim).to(dtype)
    with emulated_gpu.serve() as emulated:
        out = contraction.target(x, w, "acd,bcd->abc")
    assert emulated.launched == ["outer_forward" if vectors == 600 else "outer_tiles"]
    truth = torch.einsum("acd,bcd->abc", x.double(), w.double())
    assert excess(out, torch.einsum("acd,bcd->abc", x, w), truth) <= 1


def test_outer_products_by_the_other_kernel() -> None:
    """For comparison."""
    x, w = rand(9, 5, 16), rand(4, 5, 16)
    with emulated_gpu.serve() as emulated:
        found = contraction.target(x, w, "acd,bcd->abc")
        with outer_cuda.without_tiles():
            other = contraction.target(x, w, "acd,bcd->abc")
        contraction.target(x, w, "acd,bcd->abc")
    assert emulated.launched == ["outer_tiles", "outer_forward", "outer_tiles"]
    torch.testing.assert_close(found, other)


def test_outer_products_of_views() -> None:
    """Rows that do not begin at 16 bytes; nothing of one sample reaches another."""
    x, w = rand(40, 6, 17)[:, :, 1:], rand(4, 6, 16)
    odd = rand(40 * 6 * 16 + 1)[1:].view(40, 6, 16)
    x[3, 2, 1] = float("nan")
    for given, kernel in ((x, "outer_tiles"), (odd, "outer_forward")):
        with emulated_gpu.serve() as emulated:
            out = contraction.target(given, w, "acd,bcd->abc")
        assert emulated.launched == [kernel]
        torch.testing.assert_close(
            out, torch.einsum("acd,bcd->abc", given, w), rtol=1e-5, atol=1e-5, equal_nan=True
        )
