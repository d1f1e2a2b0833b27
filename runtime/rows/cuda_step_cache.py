"""A cache of what the kernels are told about a step: from step to step only addresses and numbers
differ.

To describe 55 tables and their lookups to the kernels takes the host longer than the kernels run.
So descriptions are kept under a key of all that they depend on, and addresses are filled in by
whole columns. Gradients that a recording lends at each replay have fixed addresses: for these not
even the key is compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from recast.runtime import checked
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded import recording
from recast.runtime.rows import cuda_step
from recast.runtime.rows.cuda_sort import CODES, Sorted
from recast.runtime.rows.cuda_step import Launch

if TYPE_CHECKING:
    from recast.runtime.rows.grad import Cell
    from recast.runtime.rows.update import Update

_INTS = (torch.int64, torch.int32)
_MOST_PLANS = 32  # kept


class KeyedStep(NamedTuple):
    """The updates of a step in short: their key, and the addresses of its pieces, in order."""

    key: tuple[Hashable, ...]
    ids: list[int]  # per piece, as are the next two
    offsets: list[int]
    rows: list[int]


class Plan(NamedTuple):
    """The descriptions of all steps with one key."""

    sort: Sorted
    pieces: list[int]  # numbers of the pieces in the order of the sort
    jobs: list[int]  # and of the updates
    rows: array[int]  # the Rows of all jobs
    launches: list[Launch]


class LentStep(NamedTuple):
    """The last step on gradients that a recording lends, and the plan of its key."""

    cells: list[ref[Cell]]  # weak: a strong reference would count as a user of the gradients
    conditions: tuple[Any, ...]  # the parts of the key that may still change
    step: KeyedStep
    plan: Plan


_PLANS: dict[tuple[Hashable, ...], Plan] = {}
_LENT: WeakKeyDictionary[Cell, LentStep] = WeakKeyDictionary()  # by the cell of the first update


def cached_for_lent(served: Gpu, updates: Sequence[Update]) -> tuple[KeyedStep, Plan] | None:
    """What :func:`keyed` and :func:`cached` find, if nothing that they look at can have changed."""
    found = _LENT.get(updates[0].grad.cell)
    if found is None or recording.current() is not None or checked.is_checked():
        return None
    cells = [one.grad.cell for one in updates]
    if len(cells) != len(found.cells):
        return None
    if not all([known() is cell for known, cell in zip(found.cells, cells, strict=True)]):
        return None
    if not _are_plain(cells):
        return None
    if not _have_lent(cells):
        return None
    return (found.step, found.plan) if _conditions(served, updates) == found.conditions else None


def _are_plain(cells: Sequence[Cell]) -> bool:
    """Whether the gradients are pieces only, perhaps times a Python number: such numbers are
    uploaded at each step anyway.
    """
    return not any(
        [
            c.place is not None
            or c.full is not None
            or (c.scale is not None and isinstance(c.scale, Tensor))
            for c in cells
        ]
    )


def store_for_lent(served: Gpu, updates: Sequence[Update], step: KeyedStep, plan: Plan) -> None:
    """Let :func:`cached_for_lent` find ``step``, if a recording lends all of its gradients."""
    cells = [one.grad.cell for one in updates]
    conditions = _conditions(served, updates)
    if conditions is not None and _have_lent(cells):
        _LENT[cells[0]] = LentStep([ref(cell) for cell in cells], conditions, step, plan)


def forget() -> None:
    """Look up all addresses again: some gradients have moved, because somebody holds them."""
    _LENT.clear()


def _have_lent(cells: Sequence[Cell]) -> bool:
    """Whether a recording lends these gradients, and they still have the pieces it lent."""
    lent = [() if c.lent is None else c.lent for c in cells]
    held = [c.pieces for c in cells]
    if not all(lent) or [*map(len, held)] != [*map(len, lent)]:
        return False
    return all(map(is_, chain.from_iterable(held), chain.from_iterable(lent)))


def _conditions(served: Gpu, updates: Sequence[Update]) -> tuple[Any, ...] | None:
    """The parts of a key that describe tables and loss scaling; None if updates differ in the
    latter.
    """
    scale, found_inf = updates[0].grad_scale, updates[0].found_inf
    if any([one.grad_scale is not scale or one.found_inf is not found_inf for one in updates]):
        return None
    weights = [one.weight for one in updates]
    states = [t for one in updates for t in one.states]
    return (
        served, len(states),
        *[None if x is None else (x.dtype, x.get_device()) for x in (scale, found_inf)],
        *[one.action for one in updates], *[one.seed is None for one in updates],
        *[t.data_ptr() for t in weights], *[t.dtype for t in weights], *[t.shape for t in weights],
        *[t.data_ptr() for t in states], *[t.dtype for t in states],
    )  # fmt: skip


def keyed(served: Gpu, updates: Sequence[Update]) -> KeyedStep | None:
    """The key and addresses of ``updates``; None if such steps are not kept."""
    if recording.current() is not None or checked.is_checked():
        return None
    cells = [one.grad.cell for one in updates]
    if not _are_plain(cells):
        return None
    scale, found_inf, kinds = updates[0].grad_scale, updates[0].found_inf, len(updates[0].states)
    if any([
        one.grad_scale is not scale or one.found_inf is not found_inf or len(one.states) != kinds
        for one in updates
    ]):  # fmt: skip
        return None
    pieces = [piece for cell in cells for piece in cell.pieces]
    if not pieces or any([p.weights is not None or p.scale is not None for p in pieces]):
        return None
    weights = [one.weight for one in updates]
    ids, rows, offsets = zip(*[(p.ids, p.rows, p.offsets) for p in pieces], strict=True)
    starts = [t for t in offsets if t is not None]
    rows_at = [t.data_ptr() for t in rows]
    # By columns, which is faster than table by table. A table is identified by its address, but its
    # number of rows may change. Gradients and ids have other addresses at each step.
    key: list[Any] = [
        served, tuple([len(cell.pieces) for cell in cells]), kinds,
        *[None if x is None else (x.dtype, x.get_device()) for x in (scale, found_inf)],
        (
            *[one.action for one in updates], *[one.seed is None for one in updates],
            *[t.data_ptr() for t in weights], *[t.dtype for t in weights],
            *[t.shape for t in weights], *[t.data_ptr() for one in updates for t in one.states],
            *[t.dtype for one in updates for t in one.states],
        ),
        (
            *[t.dtype for t in rows], *[t.shape for t in rows], *[t.stride() for t in rows],
            *[at & 15 for at in rows_at], *[t.dtype for t in ids], *[t.shape for t in ids],
            *[t.is_contiguous() for t in ids], *[t is None for t in offsets],
            *[p.fixed for p in pieces], *[p.mean for p in pieces], *[p.padding_idx for p in pieces],
        ),
        tuple([(t.dtype, t.shape, t.is_contiguous()) for t in starts]),
    ]  # fmt: skip
    found = [0 if t is None else t.data_ptr() for t in offsets] if starts else [0] * len(offsets)
    return KeyedStep(tuple(key), [t.data_ptr() for t in ids], found, rows_at)


def cached(step: KeyedStep) -> Plan | None:
    """The plan for the key of ``step``, if one is kept."""
    return _PLANS.get(step.key)


def store(
    step: KeyedStep,
    updates: Sequence[Update],
    sort: Sorted,
    jobs: list[int],
    rows: array[int],
    launches: list[Launch],
) -> None:
    """Remember how ``updates`` were described, if one sort took them all.

    ``jobs``: their indices, in the order of ``rows``.
    """
    pieces = [(k, p) for k, one in enumerate(updates) for p in one.grad.cell.pieces]
    if not all(_is_plain(p.ids, p.offsets, p.rows, updates[k]) for k, p in pieces):
        return
    numbers = {id(piece): n for n, (_, piece) in enumerate(pieces)}
    order = [numbers.get(id(piece)) for piece in sort.given]
    if len(numbers) != len(order) or None in order or len(jobs) != len(updates):
        return  # a piece has no ids, or occurs twice
    if len(_PLANS) >= _MOST_PLANS:
        _PLANS.clear()
    kept = [n for n in order if n is not None]
    _PLANS[step.key] = Plan(sort.forgetting(), kept, jobs, rows, launches)


def _is_plain(ids: Tensor, offsets: Tensor | None, rows: Tensor, one: Update) -> bool:
    """Whether the kernels read a piece in place: nothing was converted."""
    for t in (ids,) if offsets is None else (ids, offsets):
        if t.dtype not in _INTS or not t.is_contiguous():
            return False
    same = all(p.rows.dtype is rows.dtype for p in one.grad.cell.pieces)
    return same and rows.dtype in CODES and (rows.stride(1) == 1 or rows.shape[1] == 1)


def run(plan: Plan, step: KeyedStep, updates: Sequence[Update], packed: bytes) -> None:
    """Do the updates; ``packed``: the numbers of each, in the order of ``plan.jobs``."""
    sort = plan.sort.again(
        [step.ids[n] for n in plan.pieces],
        [step.offsets[n] for n in plan.pieces],
        [step.rows[n] for n in plan.pieces],
        cuda_step.joined(plan.rows, packed),  # one upload for all
    )
    scale, found_inf = updates[0].grad_scale, updates[0].found_inf
    at = None if scale is None else scale.data_ptr()
    infinite = None if found_inf is None else found_inf.data_ptr()
    launches = [one._replace(kind=(*one.kind[:2], at, infinite)) for one in plan.launches]
    cuda_step.launch_at(sort, sort.more, len(plan.rows), launches)
