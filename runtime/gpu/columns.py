"""Writes the columns of a matrix that are not lookups, on a GPU: other tensors, and zeros."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime.embedding.columns import Columns
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.gpu.gpu import Gpu

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as RECAST_OUT
_BLOCK = 256
_ELEMENTS = 2048  # per block, about


class Parts(NamedTuple):
    """Other tensors as ``csrc/cuda/join_columns.cu`` reads them."""

    words: array[int]
    number: int
    columns: int
    held: list[Tensor]  # what must live until the launch


def parts_of(columns: Columns, others: Sequence[Tensor]) -> Parts:
    """All of ``others`` that have a place in ``columns``, and the zeros behind its rows."""
    words, held, first, at = array("q"), [], 0, 0
    for part, width in zip(columns.order, columns.widths, strict=True):
        if part < 0 and width:
            other = others[-1 - part]
            other = other if other.dtype in CODES else other.to(columns.dtype)
            held.append(other)
            words.extend((other.data_ptr(), *other.stride(), CODES[other.dtype], first, at))
            first += width
        at += width
    if columns.stride != at:
        words.extend((0, 0, 0, 0, first, at))
        first += columns.stride - at
    return Parts(words, len(words) // 6, first, held)


@lru_cache(maxsize=8)
def _kernel(out: int) -> Kernel:
    defines = {"RECAST_OUT": out, "RECAST_BLOCK": _BLOCK}
    return Kernel(nvrtc.program("join_columns.cu", defines=defines), "join_columns")


def write(on: Gpu, parts: Parts, at: int, columns: Columns, matrix: Tensor) -> None:
    """Launch the copy. ``at``: the device address of the words of ``parts``."""
    rows = len(matrix)
    if not parts.columns or not rows:
        return
    each = max(1, _ELEMENTS // parts.columns)
    on.launch(
        _kernel(CODES[columns.dtype]), (-(-rows // each), 1, 1), (_BLOCK, 1, 1), 0,
        (
            c_void_p(at), c_int32(parts.number), c_int32(parts.columns), c_int64(rows),
            c_int32(each), c_void_p(matrix.data_ptr()), c_int64(columns.stride),
        ),
    )  # fmt: skip
