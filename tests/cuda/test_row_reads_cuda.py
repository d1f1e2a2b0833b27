"""Reads of a row gradient on the emulated GPU: merged, made dense, normed, without waiting."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import emulated_gpu
import pytest
import torch

from recast.errors import IdError
from recast.runtime import checked, device
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.pieces import Piece, merge
from recast.runtime.rows.update import Update, apply
from recast.runtime.tolerances import excess

sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))
sys.path.insert(0, str(Path(__file__).parent.parent / "row_grad"))
from emulated_updates import BF16, CPU, F16, F32, F64, generator, grad_of, lookups, step, table
from tape import Tape


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("rows", [2**31, 2**32 - 2, 2**32, 2**40])
def test_rows_behind_all_that_32_bits_number(rows: int) -> None:
    ids = torch.tensor([rows - 1, 0, rows - 1, 5, rows // 2])
    grad = torch.arange(20.0).reshape(5, 4)
    found = merge([Piece(ids, grad, None, 1, None, False, 5, None)], (rows, 4), F32, CPU)
    assert found[0].tolist() == [0, rows // 2, rows - 1]
    assert torch.equal(found[1], torch.stack([grad[1], grad[4], grad[0] + grad[2]]))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_merging(dtype: torch.dtype) -> None:
    g = generator(9)
    pieces = lookups(g, 50, 20, dtype, dtype)
    ids, rows = merge(pieces, (50, 20), dtype, CPU)
    with device.use("torch"):
        plain_ids, plain = merge(pieces, (50, 20), dtype, CPU)
        _, truth = merge(pieces, (50, 20), F64, CPU)
    assert torch.equal(ids, plain_ids) and rows.dtype is dtype
    assert excess(rows, plain, truth, scale=float(truth.abs().max())) <= 1


@pytest.mark.usefixtures("emulated")
def test_the_dense_gradient_does_not_wait() -> None:
    _, updates = step()
    with Tape(()):
        dense = [u.grad.dense() for u in updates]
    for u, full in zip(updates, dense, strict=True):
        ids, rows = u.grad.merged()
        assert torch.equal(full, torch.zeros_like(full).index_copy(0, ids, rows))
        total = torch.ones_like(full)
        u.grad.add_to(total, -2.0)
        assert torch.allclose(total, 1 - 2 * full)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("factor", [0.3, math.inf, -math.inf, math.nan])
def test_the_dense_gradient_times_a_number_on_the_device(factor: float) -> None:
    """As torch's: infinity in rows that were looked up, but for their zeros; NaN in all others."""
    _, updates = step()
    for one in updates:
        plain = one.grad.dense()
        one.grad.rescale(torch.tensor(factor))
        with Tape(()):
            found = one.grad.dense()
        assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), (plain * factor).nan_to_num(7, 8, 9))


@pytest.mark.usefixtures("emulated")
def test_ids_outside_their_table() -> None:
    """Left out, as the lookup left them out and counted them; an error when checked or merged."""
    bad = torch.tensor([1, 7, 2, -1])
    pieces = [Piece(bad, torch.ones(4, 8), None, 1, None, False, None, None)]
    weight = torch.zeros(5, 8)
    row_cuda.update([Update("sgd", weight, grad_of(weight, pieces), (), -1.0)])
    assert weight[:, 0].tolist() == [0, 1, 1, 0, 0]
    with checked.checked(), pytest.raises(IdError, match="row 7 of a table of 5 rows"):
        row_cuda.update([Update("sgd", weight, grad_of(weight, pieces), (), -1.0)])
    with pytest.raises(IdError, match="row 7 of a table of 5 rows"):
        grad_of(weight, pieces).merged()
    ragged = replace(pieces[0], ids=torch.arange(4), offsets=torch.tensor([1, 2, 2, 2]))
    with pytest.raises(IdError, match="offsets that do not fit its ids"):
        grad_of(weight, [ragged]).merged()


