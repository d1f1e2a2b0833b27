"""Sorts of row gradients on a GPU that several questions share: their norms, and their updates.

Whoever asks for the norm of one table's gradient usually asks for all of them, and the optimizer's
step comes next. So all gradients that are alive are sorted together at the first question, and each
remembers its place in that sort until it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from recast.runtime import checked, device
from recast.runtime.gpu import gpu
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded import recording
from recast.runtime.recorded.recording import Recording
from recast.runtime.rows import cuda_step as row_cuda_step
from recast.runtime.rows import cuda_step_cache
from recast.runtime.rows.cuda_sort import Sorted, Table, is_given, split
from recast.runtime.rows.cuda_step import ORDERS

if TYPE_CHECKING:
    from recast.runtime.rows.grad import Cell, RowGrad
    from recast.runtime.rows.pieces import Piece

Shape = Sequence[int]


def serving(tensor: Tensor) -> Gpu | None:
    """The GPU whose kernels sum rows on the device of ``tensor``; None if they are not used."""
    return None if device.held() == "torch" else gpu.serving(tensor)


class Place(NamedTuple):
    """Where a gradient is in a sort, and the pieces that were sorted."""

    shared: SharedSort
    place: int
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class SharedSort:
    """A sort of several gradients, and their norms found so far, before and after scaling."""

    sort: Sorted
    pieces: list[Piece]  # all that were sorted; kept alive for norms still to be asked for
    dtypes: list[torch.dtype]
    norms: dict[float, Tensor] = field(default_factory=dict)
    scaled: dict[tuple[float, object], tuple[Tensor | float, Tensor]] = field(default_factory=dict)


class _Watched(NamedTuple):
    """A table's gradient, and the recording that made it (None: none did)."""

    cell: ref[Cell]
    shape: Shape
    dtype: torch.dtype
    made: ref[Recording] | None


# The table gradients that are alive, and some dead ones. Whoever asks for the norm of one usually
# asks for all, so they are sorted together. A list: a step of 55 tables makes 55 cheap appends.
_LIVE: list[_Watched] = []
_most = _LEAST = 512  # entries beyond which dead ones are dropped


def watch(grad: RowGrad) -> None:
    """From now on sort ``grad`` with the others when the norm of any of them is asked for."""
    global _most
    now = recording.current()
    made = None if now is None else ref(now)
    _LIVE.append(_Watched(ref(grad.cell), grad.shape, grad.dtype, made))
    if len(_LIVE) > _most:
        _LIVE[:] = [one for one in _LIVE if one.cell() is not None]
        _most = max(_LEAST, 2 * len(_LIVE))


def forget() -> None:
    """Forget all sorts: the gradients that are alive have moved to other memory."""
    cuda_step_cache.forget()
    for cell in [one.cell() for one in _LIVE]:
        if cell is not None:
            cell.place = None


def table_of(grad: RowGrad) -> Table:
    return Table.of(grad.cell.pieces, grad.shape, grad.dtype)


def _valid_place(cell: Cell) -> Place | None:
    """The place of a gradient that has not changed since it was sorted; else None."""
    found = cell.place
    if found is None or len(found.pieces) != len(cell.pieces):
        return None
    if cell.recorded and recording.current() is None:
        return None  # every replay changes it
    same = all(a is b for a, b in zip(found.pieces, cell.pieces, strict=True))
    return found if same else None


def sorts_of(
    served: Gpu, cells: Sequence[Cell], tables: Sequence[Table]
) -> Iterator[tuple[Sorted, list[tuple[int, int]]]]:
    """Sorts of ``tables``, each with its (place, index in ``tables``) in order of place."""
    known = [found for found in map(_valid_place, cells) if found is not None]
    if len(known) == len(cells) and all(found.shared is known[0].shared for found in known):
        yield known[0].shared.sort, sorted((found.place, k) for k, found in enumerate(known))
        return
    for chosen in split(tables):
        sort = _sort(served, [tables[k] for k in chosen])
        yield sort, sorted(zip(sort.place, chosen, strict=True))


def _sort(served: Gpu, tables: Sequence[Table]) -> Sorted:
    sort = Sorted(served, tables, counting=_is_checking())
    if _is_checking():
        sort.raise_errors()
    return sort


def _is_checking() -> bool:
    return checked.is_checked() and recording.current() is None


