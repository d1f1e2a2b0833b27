"""``embedding_cat`` as a GPU runs it, on the emulator: places, dtypes, what no longer happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import cublaslt_stand_in
import emulated_gpu
import pytest
import torch
from emulated_gpu import Emulated
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from recast.errors import InputError
from recast.runtime import OPS, aligned, device
from recast.runtime.tolerances import excess

CAT, BAGS, MLP = OPS["embedding_cat"], OPS["embedding_bags"], OPS["mlp"]

pytestmark = pytest.mark.skipif(
    device.extension() is None, reason=f"the extension: {device.why_missing()}"
)


@pytest.fixture
def machine() -> Iterator[Emulated]:
    with cublaslt_stand_in.serve(), emulated_gpu.serve() as gpu:
        yield gpu


def arguments(
    lookups: int = 3,
    dim: int = 8,
    beside: int = 5,
    rows: int = 9,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Any], list[Any]]:
    """Of embedding_bags; and what comes behind for embedding_cat."""
    g = torch.Generator().manual_seed(lookups)
    weights = [torch.randn(20, dim, generator=g).to(dtype) for _ in range(lookups)]
    ids = [torch.randint(0, 20, (rows, 2), generator=g) for _ in range(lookups)]
    none, off = [None] * lookups, [False] * lookups
    others = [torch.randn(rows, beside, generator=g)]
    first = [weights, ids, none, none, [*range(lookups)], ["sum"] * lookups, none, off, off]
    return first, [others, [*range(lookups), -1]]


def test_where_everything_lies(machine: Emulated) -> None:
    first, rest = arguments()
    (out,) = CAT.target(*first, *rest, False, True)
    assert machine.launched == ["embedding_samples"]
    assert out.shape == (9, 29) and out.stride() == (32, 1) and aligned.is_marked(out)
    assert not aligned.whole(out)[:, 29:].any()
    rows = BAGS.target(*first)
    for k in range(3):
        assert torch.equal(out[:, 8 * k : 8 * k + 8], rows[k])
    assert torch.equal(out[:, 24:], rest[0][0])
    (plain,) = CAT.target(*first, *rest)
    assert plain.is_contiguous() and torch.equal(plain, out) and not aligned.is_marked(plain)


def test_rows_start_at_sectors(machine: Emulated) -> None:
    """Of 322 columns, those of 324 would not. Padding may change between calls of one model."""
    first, rest = arguments(40)
    rest[0] = [torch.randn(9, 2, generator=torch.Generator().manual_seed(1))]
    wanted = CAT.reference(*first, *rest)[0]
    for padding, stride in ((nullcontext, 328), (aligned.least_padding, 324), (nullcontext, 328)):
        with padding():
            (out,) = CAT.target(*first, *rest, False, True)
            assert out.shape == (9, 322) and out.stride() == (stride, 1) and aligned.is_marked(out)
            assert torch.equal(out, wanted) and not aligned.whole(out)[:, 322:].any()
        assert set(machine.launched) == {"embedding_samples"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(machine: Emulated, dtype: torch.dtype) -> None:
    """Rounded once, other tensors too; float64 is left as it is; without ``narrow`` all is."""
    first, rest = arguments()
    with torch.autocast("cpu", dtype):
        (out,) = CAT.target(*first, *rest, True, True)
        (wide,) = CAT.target(*first, *rest, False, True)
        (far,) = CAT.target(*first, [rest[0][0].double()], rest[1], True, True)
    assert (out.dtype, wide.dtype, far.dtype) == (dtype, torch.float32, torch.float64)
    assert out.stride() == (32, 1)
    assert torch.equal(out, wide.to(dtype)) and torch.equal(far, wide.double())


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_tensors_of_any_kind(machine: Emulated, dtype: torch.dtype, lookups: int) -> None:
    """One launch for all, that of several lookups if there are: strided, narrow, of integers, of no
    column, many; zeros behind."""
    g = torch.Generator().manual_seed(3)
    for rows in (1, 2, 700):
        first, _ = arguments(lookups, 3, rows=rows, dtype=dtype)
        x = torch.randn(rows, 40, generator=g).to(dtype)
        others = [
            x[:, 3:4], x[:, 5:30:2], torch.randn(7, rows, generator=g).t().half(), x[:, :0],
            torch.randint(9, (rows, 2), generator=g), x[:1].expand(rows, 40), *x.split(1, 1),
        ]  # fmt: skip
        order = [-1, *range(1, lookups), *(-1 - k for k in range(1, len(others))), 0]
        machine.launched.clear()
        (out,) = CAT.target(*first, others, order, False, True)
        alone = ["join_columns", "embedding_forward"]
        assert machine.launched == (["embedding_samples"] if lookups > 1 else alone)
        wanted = CAT.reference(*first, others, order)[0]
        assert out.dtype == wanted.dtype and not aligned.whole(out)[:, wanted.shape[1] :].any()
        torch.testing.assert_close(out, wanted, rtol=0.01, atol=0.01)


def test_tables_of_other_dtypes(machine: Emulated) -> None:
    """The matrix has the dtype of torch's cat; gradients that of each table."""
    first, rest = arguments(dtype=torch.bfloat16)
    weights = [w.requires_grad_() for w in first[0]]
    weights[1] = first[0][1] = torch.randn(20, 8).requires_grad_()
    (out,) = CAT.target(*first, *rest)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, CAT.reference(*first, *rest)[0], rtol=0.01, atol=0.01)
    upstream = torch.randn(out.shape)
    got = torch.autograd.grad(out, weights, upstream)
    wanted = torch.autograd.grad(CAT.reference(*first, *rest)[0], weights, upstream)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close((a + 0), b, rtol=0.02, atol=0.02)


