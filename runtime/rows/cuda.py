"""Row gradients on a GPU: optimizer updates, sums and merged rows, by ``csrc/cuda/row_*.cu``.

All tables of a step are sorted together (``cuda_sort``) and updated with one launch for each
class (``cuda_step``), in place and without waiting for the device. If a norm was asked for before
(``cuda_shared_sorts``), the update reuses its sort. The host waits only in ``merge``, as the device
alone knows how many rows the result has.

Ids outside their table are left out: the forward lookup has counted them already. In checked mode
(``checked``) they raise IdError here too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded import recording
from recast.runtime.recorded.recording import Recording
from recast.runtime.rows import cuda_step as row_cuda_step
from recast.runtime.rows import cuda_step_cache
from recast.runtime.rows.cuda_shared_sorts import Shape, serving, sorts_of, table_of
from recast.runtime.rows.cuda_sort import CODES, Sorted, Table
from recast.runtime.rows.cuda_step import ACTIONS, Target, numbers

if TYPE_CHECKING:
    from recast.runtime.rows.grad import RowGrad
    from recast.runtime.rows.pieces import Piece
    from recast.runtime.rows.update import Update


# --- updates -------------------------------------------------------------------------------------


def update(updates: Sequence[Update]) -> list[Update]:
    """Update in place the tables that the GPU kernels take; return the other updates."""
    step = None
    served = serving(updates[0].weight) if updates else None
    if served is not None:
        same = cuda_step_cache.cached_for_lent(served, updates)
        step = cuda_step_cache.keyed(served, updates) if same is None else same[0]
        plan = None if step is None else cuda_step_cache.cached(step) if same is None else same[1]
        if step is not None and plan is not None:
            if same is None:
                cuda_step_cache.store_for_lent(served, updates, step, plan)
            packed = _packed(updates, plan.jobs)
            cuda_step_cache.run(plan, step, updates, packed)
            _written(updates)
            return []
    left: list[Update] = []
    taken: dict[Gpu, list[tuple[Table, Update]]] = {}
    for one in updates:
        served = serving(one.weight)
        table = None if served is None else table_of(one.grad)
        if served is None or table is None or not _takes(one, table):
            left.append(one)
        elif table.some():
            taken.setdefault(served, []).append((table, one))
    for served, group in taken.items():
        cells = [one.grad.cell for _, one in group]
        for sort, places in sorts_of(served, cells, [table for table, _ in group]):
            described = _update(sort, [(place, group[k][1]) for place, k in places])
            if step is not None and len(places) == len(updates):
                cuda_step_cache.store(step, updates, sort, [k for _, k in places], *described)
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
        if state.shape != weight.shape[: state.dim()]:  # the kernels take it for granted
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


# --- sums ----------------------------------------------------------------------------------------


def add(grad: RowGrad, dense: Tensor, alpha: float = 1.0) -> bool:
    """``dense += alpha * grad`` on the looked-up rows; False if the kernels cannot do it."""
    served = serving(dense)
    if served is None or dense.dtype is not grad.dtype or not _is_plain(dense):
        return False
    table = table_of(grad)
    if not table.some():
        return True
    if not table.fits():
        return False
    for piece in table.pieces:
        piece.check()
    scale, factor = _scale(served, grad.cell.scale)
    for sort, [(place, _)] in sorts_of(served, [grad.cell], [table]):
        target = Target("sgd", dense, (), numbers(-alpha, scale=scale), factor=factor)
        row_cuda_step.update(sort, [(place, target)])
    torch.autograd.graph.increment_version([dense])
    return True


def merge(
    pieces: Sequence[Piece], shape: Shape, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """(U,) sorted unique int64 ids and (U, D) summed rows; None if the kernels cannot do it.

    Waits for the device, which alone knows U. Raises IdError for an id outside the table, or
    wrong offsets.
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
