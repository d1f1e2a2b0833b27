"""The C++ kernel of row gradients (``csrc/row_update.cpp``), and when it can be used.

It takes fp32 tables on the CPU; everything else has the same formulas in torch (``row_pieces``,
``row_update``). All tables of a step go through one call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recast.errors import IdError
from recast.runtime import device

if TYPE_CHECKING:
    from recast.runtime.row_pieces import Piece
    from recast.runtime.row_update import Update

_ID_DTYPES = (torch.int64, torch.int32)
_MOST = 2**32 - 2  # rows and gradients are numbered by 32 bits, and one number says "none"


def merge(
    pieces: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """(U,) sorted unique int64 ids and (U, D) summed rows; None where the kernel cannot be used."""
    if not takes(pieces, shape, dtype):
        return None
    plan = _Plan([(pieces, shape)])
    (n,) = plan.sorted.counts()
    ids = torch.empty(n, dtype=torch.int64)
    rows = torch.empty(n, shape[1])
    plan.run("store", [rows.data_ptr(), shape[1], 0, 0, ids.data_ptr()], [1.0, 0.0, 0.0])
    return ids, rows


def update(updates: Sequence[Update]) -> list[Update]:
    """Update in place the tables that the kernel takes, in one call; return the others."""
    taken: list[Update] = []
    left: list[Update] = []
    for one in updates:
        fits = _is_plain(one.weight) and (one.state is None or _is_plain(one.state))
        fits = fits and takes(one.grad.cell.pieces, one.grad.shape, one.weight.dtype)
        (taken if fits else left).append(one)
    # SGD and Adagrad do not meet in one optimizer, so these are one group in practice.
    for action, group in (
        ("sgd", [one for one in taken if one.state is None]),
        ("adagrad", [one for one in taken if one.state is not None]),
    ):
        if group:
            _update(action, group)
    return left


def takes(pieces: Iterable[Piece], shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the kernel can sum these pieces of a gradient of ``shape`` (rows, D)."""
    if dtype is not torch.float32 or shape[0] > _MOST or device.extension() is None:
        return False
    entries = 0
    for piece in pieces:
        rows, scale = piece.rows, piece.scale
        if rows.dtype is not torch.float32 or not rows.is_cpu:
            return False
        if piece.weights is not None and piece.weights.dtype is not torch.float32:
            return False
        if isinstance(scale, Tensor) and not scale.is_cpu:
            return False
        entries += piece.ids.numel()
    return entries <= _MOST


def _is_plain(tensor: Tensor) -> bool:
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.dim() != 2:
        return False
    return tensor.layout is torch.strided and (tensor.stride(1) == 1 or tensor.shape[1] == 1)


def _update(action: str, updates: Sequence[Update]) -> None:
    plan = _Plan([(one.grad.cell.pieces, one.grad.shape) for one in updates])
    places: list[int] = []
    numbers: list[float] = []
    written: list[Tensor] = []
    for one in updates:
        weight, state, scale = one.weight, one.state, one.grad.cell.scale
        places += (weight.data_ptr(), weight.stride(0))
        places += (0, 0, 0) if state is None else (state.data_ptr(), state.stride(0), 0)
        numbers += (one.factor if scale is None else one.factor * float(scale), one.lr, one.eps)
        written.append(weight)
        if state is not None:
            written.append(state)
    plan.run(action, places, numbers)
    # As any operation in place: a graph that saved the table must refuse to go on.
    torch.autograd.graph.increment_version(written)


class _Plan:
    """The sorted gradients of tables: (pieces, shape) each."""

    def __init__(self, tables: Sequence[tuple[Sequence[Piece], Sequence[int]]]) -> None:
        self._extension = device.extension()
        self._kept: list[Tensor] = []  # what the addresses point to
        sizes: list[int] = []
        fields: list[int] = []
        factors: list[float] = []
        for pieces, shape in tables:
            sizes += (shape[0], shape[1], len(pieces))
            for piece in pieces:
                fields += self._fields(piece)
                factors.append(1.0 if piece.scale is None else float(piece.scale))
        try:
            self.sorted = self._extension.RowPlan(
                array("q", sizes), array("q", fields), array("f", factors), device.threads()
            )
        except IndexError as error:
            table, bad = map(int, str(error).split())
            raise id_error(bad, tables[table][1][0]) from None

    def run(self, action: str, places: list[int], numbers: list[float]) -> None:
        """Five places and three numbers for each table: see ``Target`` in row_update.h."""
        action = getattr(self._extension.RowAction, action)
        self.sorted.run(action, array("q", places), array("f", numbers))

    def _fields(self, piece: Piece) -> tuple[int, ...]:
        ids, rows, offsets, weights = piece.ids, piece.rows, piece.offsets, piece.weights
        if ids.dtype not in _ID_DTYPES or not ids.is_contiguous():
            ids = self._keep(ids.long().contiguous())
        if rows.stride(1) != 1 and rows.shape[1] != 1:
            rows = self._keep(rows.contiguous())
        if offsets is not None and (offsets.dtype not in _ID_DTYPES or not offsets.is_contiguous()):
            offsets = self._keep(offsets.long().contiguous())
        if weights is not None and not weights.is_contiguous():
            weights = self._keep(weights.contiguous())
        return (
            ids.data_ptr(),
            0 if offsets is None else offsets.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            rows.data_ptr(),
            rows.stride(0),
            ids.numel(),
            rows.shape[0],
            0 if offsets is None else offsets.numel(),
            piece.fixed,
            -1 if piece.padding_idx is None else piece.padding_idx,
            ids.dtype is torch.int64,
            offsets is not None and offsets.dtype is torch.int64,
            piece.mean,
        )

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor


def id_error(bad: int, rows: int) -> IdError:
    return IdError(
        f"a gradient for row {bad} of a table of {rows} rows",
        why="the ids of a lookup were changed between its forward and its backward pass",
        tries=("do not write into the ids of a batch before backward() returned",),
    )
