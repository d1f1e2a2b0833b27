"""Row gradients in the memory of a recording, given out at every replay.

They are aliases: who holds one still can be given memory of its own, while the recording keeps what
its replays write to. Where nobody does, as where gradients are set to None, the very same objects
are given out again: making those of 55 tables takes 0.2 ms.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.grad import Cell, RowGrad
from recast.runtime.rows.pieces import Piece

_Scale = tuple[int, float | None]  # the number of its tensor, or -1 and the factor
_Form = tuple[int, int, int, int, int, bool, int | None, _Scale, int]


class Given(NamedTuple):
    """What was given out last, and how often each was referred to when nobody else had it."""

    grads: dict[int, RowGrad]  # by their places
    cells: list[Cell]
    pieces: list[list[Piece]]  # of the cells
    aliases: list[Tensor]
    alone: list[int]

    def counts(self) -> list[int]:
        """References now, the same way at each call."""
        count = sys.getrefcount
        found = [count(t) for t in self.aliases]
        found += [count(cell) for cell in self.cells]
        for grad in self.grads.values():
            of_cpp: int = grad._use_count()  # type: ignore[attr-defined]
            found += (count(grad), of_cpp, len(grad.__dict__))
        return found


class Lent:
    """The row gradients among ``grads``, by their places there."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._sources: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._given: Given | None = None
        self._grads: list[tuple[int, RowGrad, list[_Form], _Scale, bool]] = []
        for k, grad in enumerate(grads):
            if not isinstance(grad, RowGrad) or not grad.lazy:
                continue
            pieces = grad.cell.pieces
            served = row_cuda.serving(pieces[0].rows if pieces else grad) is not None
            forms = [self._form(piece) for piece in pieces]
            self._grads.append((k, grad, forms, self._scale(grad.cell.scale), served))

    def _form(self, piece: Piece) -> _Form:
        at = self._number
        return (
            at(piece.ids), at(piece.rows), at(piece.offsets), piece.fixed, at(piece.weights),
            piece.mean, piece.padding_idx, self._scale(piece.scale), piece.version,
        )  # fmt: skip

    def _number(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        number = self._numbers.setdefault(id(tensor), len(self._sources))
        if number == len(self._sources):
            self._sources.append(tensor)
        return number

    def _scale(self, scale: Tensor | float | None) -> _Scale:
        return (self._number(scale), None) if isinstance(scale, Tensor) else (-1, scale)

    def again(self) -> dict[int, RowGrad]:
        """The gradients of the last replay, by their places; :meth:`parted` comes before the next.

        Either all are made anew, or nobody has had any since they were given out.
        """
        given = self._given
        if given is None:
            made = self._made()
            given = self._given = made._replace(alone=made.counts())
        else:
            for cell, pieces in zip(given.cells, given.pieces, strict=True):
                cell.pieces = pieces[:]
        return given.grads

    def parted(self) -> list[Tensor]:
        """What somebody holds still of the gradients: to be given memory of its own."""
        given = self._given
        if given is None:
            return []
        same = all([g.cell is c for g, c in zip(given.grads.values(), given.cells, strict=True)])
        if same and given.counts() == given.alone:
            for cell, (_, _, _, (number, factor), _) in zip(given.cells, self._grads, strict=True):
                # Whatever was done to it, nobody knows of it any more. Without pieces it is in
                # nobody's way until it is given out again.
                cell.scale = factor if number < 0 else given.aliases[number]
                cell.pieces, cell.full, cell.place = [], None, None
                cell.loose, cell.merged = None, False
            return []
        aliases = [weakref.ref(t) for t in given.aliases]
        self._given = given = None
        return [t for t in (ref() for ref in aliases) if t is not None]

    def _made(self) -> Given:
        """Gradients of new aliases."""
        aliases = [t.detach() for t in self._sources]
        of: list[Tensor | None] = [*aliases, None]  # the last is number -1
        found: dict[int, RowGrad] = {}
        cells: list[Cell] = []
        for k, grad, forms, (number, factor), served in self._grads:
            pieces = [
                Piece(
                    aliases[ids], aliases[rows], of[offsets], fixed, of[weights], mean, padding,
                    scaled if scale < 0 else aliases[scale], version,
                )
                for ids, rows, offsets, fixed, weights, mean, padding, (scale, scaled), version
                in forms
            ]  # fmt: skip
            cell = grad.cell
            own = Cell(pieces, factor if number < 0 else aliases[number], sparse=cell.sparse)
            own.table, own.lent = cell.table, True
            made = found[k] = grad.sharing(own)
            cells.append(own)
            if served:
                row_cuda.watch(made)
        return Given(found, cells, [c.pieces[:] for c in cells], aliases, [])
