"""Lots: the gradients of all tables of one call, kept together until somebody asks for one.

A step of a small batch is a matter of how much Python it runs: 26 tables that each make a piece,
its views and their own bookkeeping cost more than the update itself. Here the backward pass of a
call leaves one ``Lot``, each table a ``RowGrad`` whose cell says its number in it, and the kernels
step all of them from the lot. A ``Piece`` comes to be where one is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.rows.grad import Cell, RowGrad
from recast.runtime.rows.pieces import Piece, version_of

Like = Sequence[tuple[torch.Size, torch.dtype]]


class Lot:
    """The gradients of lookups with fixed bags, one for each table; nothing in it is written to.

    ids: (N,) of all lookups, lookup k's in [starts[k], starts[k + 1]); the lot's own.
    rows: (bags, lookups, D), or a list of (bags, D) with columns side by side.
    fixed, mean, padding: as of a ``Piece``, of each lookup; -1 is no padding.
    version: the version counter of ``rows`` when the lot was made, or of each; -1: not watched.
    """

    __slots__ = ("fixed", "ids", "mean", "padding", "rows", "starts", "version")

    def __init__(
        self, ids: Tensor, starts: list[int], fixed: list[int], rows: Tensor | list[Tensor],
        mean: tuple[bool, ...], padding: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.ids, self.starts, self.fixed, self.rows = ids, starts, fixed, rows
        self.mean, self.padding = mean, padding
        self.version: int | list[int] = (
            version_of(rows) if isinstance(rows, Tensor) else [version_of(r) for r in rows]
        )

    def piece(self, k: int) -> Piece:
        """The gradient of lookup ``k``."""
        ids = self.ids[self.starts[k] : self.starts[k + 1]]
        if isinstance(self.rows, Tensor):
            rows, version = self.rows.select(1, k), self.version
        else:
            rows, version = self.rows[k], self.version[k]  # type: ignore[index]
        padding = None if self.padding[k] < 0 else self.padding[k]
        assert isinstance(version, int)
        return Piece(ids, rows, None, self.fixed[k], None, self.mean[k], padding, None, version)


def lot_of(
    ids: Sequence[Tensor],
    rows: Tensor | Sequence[Tensor | None],
    mean: tuple[bool, ...],
    padding: tuple[int, ...],
) -> Lot | None:
    """The lot of lookups of ``ids``, (n,) or (bags, n) each, on the CPU; None where they are not.

    ``rows``: the upstream gradients as in a ``Lot``, or any others, which are not taken.
    """
    extension = device.extension()
    if extension is None:
        return None
    if isinstance(rows, Tensor):
        if type(rows) is not Tensor or rows.dim() != 3 or rows.stride(2) != 1 or not rows.is_cpu:
            return None
        taken: Tensor | list[Tensor] = rows
    else:
        taken = []
        for row in rows:
            if type(row) is not Tensor or row.dim() != 2 or not row.is_cpu:
                return None
            taken.append(row if row.stride(1) == 1 else row.contiguous())
    copied = extension.copied_ids(list(ids), _empty)
    if copied is None:
        return None
    flat, starts, fixed = copied
    return Lot(flat, starts, fixed, taken, mean, padding)


def _empty(count: int, wide: bool) -> Tensor:
    return torch.empty(count, dtype=torch.int64 if wide else torch.int32)


def grads_of(lot: Lot, like: Like) -> list[Tensor | None]:
    """A row gradient for each table, of its shape and dtype in ``like``."""
    found: list[Tensor | None] = grads().make(list(like), lot, _CPU)
    return found


@cache
def grads() -> Any:
    """Makes and places row gradients; the kernels must be there."""
    wrapper = Tensor._make_wrapper_subclass
    return device.extension().RowGrads(wrapper, RowGrad, Cell)


_CPU = torch.device("cpu")
