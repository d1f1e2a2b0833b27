"""Lookups and other tensors side by side in one matrix, as ``torch.cat`` along columns gives them.

On a GPU each lookup is written straight to its columns, in the dtype of the matrix; in backward,
the gradient of each lookup is a slice of the matrix's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from recast.errors import InputError
from recast.runtime import aligned

_NARROWED = (torch.float32, torch.float16, torch.bfloat16)  # what autocast casts


@dataclass(frozen=True, slots=True)
class Columns:
    """The places of all parts of a matrix. ``order``: for each part the number of its lookup, or
    -1 - i for the i-th other tensor; ``widths``: the columns of each part; ``dtype``: that of the
    matrix; ``aligned``: whether its rows are aligned to 16 bytes, with zeros behind them;
    ``stride``: of its rows, in elements.
    """

    order: tuple[int, ...]
    widths: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool
    stride: int

    @property
    def width(self) -> int:
        return sum(self.widths)

    def starts(self) -> dict[int, int]:
        """The first column of each part, by its number in ``order``."""
        found, at = {}, 0
        for part, width in zip(self.order, self.widths, strict=True):
            found[part] = at
            at += width
        return found

    def apart(self, lookups: int) -> list[int]:
        """The numbers of those of ``lookups`` lookups that have no place in the matrix."""
        return sorted(set(range(lookups)) - set(self.order))

    def rows(self, found: Sequence[int]) -> int:
        """The number of rows of the matrix; InputError unless all its parts have the same."""
        if len({*found}) != 1:
            raise InputError(f"parts of one matrix have {', '.join(map(str, found))} rows")
        return found[0]

    def empty(self, rows: int, where: torch.device) -> Tensor:
        """An uninitialised matrix, with zeros behind its rows if it is aligned."""
        if not self.aligned:
            return torch.empty((rows, self.width), dtype=self.dtype, device=where)
        return aligned.mark(aligned.empty(rows, self.width, self.dtype, where))

    def joined(self, outs: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        """The matrix, and after it the results of the lookups that have no place in it."""
        parts = [outs[k] if k >= 0 else others[-1 - k] for k in self.order]
        self.rows([part.shape[0] for part in parts])
        return [torch.cat(parts, 1).to(self.dtype), *(outs[k] for k in self.apart(len(outs)))]

    def split(
        self,
        grads: Sequence[Tensor | None],
        tables: Sequence[torch.dtype],
        others: Sequence[torch.dtype],
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of all lookups and of the other tensors, from those of :meth:`joined`.

        ``tables``: the dtype of the table of each lookup; ``others``: those of the other tensors.
        """
        of_lookups: list[Tensor | None] = [None] * len(tables)
        of_others: list[Tensor | None] = [None] * len(others)
        matrix, *rest = grads
        for k, grad in zip(self.apart(len(tables)), rest, strict=True):
            of_lookups[k] = grad
        if matrix is None:
            return of_lookups, of_others
        parts = torch.split_with_sizes(matrix, self.widths, 1)
        for place, part in zip(self.order, parts, strict=True):
            if place < 0:
                of_others[-1 - place] = part.to(others[-1 - place])
            elif tables[place] is torch.float32:  # whose gradient may be narrower
                of_lookups[place] = part
            else:
                of_lookups[place] = part.to(tables[place])
        return of_lookups, of_others


_made = lru_cache(maxsize=256)(Columns)


def columns_of(
    tables: Sequence[Tensor],
    others: Sequence[Tensor],
    order: Sequence[int],
    cast: torch.dtype | None,
    is_aligned: bool,
) -> Columns:
    """The Columns of lookups in ``tables`` (a table per lookup) and of ``others`` (B, any).

    ``cast``: autocast's dtype if every reader of the matrix casts to it; else None.
    Raises InputError if ``order`` is empty, or names a part twice or one that does not exist, or if
    a part is not two-dimensional.
    """
    given = {*range(-len(others), len(tables))}
    if len({*order}) != len(order) or not given.issuperset(order) or not len(order):
        raise InputError(
            f"order {[*order]} of {len(tables)} lookups and {len(others)} other tensors",
            why="each part is named once: lookup k by k, the i-th other tensor by -1 - i",
        )
    parts = [tables[k] if k >= 0 else others[-1 - k] for k in order]
    for t in parts:
        if t.dim() != 2:
            raise InputError(f"a part of the matrix has shape {tuple(t.shape)}, not (B, columns)")
    dtype = reduce(torch.promote_types, {t.dtype for t in parts})
    if cast is not None and dtype in _NARROWED:
        dtype = cast
    widths = tuple([t.shape[1] for t in parts])
    stride = aligned.stride(sum(widths), dtype) if is_aligned else sum(widths)
    return _made(tuple(order), widths, dtype, is_aligned, stride)