class Net:
    """Lookups and numbers into a chain of layers, under autocast."""

    def __init__(self, lookups: int, joined: bool = True) -> None:
        g = torch.Generator().manual_seed(7)
        self.first, self.rest = arguments(lookups)
        width = 8 * lookups + 5
        self.params = [torch.randn(6, width, generator=g) / width**0.5, torch.randn(6, generator=g)]
        self.leaves = [*self.first[0], *self.rest[0], *self.params]
        self.joined = joined

    def __call__(self, dtype: torch.dtype | None = torch.bfloat16) -> list[Tensor]:
        """The output and all gradients."""
        for t in self.leaves:
            t.requires_grad_().grad = None
        flags = (True, True) if self.joined else ()
        call = CAT.target if self.joined else CAT.reference
        chain = MLP.target if self.joined else MLP.reference
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            (x,) = call(*self.first, *self.rest, *flags)
            out = chain(x, self.params, [], ["linear", "relu"], [], [])
        out.backward(
            torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(out.dtype)
        )
        return [out.detach(), *(t.grad for t in self.leaves)]


def test_a_training_step_against_float64(machine: Emulated) -> None:
    for lookups in (1, 4):
        ours, plain, truth = Net(lookups), Net(lookups, False), Net(lookups, False)
        truth.first[0] = [w.double() for w in truth.first[0]]
        truth.rest[0] = [t.double() for t in truth.rest[0]]
        truth.params = [t.double() for t in truth.params]
        truth.leaves = [*truth.first[0], *truth.rest[0], *truth.params]
        for dtype in (None, torch.bfloat16, torch.float16):
            of = dtype or torch.float32
            results = zip(ours(dtype), plain(dtype), truth(None), strict=True)
            every = [(a + 0, b, c) for a, b, c in results]
            scale = max(float(c.abs().max()) for _, _, c in every)
            for a, b, c in every:
                assert a.dtype == b.dtype
                # Of the precision of the products, whatever the dtype of the result.
                assert excess(a.to(of), b.to(of), c, scale=scale) <= 1


def test_nothing_is_done_once_a_lookup(machine: Emulated) -> None:
    """Of casts, copies, cats and sums there are as many for 12 lookups as for 3."""
    counts = []
    for lookups in (3, 12):
        net = Net(lookups)
        net()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            net()
        found = Counter({e.key: e.count for e in seen.key_averages() if e.key.startswith("aten")})
        names = ("_to_copy", "copy_", "cat", "clone", "contiguous", "mm", "addmm", "zero_", "sum")
        counts.append([found[f"aten::{name}"] for name in names])
    assert counts[0] == counts[1]


def test_the_gradient_of_the_matrix_is_read_where_it_is(machine: Emulated) -> None:
    net = Net(4)
    grads = net()[1:5]
    pieces = [grad.cell.pieces[0].rows for grad in grads]  # type: ignore[attr-defined]
    assert {p.dtype for p in pieces} == {torch.bfloat16} and {p.stride() for p in pieces} == {
        (40, 1)
    }
    assert len({p.untyped_storage().data_ptr() for p in pieces}) == 1


@pytest.mark.parametrize("place", ["kernels", "torch"])
def test_bad_input(machine: Emulated, place: str) -> None:
    first, (others, order) = arguments()
    if place == "torch":
        first[0] = [w.double() for w in first[0]]  # of which no kernel knows
    with pytest.raises(InputError, match="each part is named once"):
        CAT.target(*first, others, [0, 0, 1])
    with pytest.raises(InputError, match="each part is named once"):
        CAT.target(*first, others, [0, -2])
    with pytest.raises(InputError, match=r"has shape \(9,\), not"):
        CAT.target(*first, [others[0][:, 0]], order)
    with pytest.raises(InputError, match="have 9, 9, 9, 8 rows"):
        CAT.target(*first, [others[0][:8]], order)
    first[5] = ["none"] * 3
    with pytest.raises(InputError, match="gives other than one row a sample"):
        CAT.target(*first, others, order)