def _sort_with_others(served: Gpu, grads: Sequence[RowGrad]) -> None:
    """Sort ``grads`` together with all other gradients that are alive; alone if checks are on: an
    error must be of what was asked for, not of another model.

    Every replay repeats what its recording sorts, so a recording leaves out gradients of other
    steps; outside of it, its own gradients are left out.
    """
    now = recording.current()
    others = [] if _is_checking() else _LIVE
    alive = [(one.cell(), one) for one in others if (one.made and one.made()) is now]
    cells = {
        cell: (one.shape, one.dtype)
        for cell, one in alive
        if cell is not None and not getattr(cell, "not_lent", False)  # lent before, and given back
    }
    cells.update({grad.cell: (grad.shape, grad.dtype) for grad in grads})
    found = [(cell, Table.of(cell.pieces, *of)) for cell, of in cells.items()]
    found = [
        (cell, table)
        for cell, table in found
        if cell.full is None and table.some() and table.fits()
        if table.pieces[0].rows.device == served.device
    ]
    tables = [table for _, table in found]
    for chosen in split(tables):
        sort = _sort(served, [tables[k] for k in chosen])
        dtypes = [torch.float32] * len(chosen)
        shared = SharedSort(sort, [piece for k in chosen for piece in tables[k].pieces], dtypes)
        for place, k in zip(sort.place, chosen, strict=True):
            cell = found[k][0]
            dtypes[place] = tables[k].dtype
            cell.place = Place(shared, place, tuple(cell.pieces))


# --- sorts before the step ------------------------------------------------------------------------


def reads_only_inputs(grad: RowGrad) -> bool:
    """Whether the sort of ``grad`` reads only inputs of the current recording."""
    now = recording.current()
    return now is not None and is_given(now, grad.cell.pieces)


def sort_ahead(grads: Sequence[RowGrad]) -> Callable[[], Sorted] | None:
    """A function that sorts ``grads`` ahead of their step, which then finds them sorted.

    None if that takes several sorts, or if something must be converted first: its values may not
    be there yet.
    """
    found = [(grad.cell, table_of(grad)) for grad in grads]
    found = [(cell, table) for cell, table in found if table.some()]
    tables = [table for _, table in found]
    if not tables or not all(table.fits() for table in tables) or len(split(tables)) > 1:
        return None
    if not all(_is_read_in_place(piece, table) for table in tables for piece in table.pieces):
        return None
    first = tables[0].pieces[0].rows

    def sort() -> Sorted:
        served = serving(first)
        assert served is not None
        made = Sorted(served, tables)
        dtypes = [torch.float32] * len(tables)
        pieces = [piece for table in tables for piece in table.pieces]
        shared = SharedSort(made, pieces, dtypes)
        for place, (cell, table) in zip(made.place, found, strict=True):
            dtypes[place] = table.dtype
            cell.place = Place(shared, place, tuple(cell.pieces))
        return made

    return sort


def _is_read_in_place(piece: Piece, table: Table) -> bool:
    """Whether the kernels can read ``piece`` of ``table`` in place: without conversions on the
    device.
    """
    rows, weights = piece.rows, piece.weights
    if rows.dtype is not table.grad or (rows.stride(1) != 1 and rows.shape[1] != 1):
        return False
    if weights is not None and (weights.dtype is not table.dtype or not weights.is_contiguous()):
        return False
    return not isinstance(piece.scale, Tensor)


# --- norms ---------------------------------------------------------------------------------------


def norms(grads: Sequence[RowGrad], order: float) -> list[Tensor] | None:
    """The norm of each gradient, () fp32, with its scale; None if the kernels cannot compute it.

    order: 1, 2 or infinity. The tensors are new. A norm is not finite if the gradient is not.
    """
    served = serving(grads[0]) if grads and order in ORDERS else None
    if served is None:
        return None
    summed: dict[Cell, RowGrad] = {}
    for grad in grads:
        if grad.device != grads[0].device:
            return None
        table = table_of(grad)
        for piece in table.pieces:
            piece.check()
        if table.some():
            if not table.fits():
                return None
            summed[grad.cell] = grad
    if any(_valid_place(cell) is None for cell in summed):
        _sort_with_others(served, list(summed.values()))
    recorded = recording.current()
    own: dict[int, Tensor] = {}
    results = []
    for grad in grads:
        found = grad.cell.place if grad.cell in summed else None
        if found is None:
            results.append(torch.zeros((), dtype=torch.float32, device=grad.device))
            continue
        if recorded is not None:
            recorded.keep(found.shared)
        values = _norms_of(found.shared, float(order), grad.cell.scale)
        if id(values) not in own:
            own[id(values)] = values.clone()
        results.append(own[id(values)][found.place])
    return results


def _norms_of(shared: SharedSort, order: float, scale: Tensor | float | None) -> Tensor:
    """(tables,) norms of all gradients of a sort, as if each were multiplied by ``scale``."""
    plain = shared.norms.get(order)
    if plain is None:
        plain = shared.norms[order] = row_cuda_step.norms(shared.sort, order, shared.dtypes)
    if scale is None:
        return plain
    key = order, id(scale) if isinstance(scale, Tensor) else float(scale)
    if key not in shared.scaled:
        size = scale.abs() if isinstance(scale, Tensor) else abs(scale)
        shared.scaled[key] = scale, plain * size
    return shared.scaled[key][1]
