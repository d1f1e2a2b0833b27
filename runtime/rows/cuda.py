"""Row gradients on a GPU: optimizer updates, merged rows and norms, by ``csrc/cuda/row_*.cu``.

All tables of a step are sorted together (``cuda_sort``) and updated with one launch for each
class (``cuda_step``), in place and without waiting for the device. Norms are computed in the same
way, and the update after them reuses their sort. The host waits only in ``merge``, as the device
alone knows how many rows the result has.

Ids outside their table are left out: the forward lookup has counted them already. In checked mode
(``checked``) they raise IdError here too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from recast.runtime import checked, device
from recast.runtime.gpu import gpu
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded import recording
from recast.runtime.recorded.recording import Recording
from recast.runtime.rows import cuda_again
from recast.runtime.rows import cuda_step as row_cuda_step
from recast.runtime.rows.cuda_sort import CODES, Sorted, Table, is_given, split
from recast.runtime.rows.cuda_step import ACTIONS, ORDERS, Target, numbers

if TYPE_CHECKING:
    from recast.runtime.rows.grad import Cell, RowGrad
    from recast.runtime.rows.pieces import Piece
    from recast.runtime.rows.update import Update

Shape = Sequence[int]


def serving(tensor: Tensor) -> Gpu | None:
    """The GPU whose kernels sum rows on the device of ``tensor``; None if they are not used."""
    return None if device.held() == "torch" else gpu.serving(tensor)


# --- updates -------------------------------------------------------------------------------------


def update(updates: Sequence[Update]) -> list[Update]:
    """Update in place the tables that the GPU kernels take; return the other updates."""
    step = None
    served = serving(updates[0].weight) if updates else None
    if served is not None:
        same = cuda_again.same(served, updates)
        step = cuda_again.look(served, updates) if same is None else same[0]
        plan = None if step is None else cuda_again.known(step) if same is None else same[1]
        if step is not None and plan is not None:
            if same is None:
                cuda_again.remember(served, updates, step, plan)
            packed = _packed(updates, plan.jobs)
            cuda_again.run(plan, step, updates, packed)
            _written(updates)
            return []
    left: list[Update] = []
    taken: dict[Gpu, list[tuple[Table, Update]]] = {}
    for one in updates:
        served = serving(one.weight)
        table = None if served is None else _table(one.grad)
        if served is None or table is None or not _takes(one, table):
            left.append(one)
        elif table.some():
            taken.setdefault(served, []).append((table, one))
    for served, group in taken.items():
        cells = [one.grad.cell for _, one in group]
        for sort, places in _sorts(served, cells, [table for table, _ in group]):
            described = _update(sort, [(place, group[k][1]) for place, k in places])
            if step is not None and len(places) == len(updates):
                cuda_again.keep(step, updates, sort, [k for _, k in places], *described)
    return left


def _packed(updates: Sequence[Update], order: Sequence[int]) -> bytes:
    """The packed numbers of ``updates``, in ``order``; all gradient scales are Python numbers."""
    known: dict[tuple[object, ...], bytes] = {}
    found = []
    for k in order:
        one = updates[k]
        own = one.grad.cell.scale
        scale = 1.0 if own is None else float(own)
        key = (one.lr, one.eps, one.factor * scale, one.betas, one.decay, one.l2, one.seed)
        packed = known.get(key)
        if packed is None:
            packed = known[key] = _numbers(one, scale)
        found.append(packed)
    return b"".join(found)


def _written(updates: Iterable[Update]) -> None:
    # As after any in-place operation: backward through a graph that saved the table must raise.
    torch.autograd.graph.increment_version([t for u in updates for t in (u.weight, *u.states)])


def _takes(one: Update, table: Table) -> bool:
    weight, states = one.weight, one.states
    if one.action not in ACTIONS or weight.dtype is not table.dtype or not _is_plain(weight):
        return False
    for state in states:
        if state.dtype is not states[0].dtype or not _is_plain(state):
            return False
        if state.device != weight.device:
            return False
    for scalar in (one.grad_scale, one.found_inf):
        if scalar is not None and (
            scalar.dtype is not torch.float32 or scalar.device != weight.device
        ):
            return False
    return table.fits()


def _is_plain(tensor: Tensor) -> bool:
    """Whether the kernels can write to its rows; (rows,) has rows of one number."""
    if tensor.dtype not in CODES or tensor.layout is not torch.strided:
        return False
    if tensor.stride(0) * tensor.itemsize >= 2**32:
        return False
    return tensor.dim() == 1 or tensor.stride(1) == 1 or tensor.shape[1] == 1


def _update(
    sort: Sorted, jobs: Sequence[tuple[int, Update]]
) -> tuple[array[int], list[row_cuda_step.Launch]]:
    """Do the updates; returns the descriptions that the kernels were given."""
    targets: list[tuple[int, Target]] = []
    scales: list[float] = []
    known: dict[tuple[object, ...], bytes] = {}  # tables of one parameter group share them
    for place, one in jobs:
        scale, factor = _scale(sort.gpu, one.grad.cell.scale)
        key = (one.lr, one.eps, one.factor * scale, one.betas, one.decay, one.l2, one.seed)
        packed = known.get(key)
        if packed is None:
            packed = known[key] = _numbers(one, scale)
        target = Target(
            one.action, one.weight, one.states, packed, one.seed is not None, factor,
            one.grad_scale, one.found_inf,
        )  # fmt: skip
        targets.append((place, target))
        scales.append(scale)
    rows, launches = row_cuda_step.described(sort, targets)
    numbers = b"".join([target.numbers for _, target in targets])
    buffer = row_cuda_step.launch(sort, rows, numbers, launches)
    _written(one for _, one in jobs)
    recorded = recording.current()
    if recorded is not None:
        recorded.keep(sort, buffer)
        weights = [one.weight for _, one in jobs]
        step = _Recorded(weights, scales, buffer, numbers)
        _RECORDED.setdefault(recorded, []).append(step)
    return rows, launches


def _numbers(one: Update, scale: float) -> bytes:
    seed = 0 if one.seed is None else one.seed % 2**64
    return numbers(one.lr, one.eps, one.factor * scale, one.betas, one.decay, one.l2, seed)


def _scale(served: Gpu, scale: Tensor | float | None) -> tuple[float, Tensor | None]:
    """``scale`` as a factor on the host and one on the device; the product of both counts."""
    if isinstance(scale, Tensor) and scale.device == served.device:
        return 1.0, scale
    return 1.0 if scale is None else float(scale), None


# --- recorded steps ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Recorded:
    """The numbers of one recorded launch of updates."""

    weights: list[Tensor]
    scales: list[float]
    buffer: Tensor
    packed: bytes  # the contents of the buffer


_RECORDED: WeakKeyDictionary[Recording, list[_Recorded]] = WeakKeyDictionary()


def renew(recorded: Recording, updates: Sequence[Update]) -> None:
    """Give the next replay of ``recorded`` the numbers of ``updates``, for its tables.

    The numbers are ``lr``, ``eps``, ``betas``, ``decay``, ``l2``, ``factor`` and ``seed``; all else
    stays as recorded. The copy is on the current stream, and the replay must be on it too.
    """
    by_weight = {id(one.weight): one for one in updates}
    for step in _RECORDED.get(recorded, ()):
        served = serving(step.buffer)
        found = [by_weight.get(id(weight)) for weight in step.weights]
        packed = b"".join(
            [_numbers(u, scale) for u, scale in zip(found, step.scales, strict=True) if u]
        )
        if served is not None and len(packed) == len(step.packed) and packed != step.packed:
            step.buffer.copy_(served.upload(array("q", packed)))
            step.packed = packed


# --- sorts that gradients share ------------------------------------------------------------------


class Place(NamedTuple):
    """Where a gradient is in a sort, and the pieces that were sorted."""

    joint: Joint
    place: int
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Joint:
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
    cuda_again.forget()
    for cell in [one.cell() for one in _LIVE]:
        if cell is not None:
            cell.place = None


def _table(grad: RowGrad) -> Table:
    return Table.of(grad.cell.pieces, grad.shape, grad.dtype)


def _found(cell: Cell) -> Place | None:
    """The place of a gradient that has not changed since it was sorted; else None."""
    found = cell.place
    if found is None or len(found.pieces) != len(cell.pieces):
        return None
    if cell.recorded and recording.current() is None:
        return None  # every replay changes it
    same = all(a is b for a, b in zip(found.pieces, cell.pieces, strict=True))
    return found if same else None


def _sorts(
    served: Gpu, cells: Sequence[Cell], tables: Sequence[Table]
) -> Iterator[tuple[Sorted, list[tuple[int, int]]]]:
    """Sorts of ``tables``, each with its (place, index in ``tables``) in order of place."""
    known = [found for found in map(_found, cells) if found is not None]
    if len(known) == len(cells) and all(found.joint is known[0].joint for found in known):
        yield known[0].joint.sort, sorted((found.place, k) for k, found in enumerate(known))
        return
    for chosen in split(tables):
        sort = _sort(served, [tables[k] for k in chosen])
        yield sort, sorted(zip(sort.place, chosen, strict=True))


def _sort(served: Gpu, tables: Sequence[Table]) -> Sorted:
    checking = checked.is_checked() and recording.current() is None
    sort = Sorted(served, tables, counting=checking)
    if checking:
        sort.raise_errors()
    return sort


def _join(served: Gpu, grads: Sequence[RowGrad]) -> None:
    """Sort ``grads`` together with all other gradients that are alive.

    Every replay repeats what its recording sorts, so a recording leaves out gradients of other
    steps; outside of it, its own gradients are left out.
    """
    now = recording.current()
    alive = [(one.cell(), one) for one in _LIVE if (one.made and one.made()) is now]
    cells = {
        cell: (one.shape, one.dtype)
        for cell, one in alive
        if cell is not None and not getattr(cell, "away", False)  # lent, and given back
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
        joint = Joint(sort, [piece for k in chosen for piece in tables[k].pieces], dtypes)
        for place, k in zip(sort.place, chosen, strict=True):
            cell = found[k][0]
            dtypes[place] = tables[k].dtype
            cell.place = Place(joint, place, tuple(cell.pieces))


# --- sorts before the step ------------------------------------------------------------------------


def given(grad: RowGrad) -> bool:
    """Whether the sort of ``grad`` reads only inputs of the current recording."""
    now = recording.current()
    return now is not None and is_given(now, grad.cell.pieces)


def sorting(grads: Sequence[RowGrad]) -> Callable[[], Sorted] | None:
    """A function that sorts ``grads`` ahead of their step, which then finds them sorted.

    None if that takes several sorts, or if something must be converted first: its values may not
    be there yet.
    """
    found = [(grad.cell, _table(grad)) for grad in grads]
    found = [(cell, table) for cell, table in found if table.some()]
    tables = [table for _, table in found]
    if not tables or not all(table.fits() for table in tables) or len(split(tables)) > 1:
        return None
    if not all(_is_read_as_it_lies(piece, table) for table in tables for piece in table.pieces):
        return None
    first = tables[0].pieces[0].rows

    def sort() -> Sorted:
        served = serving(first)
        assert served is not None
        made = Sorted(served, tables)
        dtypes = [torch.float32] * len(tables)
        pieces = [piece for table in tables for piece in table.pieces]
        joint = Joint(made, pieces, dtypes)
        for place, (cell, table) in zip(made.place, found, strict=True):
            dtypes[place] = table.dtype
            cell.place = Place(joint, place, tuple(cell.pieces))
        return made

    return sort


def _is_read_as_it_lies(piece: Piece, table: Table) -> bool:
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
        table = _table(grad)
        for piece in table.pieces:
            piece.check()
        if table.some():
            if not table.fits():
                return None
            summed[grad.cell] = grad
    if any(_found(cell) is None for cell in summed):
        _join(served, list(summed.values()))
    recorded = recording.current()
    own: dict[int, Tensor] = {}
    results = []
    for grad in grads:
        found = grad.cell.place if grad.cell in summed else None
        if found is None:
            results.append(torch.zeros((), dtype=torch.float32, device=grad.device))
            continue
        if recorded is not None:
            recorded.keep(found.joint)
        values = _norms_of(found.joint, float(order), grad.cell.scale)
        if id(values) not in own:
            own[id(values)] = values.clone()
        results.append(own[id(values)][found.place])
    return results


def _norms_of(joint: Joint, order: float, scale: Tensor | float | None) -> Tensor:
    """(tables,) norms of all gradients of a sort, as if each were multiplied by ``scale``."""
    plain = joint.norms.get(order)
    if plain is None:
        plain = joint.norms[order] = row_cuda_step.norms(joint.sort, order, joint.dtypes)
    if scale is None:
        return plain
    key = order, id(scale) if isinstance(scale, Tensor) else float(scale)
    if key not in joint.scaled:
        size = scale.abs() if isinstance(scale, Tensor) else abs(scale)
        joint.scaled[key] = scale, plain * size
    return joint.scaled[key][1]


# --- sums ----------------------------------------------------------------------------------------


def add(grad: RowGrad, dense: Tensor, alpha: float = 1.0) -> bool:
    """``dense += alpha * grad`` on the looked-up rows; False if the kernels cannot do it."""
    served = serving(dense)
    if served is None or dense.dtype is not grad.dtype or not _is_plain(dense):
        return False
    table = _table(grad)
    if not table.some():
        return True
    if not table.fits():
        return False
    for piece in table.pieces:
        piece.check()
    scale, factor = _scale(served, grad.cell.scale)
    for sort, [(place, _)] in _sorts(served, [grad.cell], [table]):
        target = Target("sgd", dense, (), numbers(-alpha, scale=scale), factor=factor)
        row_cuda_step.update(sort, [(place, target)])
    torch.autograd.graph.increment_version([dense])
    return True


def merge(
    pieces: Sequence[Piece], shape: Shape, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """(U,) sorted unique int64 ids and (U, D) summed rows; None if the kernels cannot do it.

    Waits for the device, which alone knows U. Raises IdError for an id outside the table, and
    ValueError for wrong offsets.
    """
    served = serving(pieces[0].rows)
    table = Table.of(pieces, shape, dtype)
    if served is None or not table.some() or not table.fits():
        return None
    sort = Sorted(served, [table], counting=True)
    sort.raise_errors()
    found, ranks = torch.unique_consecutive(sort.key_tensor(), return_inverse=True)
    ids = found.long() & (-1 if sort.wide else 2**32 - 1)
    if int(ids[-1]) == sort.no_key:  # of ids that get no gradient
        ids = ids[:-1]
    rows = torch.zeros(ids.numel(), table.dim, dtype=dtype, device=served.device)
    ranked = sort.renumbered(ranks, ids.numel())
    if ids.numel():
        row_cuda_step.update(ranked, [(0, Target("sgd", rows, (), numbers(-1.0)))])
    return ids, rows
