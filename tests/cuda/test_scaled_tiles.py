"""``scaled_einsum`` on tensor cores, on the emulator, with float64 as the judge."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.interactions import scaled_tiles
from recast.runtime.interactions.scaled_einsum import scaled_einsum

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EXPERTS = "bi,eij,bj->bei"
FORWARD = ["scaled_pack", "scaled_tiles_forward"]
INPUTS = ["scaled_pack", "scaled_tiles_inputs"]
KERNELS = [*FORWARD, *INPUTS, "scaled_weight"]
ROUNDING = {F32: 2**-11, F16: 2**-11, BF16: 2**-8}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def experts(rows: int, between: int, inner: int, depth: int, dtype: torch.dtype) -> list[Tensor]:
    """The scale, the weight and the rows."""
    weight = rand(between, inner, depth) / depth**0.5
    return [t.to(dtype) for t in (rand(rows, inner, seed=1), weight, rand(rows, depth, seed=2))]


def run(given: list[Tensor], equation: str, up: Tensor) -> list[Tensor]:
    """The result, and the gradients of those that want one."""
    out = scaled_einsum.target(*given, equation)
    leaves = list({id(t): t for t in given if t.requires_grad}.values())
    grads = torch.autograd.grad(out, leaves, up.to(out.dtype)) if leaves else ()
    return [out.detach(), *grads]


def judged(found: list[Tensor], given: list[Tensor], equation: str, up: Tensor) -> None:
    """The error is at most that of rounding the factors, and the sums to their dtype."""
    wide = {id(t): t.detach().double().requires_grad_(t.requires_grad) for t in given}
    truth = run([wide[id(t)] for t in given], equation, up.double())
    assert len(found) == len(truth)
    for a, c in zip(found, truth, strict=True):
        assert a.dtype == given[0].dtype and a.shape == c.shape
        off = float((a.double() - c).norm() / c.norm())
        assert off <= 2 * ROUNDING[a.dtype], off
        assert float((a.double() - c).abs().max()) <= 16 * ROUNDING[a.dtype] * float(c.abs().max())


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("rows", "between", "inner", "depth", "dtype"),
    [
        (150, 2, 20, 128, F32),  # columns behind the last, two blocks of rows, a warp without any
        (37, 3, 64, 40, F16),  # terms behind the last, and rows of a pair
        (130, 1, 36, 100, BF16),
        (1, 5, 16, 4, F32),
        (300, 9, 32, 36, BF16),  # several parts of rows, several blocks of columns
    ],
)
def test_forward_and_backward(
    rows: int, between: int, inner: int, depth: int, dtype: torch.dtype
) -> None:
    given = [t.requires_grad_() for t in experts(rows, between, inner, depth, dtype)]
    up = rand(rows, between, inner, seed=3).to(dtype)
    with emulated_gpu.serve() as emulated:
        found = run(given, EXPERTS, up)
    assert emulated.launched == KERNELS
    judged(found, given, EXPERTS, up)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_that_are_the_scale_too(dtype: torch.dtype) -> None:
    """One gradient, which the kernel adds up."""
    _, weight, x = (t.requires_grad_() for t in experts(70, 3, 24, 24, dtype))
    up = rand(70, 3, 24, seed=3).to(dtype)
    with emulated_gpu.serve() as emulated:
        out = scaled_einsum.target(x, weight, x, EXPERTS)
        found = run([x, weight, x], EXPERTS, up)
    ends = [f for f, _ in out.grad_fn.next_functions if f is not None]
    assert len(ends) == 2 and emulated.launched == [*FORWARD, *KERNELS]
    judged(found, [x, weight, x], EXPERTS, up)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bi,bj,eij->bei", ((9, 16), (9, 8), (2, 16, 8))),  # the weight behind the rows
        ("abi,jei,abj->abei", ((3, 5, 16), (8, 2, 16), (3, 5, 8))),  # in another order
        ("bi,eijk,bkj->bei", ((9, 20), (2, 20, 4, 3), (9, 3, 4))),  # sums over two
        ("bik,cdikj,bj->bcdik", ((5, 4, 4), (2, 3, 4, 4, 8), (5, 8))),  # two, and two between
        ("bi,ij,bj->bi", ((9, 28), (28, 12), (9, 12))),  # nothing between
    ],
)
def test_equations(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    given = [rand(*shape).requires_grad_() for shape in shapes]
    up = torch.randn_like(torch.einsum(equation, *given))
    with emulated_gpu.serve() as emulated:
        found = run(given, equation, up)
    assert emulated.launched == KERNELS
    judged(found, given, equation, up)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [F32, F16])
def test_views(dtype: torch.dtype) -> None:
    """Rows apart, every second number, a start between fours, gradients of one number."""
    wide = rand(11, 40).to(dtype)
    scale, apart = rand(22, 16).to(dtype)[::2], wide[:, 4:24]
    weight = rand(20, 16, 4).to(dtype).permute(2, 1, 0)[1:3]
    for x in (apart, rand(11, 40, seed=1).to(dtype)[:, ::2], wide[:, 1:21]):
        given = [t.detach().requires_grad_() for t in (scale, weight, x)]
        for up in (torch.ones(()).expand(11, 2, 16), rand(16, 2, 11).permute(2, 1, 0)):
            with emulated_gpu.serve() as emulated:
                found = run(given, EXPERTS, up.to(dtype))
            assert emulated.launched == KERNELS
            judged(found, given, EXPERTS, up)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), ()])
def test_some_gradients(wanted: tuple[int, ...]) -> None:
    given = [
        t.requires_grad_(k in wanted) for k, t in enumerate(experts(20, 2, 16, 16, torch.float32))
    ]
    up = rand(20, 2, 16)
    with emulated_gpu.serve() as emulated:
        found = run(given, EXPERTS, up)
    inputs = INPUTS if {0, 2} & {*wanted} else []
    assert emulated.launched == [*FORWARD, *inputs, *(["scaled_weight"] if 1 in wanted else [])]
    judged(found, given, EXPERTS, up)


@pytest.mark.usefixtures("tf32")
def test_gradients_of_gradients() -> None:
    x = rand(7, 16).requires_grad_()
    given = [rand(7, 16, seed=4).requires_grad_(), rand(2, 16, 16).requires_grad_(), x]
    with emulated_gpu.serve():
        for args in (given, [x, given[1], x]):
            wide = {id(t): t.detach().double().requires_grad_() for t in args}
            second = []
            for own in (args, [wide[id(t)] for t in args]):
                out = scaled_einsum.target(*own, EXPERTS)
                leaves = list({id(t): t for t in own}.values())
                first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
                more = torch.stack([g.square().sum() for g in first]).sum()
                second.append(torch.autograd.grad(more, leaves))
            for a, b in zip(*second, strict=True):
                assert float((a.double() - b).norm() / b.norm()) < 4e-3


def test_what_stays_with_torchs_product() -> None:
    """float32 where TF32 is not allowed, exactly; long sums; odd, few or no columns; no rows."""
    exact = [rand(9, 16), rand(2, 16, 8), rand(9, 8)]
    half = [
        [t.bfloat16() for t in (rand(9, i), rand(2, i, j), rand(9, j))]
        for i, j in ((16, 132), (18, 8), (12, 8), (16, 6))
    ]
    with emulated_gpu.serve() as emulated:
        for given in (exact, *half):
            out = scaled_einsum.target(*given, EXPERTS)
            wide = torch.einsum(EXPERTS, *(t.double() for t in given))
            rtol = 2e-6 if out.dtype == F32 else 2e-2
            torch.testing.assert_close(out, wide.to(out.dtype), rtol=rtol, atol=1e-5)
        none = scaled_einsum.target(*experts(0, 2, 16, 8, BF16), EXPERTS)
    assert none.shape == (0, 2, 16)
    assert emulated.launched == ["scaled_forward"] * 5


@pytest.mark.usefixtures("tf32")
def test_gradients_are_exact_where_that_is_asked_for_since() -> None:
    matmul, given = (
        torch.backends.cuda.matmul,
        [t.requires_grad_() for t in experts(9, 2, 16, 8, F32)],
    )
    up = rand(9, 2, 16)
    with emulated_gpu.serve() as emulated:
        for args in (given, [given[0], rand(2, 16, 16).requires_grad_(), given[0]]):
            matmul.fp32_precision = "tf32"
            out = scaled_einsum.target(*args, EXPERTS)
            matmul.fp32_precision = "ieee"
            leaves = list({id(t): t for t in args}.values())
            found = torch.autograd.grad(out, leaves, up)
            plain = torch.einsum("bi,bei->bei", args[0], torch.einsum("eij,bj->bei", *args[1:]))
            for a, b in zip(found, torch.autograd.grad(plain, leaves, up), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-5)
    assert emulated.launched == FORWARD * 2


def test_letters() -> None:
    """What kernels of rows and columns are not: batches of products, sums over one operand."""
    assert scaled_tiles.plan("bi", "eij", "bj", "bei") == (True, "b", "e", "i", "j")
    for terms in (
        ("bi", "beij", "bj", "bei"),  # a weight of each row
        ("bi", "eijk", "bj", "bei"),  # a sum over the weight alone
        ("bi", "eij", "bjk", "bei"),  # over the rows alone
        ("be", "eij", "bj", "bei"),  # the scale's columns before the others
        ("b", "eij", "bj", "bei"),
        ("bi", "ei", "b", "bei"),  # no sum
    ):
        assert scaled_tiles.plan(*terms) is None, terms
    assert not scaled_tiles.serves(2**31, 1, 16, 16)
    assert not scaled_tiles.serves(8, 2**26, 16, 16)
    assert scaled_tiles.serves(2**31 - 1, 4, 128, 128)


@pytest.mark.usefixtures("tf32")
def test_infinite_numbers_spoil_no_more_than_their_row() -> None:
    """Zeros behind the last column and term meet them, and would make NaN."""
    scale, weight, x = experts(20, 2, 20, 12, F32)
    x[3, 1] = float("inf")
    up = torch.ones(20, 2, 20)
    up[5, 1, 2] = float("inf")
    leaves = [t.requires_grad_() for t in (scale, weight.abs(), x)]
    with emulated_gpu.serve():
        out, ds, _, dx = run(leaves, EXPERTS, up)
    assert not out[3].isfinite().any() and not out[3].isnan().any()
    assert out[[k for k in range(20) if k != 3]].isfinite().all()
    assert [int(k) for k in (~ds.isfinite()).any(1).nonzero()] == [3, 5]
    assert [int(k) for k in (~dx.isfinite()).any(1).nonzero()] == [5]
    assert not dx.isnan().any()


@pytest.mark.usefixtures("tf32")
def test_results_do_not_depend_on_the_order_of_blocks() -> None:
    given = [t.requires_grad_() for t in experts(200, 2, 16, 16, F32)]
    runs = []
    for workers, seed in ((1, 0), (2, 7)):
        with emulated_gpu.serve(workers, seed):
            runs.append(run(given, EXPERTS, torch.ones(200, 2, 16)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
