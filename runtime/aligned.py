"""Matrices whose rows start at whole 16 bytes, whatever their width.

Matrix products read rows that do not start so by kernels that take up to four times as long. A
matrix (n, width) can lie in one (n, stride) whose last columns are zeros: they add nothing to a sum
over columns, and the product reads all of them. Who made the zeros says so (:func:`mark`), since
nobody can see what stands behind the rows of a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

BYTES = 16
_MARK = "_recast_zeros_behind"


def stride(width: int, dtype: torch.dtype) -> int:
    """The least number of elements from row to row, of rows of ``width``."""
    step = max(1, BYTES // dtype.itemsize)
    return -(-width // step) * step


def fits(width: int, dtype: torch.dtype) -> bool:
    """Whether contiguous rows of ``width`` start at whole 16 bytes by themselves."""
    return stride(width, dtype) == width


def empty(rows: int, width: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    """(rows, width) in a matrix of such rows; the maker has to write all of it, and :func:`mark`.

    It is no view of the whole: it has a version counter of its own.
    """
    by = stride(width, dtype)
    whole = torch.empty((rows, by), dtype=dtype, device=where)
    return whole if by == width else torch.unsafe_split_with_sizes(whole, (width, by - width), 1)[0]


def mark(matrix: Tensor) -> Tensor:
    """Say of a result of :func:`empty` that zeros stand behind its rows."""
    setattr(matrix, _MARK, True)
    return matrix


def is_marked(matrix: Tensor) -> bool:
    """Whether zeros stand behind the rows of ``matrix``, as its maker says."""
    if not getattr(matrix, _MARK, False):
        return False
    return matrix.dim() == 2 and matrix.stride(0) == stride(matrix.shape[1], matrix.dtype)


def whole(matrix: Tensor) -> Tensor:
    """The matrix with the zeros behind its rows, of one that is marked. A view."""
    rows, width = matrix.shape
    return matrix.as_strided((rows, stride(width, matrix.dtype)), matrix.stride())
