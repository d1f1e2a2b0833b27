"""Dot interactions that look up rows themselves, on the emulator, against plain torch."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
from torch import Tensor

from recast.runtime.interactions import gathered_cuda
from recast.runtime.interactions.gathered_dots import gathered_dots, parts_of
from recast.runtime.rows.grad import RowGrad
from recast.runtime.tolerances import excess

F32, BF16 = torch.float32, torch.bfloat16


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(dtype: torch.dtype, given: torch.dtype, narrow: bool = False) -> list:
    """Two tables, one looked up twice; bags of one id and of several, one empty; a dense part."""
    g = torch.Generator().manual_seed(5)
    weights = [rand(20, 8, seed=1).to(dtype), rand(3, 8, seed=2).to(dtype)]
    cuts = torch.tensor([0, 1, 1, 4, 5, 6])
    ids = [torch.randint(20, (6,), generator=g), torch.randint(3, (9,), generator=g),
           torch.randint(20, (6, 2), generator=g).int()]  # fmt: skip
    x = rand(6, 8, seed=3).to(given)
    li, lj = torch.tril_indices(4, 4, -1)
    lookups = [weights, ids, [None, cuts, None], [0, 1, 0], ["none", "mean", "sum"],
               [None, None, 4], [False] * 3, narrow]  # fmt: skip
    return [*lookups, [x], [-1, 2, 0, 1], x, li, lj, 1]


def leaves(args: list) -> list[Tensor]:
    return [t.requires_grad_() for t in (*args[0], *args[8])]


def dense(grads: tuple[Tensor, ...]) -> list[Tensor]:
    return [g + 0 for g in grads]


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.long)])
def test_forward_and_backward(dtype: torch.dtype) -> None:
    """One launch each way; row gradients of rows that the kernel wrote."""
    args = arguments(dtype, dtype)
    wanted = leaves(args)
    with emulated_gpu.serve() as emulated:
        out = gathered_dots.target(*args)
        upstream = rand(*out.shape, seed=9).to(out.dtype)
        grads = torch.autograd.grad(out, wanted, upstream)
        assert emulated.launched == ["dot_forward", "dot_backward"]
        assert all(isinstance(g, RowGrad) and g.lazy for g in grads[:2])
        ours = [out, *dense(grads)]
    plain = gathered_dots.reference(*args)
    usual = [plain, *dense(torch.autograd.grad(plain, wanted, upstream))]
    wide = [t.detach().double().requires_grad_() for t in wanted]
    doubles = [wide[:2], *args[1:8], wide[2:], args[9], wide[2], *args[11:]]
    truth = gathered_dots.reference(*doubles)
    exact = [truth, *torch.autograd.grad(truth, wide, upstream.double())]
    for a, b, c in zip(ours, usual, exact, strict=True):
        assert a.dtype == b.dtype and excess(a, b, c) <= 1


@pytest.mark.parametrize("narrow", [True, pytest.param(False, marks=pytest.mark.long)])
def test_under_autocast(narrow: bool) -> None:
    """The same bits as lookups that are written, then multiplied; which is what is done where rows
    looked up and given differ in dtype.
    """
    args = arguments(F32, BF16, narrow)
    wanted = leaves(args)
    found = []
    with emulated_gpu.serve() as emulated, torch.autocast("cpu", BF16):
        for way in ("gathered", "apart"):
            if way == "gathered":
                out = gathered_dots.target(*args)
            else:
                parts = parts_of(*args)
                rows = torch.ops.recast.embedding_bags(*parts.lookup)
                out = torch.ops.recast.dot_interaction(*parts.interact(rows))
            upstream = rand(*out.shape, seed=9).to(out.dtype)
            found.append([out, *dense(torch.autograd.grad(out, wanted, upstream))])
            if way == "gathered":
                assert ("embedding_forward" in emulated.launched) is not narrow
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_rows_at_whole_16_bytes() -> None:
    """15 columns, with a zero behind each row, which the next layer takes in; the same numbers."""
    args, found = arguments(F32, F32), []
    wanted = leaves(args)
    with emulated_gpu.serve():
        for aligned in (False, True):
            out = gathered_dots.target(*args, aligned)
            assert out.stride() == (15 + aligned, 1)
            upstream = rand(*out.shape, seed=9)
            found.append([out, *dense(torch.autograd.grad(out, wanted, upstream))])
        assert not out.detach().as_strided((6,), (16,), 15).any()
        with torch.no_grad():
            assert torch.equal(gathered_dots.target(*args, True), out)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_what_the_kernels_do_not_take() -> None:
    args = arguments(F32, F32)
    takes = [parts_of(*args).call(None)]
    args[4] = ["none", "max", "sum"]
    takes.append(parts_of(*args).call(None))
    args[4], args[0] = ["none", "mean", "sum"], [args[0][0], rand(3, 8).double()]
    takes.append(parts_of(*args).call(None))
    assert [gathered_cuda.takes(call) for call in takes] == [True, False, False]


def test_a_table_written_before_backward_is_refused() -> None:
    """It is read again there."""
    args = arguments(F32, F32)
    wanted = leaves(args)
    with emulated_gpu.serve():
        out = gathered_dots.target(*args)
        with torch.no_grad():
            args[0][1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), wanted)


def test_a_table_without_rows_is_left_to_the_lookups() -> None:
    """The kernel knows a looked-up row by its table's address, and there is none."""
    args = arguments(F32, F32)
    args[0] = [args[0][0].detach(), torch.empty(0, 8)]
    args[1] = [args[1][0], args[1][1][:0], args[1][2]]
    args[2] = [None, torch.zeros(6, dtype=torch.int64), None]
    with emulated_gpu.serve() as emulated:
        out = gathered_dots.target(*args)
    usual = gathered_dots.reference(*args)
    assert "embedding_forward" in emulated.launched
    assert excess(out, usual, usual.double()) <= 1
