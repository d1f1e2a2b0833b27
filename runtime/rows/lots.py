"""Lots: the gradients of all tables of one call, kept together until one of them is asked for.

The time of a step on a small batch depends on how much Python it runs: for 26 tables, making a
piece each, with its views and bookkeeping, costs more than the update itself. So the backward pass
of a call leaves one ``Lot``, each table gets a ``RowGrad`` whose cell holds its index in the lot,
and the kernels step all of them from the lot. A ``Piece`` is made only when one is asked for.
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
    """The gradients of lookups with fixed bags, one per table; nothing in it is ever written to.

    ids: (N,) of all lookups, those of lookup k in [starts[k], starts[k + 1]); the lot's own copy.
    rows: (bags, lookups, D), or a list of (bags, D), whose rows are contiguous.
    fixed, mean, padding: as in a ``Piece``, for each lookup; padding -1: none.
    version: the version counter of ``rows`` (or of each) when the lot was made; -1: not watched.
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
            if version_of(self.rows) == version:  # below autograd a view has a counter of its own
                version = version_of(rows)
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
    """The lot for lookups of ``ids``, (n,) or (bags, n) each; None unless all are on the CPU.

    ``rows``: the upstream gradients, as in a ``Lot``; None for anything else.
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
    """A row gradient for each table, with its shape and dtype in ``like``."""
    found: list[Tensor | None] = grads().make(list(like), lot, _CPU)
    return found


@cache
def grads() -> Any:
    """The C++ object that makes row gradients and assigns them; needs the CPU kernels."""
    wrapper = Tensor._make_wrapper_subclass
    return device.extension().RowGrads(wrapper, RowGrad, Cell)


_CPU = torch.device("cpu")
