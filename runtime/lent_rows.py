"""Row gradients in the memory of a recording, given out at every replay.

Each time they are aliases: who holds one still can be given memory of its own, while the recording
keeps what its replays write to.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows.grad import Cell, RowGrad
from recast.runtime.rows.pieces import Piece

_Scale = tuple[int, float | None]  # the number of its tensor, or -1 and the factor
_Form = tuple[int, int, int, int, int, bool, int | None, _Scale, int]


class Lent:
    """The row gradients among ``grads``, by their places there."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._sources: list[Tensor] = []
        self._numbers: dict[int, int] = {}
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

    def again(self) -> tuple[dict[int, RowGrad], list[Tensor]]:
        """Gradients of aliases by their places, and the aliases."""
        aliases = [t.detach() for t in self._sources]
        of: list[Tensor | None] = [*aliases, None]  # the last is number -1
        found: dict[int, RowGrad] = {}
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
            own.table = cell.table
            made = found[k] = grad.sharing(own)
            if served:
                row_cuda.watch(made)
        return found, aliases
