"""Row gradients in the memory of a recording, given out at every replay.

They are aliases: who holds one still can be given memory of its own, while the recording keeps what
its replays write to. Where nobody does, as where gradients are set to None, the very same objects
are given out again: making those of 55 tables takes 0.2 ms. Their cells tell when somebody looks
into them, so that of gradients that only a replayed optimizer step has read nothing is compared.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from recast.runtime.recorded.state.same import attributes, values
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.grad import Cell, RowGrad
from recast.runtime.rows.pieces import Piece

_use: Any = RowGrad._use_count  # type: ignore[attr-defined]
_Scale = tuple[int, float | None]  # the number of its tensor, or -1 and the factor
_Form = tuple[int, int, int, int, int, bool, int | None, _Scale, int]


class _Looks:
    """Of the cells of one recording: whether they are given out, and whether anybody looked."""

    given = False
    looked = False


class LentCell(Cell):
    """A cell that notes whether its pieces were looked at, which may be added to, or it changed."""

    def __init__(self, looks: _Looks, pieces: list[Piece], **attributes: Any) -> None:
        vars(self).update(_looks=looks, _pieces=pieces, lent=tuple(pieces), **attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_looks"].looked = True
        super().__setattr__(name, value)

    @property
    def pieces(self) -> list[Piece]:
        vars(self)["_looks"].looked = True
        return self._pieces

    @pieces.setter
    def pieces(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    @property
    def away(self) -> bool:
        """Whether the gradient is given to nobody."""
        return not vars(self)["_looks"].given


class Given(NamedTuple):
    """What was given out last, and how often each was referred to when nobody else had it."""

    places: list[int]
    grads: list[RowGrad]
    cells: list[LentCell]
    attributes: list[dict[str, Any]]  # of the cells, but for
    pieces: list[list[Piece]]
    aliases: list[Tensor]
    outside: list[int]
    inside: list[int]

    def referred(self) -> list[int]:
        """References to the gradients and their cells now, the same way at each call."""
        count, use = sys.getrefcount, _use
        return [*map(count, self.grads), *map(count, self.cells), *map(use, self.grads)]

    def referred_inside(self) -> list[int]:
        """The same of what they are made of, which nobody has who did not look."""
        count = sys.getrefcount
        return [*map(count, chain.from_iterable(self.pieces)), *map(count, self.aliases)]

    def same_cells(self) -> bool:
        """Whether each gradient has its cell still."""
        return attributes(self.grads, ("cell",), self.cells)

    def bare(self) -> bool:
        """Whether each gradient has its cell still, and no other attributes."""
        return values([*map(vars, self.grads)], self.cells)

    def unchanged(self) -> bool:
        """Whether each cell is worth what it was when it was given out."""
        for cell, before, pieces in zip(self.cells, self.attributes, self.pieces, strict=True):
            if cell.scale is not before["scale"] or cell.full is not None or cell.each is not None:
                return False
            held = cell._pieces
            if len(held) != len(pieces) or not all(map(is_, held, pieces)):
                return False
        return True


class Lent:
    """The row gradients among ``grads``, by their places there."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._sources: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._given: Given | None = None
        self._looks = _Looks()
        self._grads: list[tuple[int, RowGrad, list[_Form], _Scale, bool]] = []
        self.places: list[int] = []
        self.of_batch: set[int] = set()  # places of those whose ids the recording was given
        for k, grad in enumerate(grads):
            if not isinstance(grad, RowGrad) or not grad.lazy:
                continue
            pieces = grad.cell.pieces
            served = row_cuda.serving(pieces[0].rows if pieces else grad) is not None
            forms = [self._form(piece) for piece in pieces]
            self.places.append(k)
            self._grads.append((k, grad, forms, self._scale(grad.cell.scale), served))
            if served and row_cuda.given(grad):
                self.of_batch.add(k)

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

    def again(self) -> Given:
        """The gradients of the last replay; :meth:`parted` comes before the next.

        Either all are made anew, or nobody has had any since they were given out.
        """
        given = self._given
        if given is None:
            given = self._given = self._made(self._looks)
            given.outside.extend(given.referred())
            given.inside.extend(given.referred_inside())
        self._looks.given = True
        return given

    def twins(self) -> dict[int, RowGrad]:
        """Gradients in the same memory that are given to nobody: for a recording to hold."""
        made = self._made(_Looks())
        return dict(zip(made.places, made.grads, strict=True))

    def as_given(self) -> bool:
        """Whether the gradients that were given out last are worth what the replay gave."""
        given = self._given
        if given is None or not self._looks.given or not given.same_cells():
            return False
        return not self._looks.looked or given.unchanged()

    def parted(self) -> list[Tensor]:
        """What somebody holds still of the gradients: to be given memory of its own."""
        given, looks = self._given, self._looks
        if given is None:
            return []
        alone = given.bare() and given.referred() == given.outside
        if alone and looks.looked:
            # Whatever was done to it, nobody knows of it any more.
            for cell, known, pieces in zip(
                given.cells, given.attributes, given.pieces, strict=True
            ):
                own = vars(cell)
                own.clear()
                own.update(known, _pieces=pieces[:])
            alone = given.referred_inside() == given.inside
        if alone:
            looks.looked = looks.given = False
            return []
        self._looks = _Looks()
        aliases = [weakref.ref(t) for t in given.aliases]
        self._given = given = None
        return [t for t in (ref() for ref in aliases) if t is not None]

    def _made(self, looks: _Looks) -> Given:
        """Gradients of new aliases."""
        aliases = [t.detach() for t in self._sources]
        of: list[Tensor | None] = [*aliases, None]  # the last is number -1
        found: list[RowGrad] = []
        cells: list[LentCell] = []
        for _, grad, forms, (number, factor), served in self._grads:
            pieces = [
                Piece(
                    aliases[ids], aliases[rows], of[offsets], fixed, of[weights], mean, padding,
                    scaled if scale < 0 else aliases[scale], version,
                )
                for ids, rows, offsets, fixed, weights, mean, padding, (scale, scaled), version
                in forms
            ]  # fmt: skip
            cell = grad.cell
            own = LentCell(
                looks, pieces, scale=factor if number < 0 else aliases[number],
                sparse=cell.sparse, table=cell.table,
            )  # fmt: skip
            made = grad.sharing(own)
            found.append(made)
            cells.append(own)
            if served:
                row_cuda.watch(made)
        known = [dict(vars(cell)) for cell in cells]
        held = [attributes.pop("_pieces") for attributes in known]
        for cell, pieces in zip(cells, held, strict=True):
            vars(cell)["_pieces"] = pieces[:]
        return Given(self.places, found, cells, known, held, aliases, [], [])
