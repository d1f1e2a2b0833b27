"""``pair_products`` as a GPU runs it, on the emulator, with float64 as the judge."""

from __future__ import annotations

import itertools

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.interactions import pair_cuda
from recast.runtime.interactions.pair_products import SUMS, pair_products
from recast.runtime.tolerances import excess

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
PAIRS = torch.tensor([4, 0, 2, 2, 0, -1]), torch.tensor([0, 4, 2, 1, 0, 3])
FORMS = ("triangle", "two sides", "weighted")


def inputs(form: str, dim: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Five vectors on the left, those of the right (none: the same), and weights."""
    g = torch.Generator().manual_seed(dim)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    left = [rand(7, dim + 2)[:, :dim], rand(14, 3, dim)[::2], rand(7, dim)]
    right = [rand(7, 10, dim)[:, ::2]] if form != "triangle" else []
    return left, right, rand(7, 12)[:, ::2].contiguous()


def run(
    left: list[Tensor], right: list[Tensor], weight: Tensor | None, sum: str, up: Tensor | None
) -> list[Tensor]:
    """The result, and the gradients of all inputs."""
    leaves = [t.detach().requires_grad_() for t in (*left, *right)]
    own = None if weight is None else weight.detach().requires_grad_()
    ends = leaves[: len(left)], leaves[len(left) :]
    out = pair_products.target(*ends, *PAIRS, own, sum)
    g = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=g).to(out.dtype) if up is None else up)
    found = [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return found if own is None or own.grad is None else [*found, own.grad]


CASES = [
    *((sum, form, 11, F32) for sum in SUMS for form in FORMS),
    *(("dim", "weighted", dim, dtype) for dim, dtype in ((1, F32), (40, F32), (33, BF16))),
    *((sum, "weighted", 16, F16) for sum in SUMS),
]


@pytest.mark.parametrize(
    ("sum", "form", "dim", "dtype"), CASES, ids=[f"{s}-{f}-{d}" for s, f, d, _ in CASES]
)
def test_forward_and_backward(sum: str, form: str, dim: int, dtype: torch.dtype) -> None:
    left, right, weight = inputs(form, dim, dtype)
    given = weight if form == "weighted" else None
    with emulated_gpu.serve() as emulated:
        found = run(left, right, given, sum, None)
    assert emulated.launched == ["pair_forward", "pair_lists", "pair_backward"]
    plain = run(left, right, given, sum, None)
    wide = None if given is None else given.double()
    g = torch.Generator().manual_seed(1)
    up = torch.randn(found[0].shape, generator=g).to(dtype).double()
    truth = run([t.double() for t in left], [t.double() for t in right], wide, sum, up)
    assert len(found) == len(plain) == len(truth) == 4 + len(right) + (given is not None)
    for a, b, c in zip(found, plain, truth, strict=True):
        assert a.dtype == dtype
        assert excess(a, b, c) <= 1


LARGE = [
    # sum, vectors, dim, pairs (None: a triangle), weighted, dtype
    pytest.param("none", 26, 16, None, False, F32, id="copied at once"),
    pytest.param("dim", 26, 16, None, False, F32, id="samples together"),
    pytest.param("none", 20, 64, None, False, F32, id="columns apart"),
    pytest.param("none", 5, 1, 700, False, F32, id="a thread for a vector"),
    pytest.param("none", 3, 2, 1, False, F16, id="more samples than rounds"),
    pytest.param("none", 6, 64, 600, True, F32, id="gradients where they are"),
    pytest.param("none", 30, 16, 5000, False, BF16, id="more gradients than fit"),
    pytest.param("dim", 9, 4, 9000, False, F32, id="lists where they are"),
    pytest.param("pairs", 9, 140, 9000, True, F32, id="lists and wide vectors"),
    pytest.param("all", 3, 6, 1, False, F32, id="one pair"),
    pytest.param("dim", 2, 64, 1, False, BF16, id="one product"),
]


@pytest.mark.parametrize(("sum", "vectors", "dim", "pairs", "weighted", "dtype"), LARGE)
def test_however_the_work_is_cut(
    sum: str, vectors: int, dim: int, pairs: int | None, weighted: bool, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(dim)
    if pairs is None:
        li, lj = torch.triu_indices(vectors, vectors, 1)
    else:
        li, lj = torch.randint(-vectors, vectors, (2, pairs), generator=g)
    batch = 11 if pairs is None else 3
    x = torch.randn(batch, vectors, dim, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(batch, len(li), generator=g).to(dtype) if weighted else None
    leaves = [x] if weight is None else [x, weight.requires_grad_()]

    def both(wide: torch.dtype) -> list[Tensor]:
        ends = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
        out = pair_products.target([ends[0]], [], li, lj, *(ends[1:] or [None]), sum)
        up = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, ends, up.to(wide))]

    with emulated_gpu.serve() as emulated:
        found = both(dtype)
    forward = "pair_rows" if sum == "none" and not weighted else "pair_forward"
    assert emulated.launched == [forward, "pair_lists", "pair_backward"]
    for a, b, c in zip(found, both(dtype), both(torch.float64), strict=True):
        assert excess(a, b, c) <= 1


def test_products_that_are_not_summed_by_the_general_kernel() -> None:
    """For comparison: the same bits."""
    li, lj = torch.triu_indices(5, 5, 1)
    x = torch.randn(7, 5, 16, generator=torch.Generator().manual_seed(2))
    with emulated_gpu.serve() as emulated:
        found = pair_products.target([x], [], li, lj, None, "none")
        with pair_cuda.without_rows():
            general = pair_products.target([x], [], li, lj, None, "none")
        again = pair_products.target([x], [], li, lj, None, "none")
    assert emulated.launched == ["pair_rows", "pair_forward", "pair_rows"]
    assert torch.equal(found, general) and torch.equal(found, again)


@pytest.mark.parametrize("sum", range(4))
def test_a_block_never_asks_for_more_than_there_is(sum: int) -> None:
    """Of what the kernels take at all: vectors of 48 KiB in float32."""
    for dim in (1, 8, 16, 512, 12288):
        for pairs, backward, weighted in itertools.product((1, 300, 2000, 9000), (0, 1), (0, 1)):
            vec = 4 if dim % 4 == 0 else 1
            given = sum, 4, vec, 12288 // dim, dim, pairs, bool(backward), bool(weighted)
            assert pair_cuda._form(*given).shared <= 96 << 10


def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    left, right, weight = inputs("weighted", 20, F32)
    runs = []
    for workers, seed in ((1, 0), (2, 7)):
        with emulated_gpu.serve(workers, seed):
            runs.append(run(left, right, weight, "pairs", None))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_pairs_that_are_not_there_are_left_out() -> None:
    left = [torch.randn(3, 2, 8)]
    pairs = torch.tensor([0, 2, 0]), torch.tensor([1, 0, -3])
    with emulated_gpu.serve() as emulated:
        out = pair_products.target(left, [], *pairs, None, "dim")
        rows = pair_products.target(left, [], *pairs, None, "none")
        wide = pair_products.target([torch.ones(3, 2, 12)], [], *pairs, None, "none")
    assert emulated.launched == ["pair_forward", "pair_rows", "pair_forward"]
    torch.testing.assert_close(out[:, 0], (left[0][:, 0] * left[0][:, 1]).sum(1))
    torch.testing.assert_close(rows[:, 0], left[0][:, 0] * left[0][:, 1])
    assert wide[:, 0].all() and not any(t[:, 1:].any() for t in (out, rows, wide))