# --- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_norms(order: float, dtype: torch.dtype, emulated: emulated_gpu.Emulated) -> None:
    g = generator(4)
    weights = [table(g, 30, 16, dtype), table(g, 4, 16, dtype), table(g, 3, 16, dtype)]
    grads = [grad_of(w, lookups(g, *w.shape, F32, dtype)) for w in weights]
    grads[2].zero_()
    grads[1].mul_(-3.0)
    found = torch._foreach_norm(grads, order)
    with device.use("torch"):
        dense = [grad.dense() for grad in grads]
    for norm, full in zip(found, dense, strict=True):
        plain = torch.linalg.vector_norm(full, order)
        truth = torch.linalg.vector_norm(full.double(), order)
        assert norm.dtype is dtype
        # The sums are fp32 here, and rounded to the table's dtype: as the dense gradient's are.
        assert excess(norm, plain, truth, scale=float(truth)) <= 1
    assert emulated.launched.count("linearise") == 1


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("times", [1, 200])  # in a row of one run, and of many
def test_what_is_not_finite_shows_in_the_norm(order: float, bad: float, times: int) -> None:
    rows = torch.ones(times + 9, 8)
    rows[times // 2, 5] = bad
    ids = torch.cat([torch.full((times,), 2), torch.arange(3, 12)])
    weight = torch.zeros(20, 8)
    grad = grad_of(weight, [Piece(ids, rows, None, 1, None, False, None, None)])
    norm = torch.linalg.vector_norm(grad, order)
    assert norm.isnan() if math.isnan(bad) else norm == math.inf
    scale = torch.tensor(0.5)
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, scale)
    assert found == 1 and grad.lazy


def test_a_sum_that_overflows_the_table_is_found() -> None:
    with emulated_gpu.serve():
        weight = torch.zeros(5, 8, dtype=F16)
        rows = torch.full((4, 8), 40000.0, dtype=F16)
        for ids, bad in ((torch.arange(4), 0.0), (torch.zeros(4, dtype=torch.int64), 1.0)):
            grad = grad_of(weight, [Piece(ids, rows, None, 1, None, False, None, None)])
            found = torch.zeros(())
            torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.ones(()))
            assert found == bad


def test_unscaling_clipping_and_updating_share_one_sort(emulated: emulated_gpu.Emulated) -> None:
    """And none of them waits for the device."""
    written, updates = step(dims=(8, 20, 8))
    expected, plain = step(dims=(8, 20, 8))
    parameters = []
    for u in updates:
        parameter = torch.nn.Parameter(u.weight)
        parameter.grad = u.grad
        parameters.append(parameter)
    found, inverse = torch.zeros(()), torch.tensor(0.25)
    with Tape(()), torch.no_grad():
        torch._amp_foreach_non_finite_check_and_unscale_([u.grad for u in updates], found, inverse)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        apply(updates)
    assert emulated.launched.count("linearise") == 1
    assert all(u.grad.lazy for u in updates) and found == 0
    full = torch.cat([u.grad.dense().flatten() for u in plain]) * 0.25
    assert torch.allclose(norm, torch.linalg.vector_norm(full))
    apply([u._replace(factor=0.25 * 0.5 / (float(norm) + 1e-6)) for u in plain])
    for a, b in zip(written, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_sort_is_made_again_when_a_gradient_changed(emulated: emulated_gpu.Emulated) -> None:
    g = generator(6)
    first, second = (
        grad_of(torch.empty(1000, 8), [Piece(ids, rows, None, 1, None, False, None, None)])
        for ids, rows in (  # of integers: squares add up exactly in any order
            (torch.arange(k), torch.randint(-9, 10, (k, 8), generator=g).float()) for k in (5, 6)
        )
    )
    before = torch._foreach_norm([first, second])
    norm = torch.linalg.vector_norm(second)
    assert emulated.launched.count("linearise") == 1
    first.add_(first.clone())
    assert torch.linalg.vector_norm(first) == 2 * before[0]
    assert emulated.launched.count("linearise") == 2 and not first.cell.merged
    assert torch.equal(norm, before[1])
    norm.zero_()  # nobody else's
    assert torch.linalg.vector_norm(second) == before[1]
    # The rows of another may be gone: what is left is sorted alone.
    first.zero_()
    assert torch.linalg.vector_norm(first, 1) == 0
    assert torch.linalg.vector_norm(second) == before[1]
