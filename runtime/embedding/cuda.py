"""``embedding_bags`` on a GPU: lookups are sorted into classes, with one launch per class.

``csrc/cuda/embedding_forward.cu`` is specialised for a class; lookups that share one matrix are
done by samples instead if possible (:mod:`.by_samples`). What depends on dtypes, strides and
alignment is computed once for each form of a call (:class:`_Plan`), what depends on sizes once for
each shape of the batch (:class:`_Sizes`). Each call then only fills in the addresses, one column of
the table of lookups at a time, and uploads that table in one piece.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recast.runtime import checked, device
from recast.runtime.embedding import by_samples
from recast.runtime.embedding.call import MODES, Call, Found, check, check_values
from recast.runtime.embedding.cuda_classes import BLOCK, LookupClass, classes_of
from recast.runtime.embedding.outputs import allocate
from recast.runtime.gpu import columns as columns_cuda
from recast.runtime.gpu import gpu
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded import recording

CONDITION = (
    "float32, float16 and bfloat16 tables with contiguous rows, fewer than 2^32 - 1 of them; a call"
    " with any other table runs on torch's own kernels"
)

_WIDE_IDS, _WIDE_OFFSETS, _ALIGNED_OUT = 1, 2, 4
_FORMS = 64  # kept per call site

# The columns of a lookup; see struct Lookup of embedding_forward.cu.
_FIELDS = 19
(
    _TABLE, _ROWS, _DIM, _STRIDE, _IDS, _N_IDS, _OFFSETS, _N_OFFSETS, _FIXED, _WEIGHTS, _BAGS,
    _MODE, _PADDING, _FLAGS, _OUT, _OUT_STRIDE, _WINNER, _FIRST_BLOCK, _NUMBER,
) = range(_FIELDS)  # fmt: skip


def serving(tensor: Tensor) -> Gpu | None:
    """The GPU that runs these kernels on ``tensor``; None if there is none or they are off."""
    return None if device.held() == "torch" else gpu.serving(tensor)


def forward(call: Call, on: Gpu, winners: bool, apart: bool) -> Found | None:
    """All lookups, one launch per class; None if a tensor has no class or is not on that GPU.

    Outputs have the dtypes of ``call.dtype``. Values are not read: ids outside their tables are
    left out and counted. Raises what :func:`check` raises; in checked mode also IdError, as on the
    CPU.
    """
    site = call.layout.served.get(on)
    if site is None:
        site = call.layout.served[on] = _Site(call, on)
    return site.run(call, winners, apart)


class _Plan:
    """What all calls of one form share: the order of lookups by class, and their constants."""

    def __init__(self, call: Call, classes: Sequence[LookupClass]) -> None:
        layout = call.layout
        kinds = [by_samples.Kind(of.table, of.out, of.vec) for of in classes]
        self.groups = by_samples.groups(call, kinds)
        self.order = [k for group in self.groups for k in group.lookups]
        ahead = len(self.order)
        rest = {*range(len(classes))}.difference(self.order)
        self.order += sorted(rest, key=lambda k: (classes[k], k))
        self.tables = [layout.table[k] for k in self.order]
        self.ragged = any(offsets is not None for offsets in call.offsets)
        self.weighted = any(weights is not None for weights in call.per_sample_weights)
        self.ended = any(layout.include_last_offset)
        self.maxima = [k for k, of in enumerate(classes) if of.max]
        self.kinds = [mode == "none" for mode in layout.mode], layout.include_last_offset
        self.dtypes = [call.dtype(k) for k in range(len(classes))]
        self.widths = [call.weight(k).shape[1] for k in range(len(classes))]
        self.launches: list[tuple[LookupClass, int, int]] = []  # class, first lookup, past the last
        for place, k in enumerate(self.order[ahead:], ahead):
            if place > ahead and classes[k] == classes[self.order[place - 1]]:
                of, first, _ = self.launches[-1]
                self.launches[-1] = of, first, place + 1
            else:
                self.launches.append((classes[k], place, place + 1))
        self.words = array("q", bytes(8 * _FIELDS * len(classes)))
        self.columns = call.columns
        self.starts = {} if call.columns is None else call.columns.starts()
        self.apart = None if call.columns is None else call.columns.apart(len(classes))
        for place, k in enumerate(self.order):
            self._constants(call, k, place * _FIELDS, classes[k].vec)
        before = [word for group in self.groups for word in group.before]
        self.words[_FIRST_BLOCK : ahead * _FIELDS : _FIELDS] = array("q", before)

    def _constants(self, call: Call, k: int, at: int, vec: int) -> None:
        words, weight, offsets = self.words, call.weight(k), call.offsets[k]
        pooled, padding = call.layout.mode[k] != "none", call.left_out(k)
        words[at + _ROWS], words[at + _DIM] = weight.shape
        words[at + _STRIDE] = weight.stride(0)
        words[at + _FIXED] = call.ids[k].shape[1] if pooled and offsets is None else 1
        words[at + _MODE] = MODES[call.layout.mode[k]]
        words[at + _PADDING] = -1 if padding is None else padding
        stride, start = weight.shape[1], 0
        if self.columns is not None and k in self.starts:
            stride, start = self.columns.stride, self.starts[k]
        # VEC divides the width of each row, and allocations are aligned to it.
        words[at + _FLAGS] = 0 if stride % vec or start % vec else _ALIGNED_OUT
        words[at + _FLAGS] |= _WIDE_IDS * (call.ids[k].dtype is torch.int64)
        if offsets is not None:
            words[at + _FLAGS] |= _WIDE_OFFSETS * (offsets.dtype is torch.int64)
        words[at + _OUT_STRIDE] = stride
        words[at + _NUMBER] = k


class _Sizes:
    """What all calls of one form and one batch shape share."""

    def __init__(self, call: Call, plan: _Plan, multiprocessors: int) -> None:
        # The same as Call.bags, in a quarter of the time.
        bags = [
            x.numel() if gathers else x.shape[0] if o is None else o.shape[0] - last
            for x, o, gathers, last in zip(call.ids, call.offsets, *plan.kinds, strict=True)
        ]
        ordered = [bags[k] for k in plan.order]
        self.shapes = list(zip(bags, plan.widths, strict=True))
        self.rows = _rows(call, bags)
        self.words = words = plan.words[:]
        words[_BAGS::_FIELDS] = array("q", ordered)
        words[_N_IDS::_FIELDS] = array("q", [call.ids[k].numel() for k in plan.order])
        if plan.ragged:
            offsets = [call.offsets[k] for k in plan.order]
            counts = [0 if x is None else x.shape[0] for x in offsets]
            words[_N_OFFSETS::_FIELDS] = array("q", counts)
        self.by_samples, first = [], 0
        for group in plan.groups:
            of_group = group, first, self.rows, plan.words[first * _FIELDS + _OUT_STRIDE]
            self.by_samples.append(by_samples.Launch(*of_group, multiprocessors))
            first += len(group.lookups)
        # Kernel, first lookup, how many lookups, blocks, rounds.
        self.launches: list[tuple[Kernel, int, int, int, int]] = []
        for of, first, past in plan.launches:
            groups = BLOCK // of.lanes * of.bags  # bags of a block in a round
            blocks = [max(1, -(-n // groups)) for n in ordered[first:past]]
            rounds = of.rounds(sum(blocks), multiprocessors)
            starts = list(accumulate([-(-n // rounds) for n in blocks], initial=0))
            at = first * _FIELDS + _FIRST_BLOCK
            words[at : past * _FIELDS : _FIELDS] = array("q", starts[:-1])
            self.launches.append((of.kernel(), first, past - first, starts[-1], rounds))


class _Site:
    """What is kept for all calls of one layout on one GPU."""

    def __init__(self, call: Call, on: Gpu) -> None:
        self.gpu = on
        name = f"embedding_bags of {len(call.ids)} lookups"
        self.counts = checked.Counts(on.counters(4), name, call.layout.table)
        self.plans: dict[Any, _Plan | None] = {}
        self.known: dict[Any, tuple[_Plan, _Sizes] | None] = {}

    def run(self, call: Call, winners: bool, apart: bool) -> Found | None:
        counts, recorded = self.counts, recording.current()
        counts.look()
        if recorded is not None:
            recorded.before_replay(counts.look)
        known = self._look_up(call)
        if known is None:
            return None
        waits = checked.is_checked() and not _capturing(self.gpu)
        words = self.gpu.counters(4) if waits else counts.words
        found = self._launch(call, *known, winners, apart, words.data_ptr())
        if waits:
            _wait(self.gpu)
            if words.any():
                check_values(call)
        return found

    def _look_up(self, call: Call) -> tuple[_Plan, _Sizes] | None:
        """The plan and sizes of calls like this one; None if the kernels do not take it."""
        form = (
            call.autocast if call.narrow else None,
            call.columns,
            *[(w.shape, w.stride(), w.dtype, w.get_device(), w.data_ptr() & 15)
              for w in call.weights],
            *[(x.dtype, x.get_device()) for x in call.ids],
            *[x if x is None else (x.dtype, x.get_device()) for x in call.offsets],
            *[x if x is None else (x.dtype, x.get_device(), x.shape)
              for x in call.per_sample_weights],
        )  # fmt: skip
        shapes = (
            *[x.shape for x in call.ids],
            *[x if x is None else x.shape for x in call.offsets],
            *[(x.shape, x.get_device()) for x in call.others],
        )
        key = form, shapes
        try:
            return self.known[key]
        except KeyError:
            pass
        for kept in (self.known, self.plans):
            if len(kept) >= _FORMS:
                kept.clear()
        plan = self._plan(call, form)
        found = self.known[key] = (
            None if plan is None else (plan, _Sizes(call, plan, self.gpu.multiprocessors))
        )
        return found

    def _plan(self, call: Call, form: Any) -> _Plan | None:
        """The plan of all calls that differ from this one in batch sizes only, not in ids a row."""
        rows = [None if x is None else (x.dim(), x.shape[1:]) for x in (*call.ids, *call.offsets)]
        key = form, tuple(rows)
        plan = self.plans.get(key)
        if plan is None or plan.weighted or plan.ended:  # else sizes cannot be wrong
            check(call)
        if key not in self.plans:
            classes = classes_of(call, self.gpu)
            plan = self.plans[key] = None if classes is None else _Plan(call, classes)
        return plan

    def _launch(
        self, call: Call, plan: _Plan, sizes: _Sizes, winners: bool, apart: bool, errors: int
    ) -> Found:
        order, where, words = plan.order, self.gpu.device, sizes.words[:]
        tables = [w.data_ptr() for w in call.weights]
        words[_TABLE::_FIELDS] = array("q", [tables[t] for t in plan.tables])
        ids = [x if x.is_contiguous() else x.contiguous() for x in call.ids]
        words[_IDS::_FIELDS] = array("q", [ids[k].data_ptr() for k in order])
        held = []
        if plan.ragged:
            pairs = zip(call.offsets, plan.kinds[0], strict=True)
            starts = [None if gathers else x for x, gathers in pairs]
            held.append(_put(words, _OFFSETS, starts, order))
        if plan.weighted:
            held.append(_put(words, _WEIGHTS, call.per_sample_weights, order))
        outs, addresses = _outputs(call, plan, sizes, where, apart)
        words[_OUT::_FIELDS] = array("q", [addresses[k] for k in order])
        won: list[Tensor] = []
        if winners and plan.maxima:
            shapes = [sizes.shapes[k] for k in plan.maxima]
            won = [torch.empty(shape, dtype=torch.int64, device=where) for shape in shapes]
            places = dict(zip(plan.maxima, [w.data_ptr() for w in won], strict=True))
            words[_WINNER::_FIELDS] = array("q", [places.get(k, 0) for k in order])
        parts = None if plan.columns is None else columns_cuda.parts_of(plan.columns, call.others)
        beyond = 8 * len(words)
        if parts is not None:
            words.extend(parts.words)
        lookups = self.gpu.upload(words)
        at = lookups.data_ptr()
        if plan.columns is not None:
            placed, matrix = None if parts is None else (parts, at + beyond), outs[0]
            if placed is not None and not sizes.by_samples:
                columns_cuda.write(self.gpu, *placed, plan.columns, matrix)
            for launch in sizes.by_samples:
                own = at + 8 * _FIELDS * launch.first
                launch.run(self.gpu, own, errors, placed, matrix.data_ptr())
                placed = None  # the first launch has written them
        for kernel, first, count, blocks, rounds in sizes.launches:
            arguments = (
                c_void_p(at + 8 * _FIELDS * first), c_int32(count), c_void_p(errors),
                c_int32(rounds),
            )  # fmt: skip
            self.gpu.launch(kernel, (blocks, 1, 1), (BLOCK, 1, 1), 0, arguments)
        return Found(outs, won, by_place=True)


def _rows(call: Call, bags: Sequence[int]) -> int:
    """The number of rows of the matrix of lookups and other tensors; 0 without one."""
    if call.columns is None:
        return 0
    others = [other.shape[0] for other in call.others]
    return call.columns.rows([bags[k] if k >= 0 else others[-1 - k] for k in call.columns.order])


def _outputs(
    call: Call, plan: _Plan, sizes: _Sizes, where: torch.device, apart: bool
) -> tuple[list[Tensor], Sequence[int]]:
    """The outputs, and the address that each lookup is written to."""
    outs = allocate(call, sizes.shapes, plan.dtypes, where, apart, plan.apart)
    if plan.columns is None or plan.apart is None:
        return outs, [out.data_ptr() for out in outs]
    matrix = plan.columns.empty(sizes.rows, where)
    addresses = dict(zip(plan.apart, [out.data_ptr() for out in outs], strict=True))
    first, size = matrix.data_ptr(), matrix.itemsize
    addresses |= {k: first + start * size for k, start in plan.starts.items() if k >= 0}
    return [matrix, *outs], [addresses[k] for k in range(len(addresses))]


def _put(
    words: array[int], column: int, tensors: Sequence[Tensor | None], order: Sequence[int]
) -> list[Tensor | None]:
    """Write the addresses of ``tensors``, 0 for None; returns what must live until the launch."""
    held = [x if x is None or x.is_contiguous() else x.contiguous() for x in tensors]
    found = [0 if x is None else x.data_ptr() for x in held]
    words[column::_FIELDS] = array("q", [found[k] for k in order])
    return held


def _capturing(on: Gpu) -> bool:
    return on.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _wait(on: Gpu) -> None:
    if on.device.type == "cuda":
        torch.cuda.current_stream(on.device).synchronize()
