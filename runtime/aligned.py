"""Matrices whose rows start at multiples of 16 bytes, whatever their width.

For other rows, matrix products use kernels that take up to four times as long. So a matrix (n,
width) can be a slice of one (n, stride) whose last columns are zeros: they add nothing to a sum
over columns, and the product reads all of them. Whoever writes the zeros has to say so
(:func:`mark`), since a slice does not show what lies behind its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

BYTES = 16
_MARK = "_recast_zeros_behind"


def stride(width: int, dtype: torch.dtype) -> int:
    """The smallest aligned distance between rows of ``width``, in elements."""
    step = max(1, BYTES // dtype.itemsize)
    return -(-width // step) * step


def fits(width: int, dtype: torch.dtype) -> bool:
    """Whether contiguous rows of ``width`` are aligned anyway."""
    return stride(width, dtype) == width


def empty(rows: int, width: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    """An uninitialised (rows, width) matrix with aligned rows; the caller has to write all of it,
    the zeros too, and then call :func:`mark`.

    It is not a view of the whole: it has a version counter of its own.
    """
    by = stride(width, dtype)
    whole = torch.empty((rows, by), dtype=dtype, device=where)
    return whole if by == width else torch.unsafe_split_with_sizes(whole, (width, by - width), 1)[0]


def mark(matrix: Tensor) -> Tensor:
    """Declare that zeros follow the rows of a result of :func:`empty`."""
    setattr(matrix, _MARK, True)
    return matrix


def is_marked(matrix: Tensor) -> bool:
    """Whether ``matrix`` was declared to have zeros behind its rows."""
    if not getattr(matrix, _MARK, False):
        return False
    return matrix.dim() == 2 and matrix.stride(0) == stride(matrix.shape[1], matrix.dtype)


def whole(matrix: Tensor) -> Tensor:
    """A marked matrix together with the zeros behind its rows, as a view."""
    rows, width = matrix.shape
    return matrix.as_strided((rows, stride(width, matrix.dtype)), matrix.stride())
