"""A dense gradient that the update kernel makes from rows equals one made from merged rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recast.errors import IdError, UsageError
from recast.runtime import device
from recast.runtime.rows import kernel
from recast.runtime.rows.grad import RowGrad, row_grad
from recast.runtime.rows.pieces import Piece

ROWS, DIM = 9, 5


def pieces(dtype: torch.dtype = torch.float32) -> list[Piece]:
    """Duplicates, padding, bags of all sizes, weights, a factor, rows of another stride."""
    g = torch.Generator().manual_seed(3)
    ids = torch.tensor([4, 4, 0, 8, 2, 4])
    rows = torch.randn(6, 2 * DIM, generator=g).to(dtype)[:, :DIM]
    starts = torch.tensor([0, 2, 2, 5])
    weights = torch.rand(6, generator=g)
    return [
        Piece(ids, rows, None, 1, None, False, 0, None),
        Piece(ids.int(), rows[:4], starts, 1, weights, False, None, 0.5),
        Piece(ids, rows[:3], None, 2, None, True, 2, None),
    ]


def grad_of(some: list[Piece], scale: float | None = None) -> RowGrad:
    made = row_grad((ROWS, DIM), torch.float32, torch.device("cpu"), some)
    made.cell.scale = scale
    return made


def merged(some: list[Piece], scale: float | None = None) -> Tensor:
    """By the unique ids and their rows, in float64."""
    ids, rows = grad_of(some, scale).scaled()
    return torch.zeros(ROWS, DIM, dtype=torch.float64).index_copy(0, ids, rows.double())


@pytest.mark.parametrize("scale", [None, -2.5])
@pytest.mark.parametrize("chosen", [[0], [1], [2], [0, 1, 2], []])
def test_dense_is_what_merged_rows_give(chosen: list[int], scale: float | None) -> None:
    some = [pieces()[k] for k in chosen]
    got = grad_of(some, scale).dense()
    torch.testing.assert_close(got.double(), merged(some, scale), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.0, -0.25])
def test_rows_are_added_to_a_dense_gradient_of_any_rows(alpha: float) -> None:
    whole = torch.randn(ROWS, 2 * DIM)
    before = whole.clone()
    part, version = whole[:, DIM:], whole._version
    grad_of(pieces(), 3.0).add_to(part, alpha)
    want = before[:, DIM:].double() + alpha * merged(pieces(), 3.0)
    torch.testing.assert_close(part.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[:, :DIM], before[:, :DIM]) and whole._version > version


def test_the_kernel_does_it_where_there_is_one() -> None:
    done = kernel.add(grad_of(pieces(), 3.0), torch.zeros(ROWS, DIM))
    assert done is (device.extension() is not None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    dense = torch.zeros(ROWS, DIM, dtype=dtype)
    assert not kernel.add(grad_of(pieces()), dense)
    grad_of(pieces()).add_to(dense)
    torch.testing.assert_close(dense.double(), merged(pieces()), rtol=1e-2, atol=5e-2)


def test_a_dense_gradient_on_top_makes_rows_dense() -> None:
    rows, dense = grad_of(pieces()), torch.randn(ROWS, DIM)
    alias = rows.detach()
    rows.add_(dense, alpha=0.5)
    want = merged(pieces()) + 0.5 * dense.double()
    assert not rows.lazy and not alias.lazy  # type: ignore[attr-defined]
    torch.testing.assert_close((alias + 0.0).double(), want, rtol=1e-5, atol=1e-5)


def test_what_was_written_over_is_an_error_and_so_is_a_bad_id() -> None:
    own = torch.randn(6, DIM)
    kept = grad_of([Piece(pieces()[0].ids, own, None, 1, None, False, None, None)])
    own.mul_(2.0)
    with pytest.raises(UsageError, match="overwritten"):
        kept.dense()
    bad = Piece(torch.tensor([0, ROWS]), torch.randn(2, DIM), None, 1, None, False, None, None)
    with pytest.raises(IdError, match=f"row {ROWS} of a table of {ROWS} rows"):
        grad_of([bad]).dense()
