"""Row gradients on a GPU: optimizer updates, merged rows and norms, by ``csrc/cuda/row_*.cu``.

All tables of a step are sorted together (``cuda_sort``) and updated with one launch for each
class (``cuda_step``), in place and without waiting for the device. Norms come the same way, and
their sort serves the update after them. The host waits in ``merge`` only, whose result has as many
rows as the device finds.

Ids outside their table are left out: the lookup before has counted them. In checked mode
(``checked``) they are an IdError here too.
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
    """The GPU that sums rows on the device of ``tensor``; None where something else does."""
    return None if device.held() == "torch" else gpu.serving(tensor)


# --- updates -------------------------------------------------------------------------------------


def update(updates: Sequence[Update]) -> list[Update]:
    """Update in place the tables of a GPU that the kernels take; return the others."""
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
    """The numbers of gradients whose scales are the host's."""
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
    # As any operation in place: a graph that saved the table must refuse to go on.
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
    """Whether kernels can write to its rows: (rows, D), or (rows,) for one number each."""
    if tensor.dtype not in CODES or tensor.layout is not torch.strided:
        return False
    if tensor.stride(0) * tensor.itemsize >= 2**32:
        return False
    return tensor.dim() == 1 or tensor.stride(1) == 1 or tensor.shape[1] == 1


def _update(
    sort: Sorted, jobs: Sequence[tuple[int, Update]]
) -> tuple[array[int], list[row_cuda_step.Launch]]:
    """Do the updates; how they were described."""
    targets: list[tuple[int, Target]] = []
    scales: list[float] = []
    known: dict[tuple[object, ...], bytes] = {}  # the tables of a group have the same
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
    """A factor as the host knows it, and as the device does."""
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
    packed: bytes  # what the buffer holds


_RECORDED: WeakKeyDictionary[Recording, list[_Recorded]] = WeakKeyDictionary()


def renew(recorded: Recording, updates: Sequence[Update]) -> None:
    """Give the next replay of ``recorded`` the numbers of ``updates``, of the tables recorded.

    Those are ``lr``, ``eps``, ``betas``, ``decay``, ``l2``, ``factor`` and ``seed``; all else stays
    as it was recorded. Ordered on the current stream, which the replay must be on.
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
    """A sort of several gradients, and their norms so far: before and after a scale."""

    sort: Sorted
    pieces: list[Piece]  # all that was sorted, for as long as a norm may be asked for
    dtypes: list[torch.dtype]
    norms: dict[float, Tensor] = field(default_factory=dict)
    scaled: dict[tuple[float, object], tuple[Tensor | float, Tensor]] = field(default_factory=dict)


class _Watched(NamedTuple):
    """A gradient of a table, and the recording that it is of."""

    cell: ref[Cell]
    shape: Shape
    dtype: torch.dtype
    made: ref[Recording] | None


# The gradients of tables that are alive, and some that were: a norm of one is mostly followed by
# those of all others. A list, as a step of 55 tables puts 55 here.
_LIVE: list[_Watched] = []
_most = _LEAST = 512  # entries before those that are gone are dropped


def watch(grad: RowGrad) -> None:
    """Sort ``grad`` together with others when the norm of one of them is asked for."""
    global _most
    now = recording.current()
    made = None if now is None else ref(now)
    _LIVE.append(_Watched(ref(grad.cell), grad.shape, grad.dtype, made))
    if len(_LIVE) > _most:
        _LIVE[:] = [one for one in _LIVE if one.cell() is not None]
        _most = max(_LEAST, 2 * len(_LIVE))


def forget() -> None:
    """Sort anew all gradients alive: their memory is another."""
    cuda_again.forget()
    for cell in [one.cell() for one in _LIVE]:
        if cell is not None:
            cell.place = None


def _table(grad: RowGrad) -> Table:
    return Table.of(grad.cell.pieces, grad.shape, grad.dtype)


def _found(cell: Cell) -> Place | None:
    """The place of a gradient that has been sorted, and not changed since."""
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
    """Sorts of ``tables``, each with (place, number of the table) by ascending places."""
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
    """Sort ``grads``, and all gradients alive with them, together.

    What a recording sorts every replay sorts again: those of other steps are left out, as are those
    of a recording anywhere else.
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
    """Whether the recording under way was given all that the sort of ``grad`` reads."""
    now = recording.current()
    return now is not None and is_given(now, grad.cell.pieces)


def sorting(grads: Sequence[RowGrad]) -> Callable[[], Sorted] | None:
    """What sorts ``grads``, so that a step of them finds it done.

    None where that takes several sorts, or something has to be converted for it, which may not be
    there yet.
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
    """Whether describing ``piece`` of ``table`` to the kernels starts no work on the device."""
    rows, weights = piece.rows, piece.weights
    if rows.dtype is not table.grad or (rows.stride(1) != 1 and rows.shape[1] != 1):
        return False
    if weights is not None and (weights.dtype is not table.dtype or not weights.is_contiguous()):
        return False
    return not isinstance(piece.scale, Tensor)


# --- norms ---------------------------------------------------------------------------------------


def norms(grads: Sequence[RowGrad], order: float) -> list[Tensor] | None:
    """The norm of each gradient, () fp32, multiplied by its scale; None where kernels cannot.

    order: 1, 2 or infinity. The tensors are nobody else's. Not finite where the gradient is not.
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
    """(tables,) norms of all gradients of a sort, were they all multiplied by ``scale``."""
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
    """``dense += alpha * grad`` on the touched rows; False where the kernels cannot."""
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
    """(U,) sorted unique int64 ids and (U, D) summed rows; None where the kernels cannot.

    Waits for the device, which alone knows U. Raises IdError for an id outside the table.
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
