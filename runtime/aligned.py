"""Matrices whose rows start at multiples of 16 bytes or more, whatever their width.

For other rows, matrix products use kernels that take up to four times as long. So a matrix (n,
width) can be a slice of one (n, stride) whose last columns are zeros: they add nothing to a sum
over columns, and the product reads all of them. Whoever writes the zeros has to say so
(:func:`mark`), since a slice does not show what lies behind its rows.

A GPU moves memory in sectors of 32 bytes and lines of 128. Of a float32 matrix whose rows start at
odd multiples of 16 bytes, a segment of 64 bytes lies in 2.5 sectors on average, one of 128 in 4.5
sectors and two lines. So rows that are padded at all start at sectors, or lines, where that adds
hardly anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

BYTES = 16
_LINE, _SECTOR = 128, 32  # bytes
# Where padding to 16 bytes gives n bytes, a line may add n / 256 more, and a sector n / 64.
_WIDER = ((_LINE, 256), (_SECTOR, 64))
_MARK = "_recast_zeros_behind"
_wider = True


@contextlib.contextmanager
def least_padding() -> Iterator[None]:
    """Inside, rows are padded to 16 bytes and no further; used to measure what sectors and lines
    gain. Steps that are recorded inside stay as they are.
    """
    global _wider
    before, _wider = _wider, False
    try:
        yield
    finally:
        _wider = before


def stride(width: int, dtype: torch.dtype) -> int:
    """The distance between aligned rows of ``width``, in elements."""
    return _stride(width, dtype.itemsize, _wider)


@lru_cache(maxsize=1024)
def _stride(width: int, size: int, wider: bool) -> int:
    least = _up(width, max(1, BYTES // size))
    if wider and least != width:
        for to, share in _WIDER:
            found = _up(width, to // size)
            if (found - least) * share <= least:
                return found
    return least


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


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
