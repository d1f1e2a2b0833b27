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
from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime import checked, device
from recast.runtime.embedding import by_samples
from recast.runtime.embedding.call import MODES, Call, Found, allocate, check, check_values
from recast.runtime.gpu import columns as columns_cuda
from recast.runtime.gpu import gpu, nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded import recording

CONDITION = (
    "float32, float16 and bfloat16 tables with contiguous rows, fewer than 2^32 - 1 of them; a call"
    " with any other table runs on torch's own kernels"
)
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as RECAST_TABLE and RECAST_OUT
BLOCK = 256
LONG = 512  # bags of at least so many ids are summed by a whole block

_UNDER_WAY = 4  # reads in flight per lane
_FULL = 12  # blocks per multiprocessor that keep it busy; three run at once

_WIDE_IDS, _WIDE_OFFSETS, _ALIGNED_OUT = 1, 2, 4
_MOST_ROWS, _MOST_STRIDE = 2**32 - 2, 2**31 - 1
_FORMS = 64  # kept per call site

# The columns of a lookup; see struct Lookup of embedding_forward.cu.
_FIELDS = 19
(
    _TABLE, _ROWS, _DIM, _STRIDE, _IDS, _N_IDS, _OFFSETS, _N_OFFSETS, _FIXED, _WEIGHTS, _BAGS,
    _MODE, _PADDING, _FLAGS, _OUT, _OUT_STRIDE, _WINNER, _FIRST_BLOCK, _NUMBER,
) = range(_FIELDS)  # fmt: skip


class Class(NamedTuple):
    """What the lookups of one launch have in common: the macros of embedding_forward.cu."""

    table: int
    out: int
    vec: int
    lanes: int
    chunks: int
    max: bool
    bags: int
    long: int

    def kernel(self) -> Kernel:
        return _kernel(self)

    def rounds(self, blocks: int, multiprocessors: int) -> int:
        """For how many rounds a warp reads its ids at once, a power of two. ``blocks``: how many
        there would be with one round each.

        More rounds mean less waiting, but fewer blocks with more work each.
        """
        bags, rounds = 32 // self.lanes * self.bags, 1  # bags of a warp in a round
        most = 1 if self.max or bags >= 32 else min(8, 32 // bags)
        while 2 * rounds <= most and blocks >= 2 * rounds * _FULL * multiprocessors:
            rounds *= 2
        return rounds


@lru_cache(maxsize=1024)
def _kernel(of: Class) -> Kernel:
    defines = {f"RECAST_{name.upper()}": value for name, value in of._asdict().items()}
    program = nvrtc.program("embedding_forward.cu", defines={**defines, "RECAST_BLOCK": BLOCK})
    return Kernel(program, "embedding_forward")


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

    def __init__(self, call: Call, classes: Sequence[Class]) -> None:
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
        self.launches: list[tuple[Class, int, int]] = []  # class, first lookup, past the last
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
        pooled, padding = call.layout.mode[k] != "none", call.padding(k)
        words[at + _ROWS], words[at + _DIM] = weight.shape
        words[at + _STRIDE] = weight.stride(0)
        words[at + _FIXED] = call.ids[k].shape[1] if pooled and offsets is None else 1
        words[at + _MODE] = MODES[call.layout.mode[k]]
        words[at + _PADDING] = padding if pooled and padding is not None else -1
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
            classes = _classes(call, self.gpu)
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


def _fixed(call: Call, k: int) -> int:
    """Ids per bag of lookup k; 0 if it has offsets, 1 if it is not pooled."""
    if call.layout.mode[k] == "none":
        return 1
    return call.ids[k].shape[1] if call.offsets[k] is None else 0


def _classes(call: Call, on: Gpu) -> list[Class] | None:
    """The class of each lookup; None if one has none, or its tensors are not on that GPU."""
    index = -1 if on.device.index is None else on.device.index
    if call.columns is not None and call.columns.dtype not in CODES:
        return None
    tensors = (*call.ids, *call.offsets, *call.per_sample_weights, *call.others)
    if any(x is not None and x.get_device() != index for x in tensors):
        return None
    if not all(takes(w) and w.get_device() == index for w in call.weights):
        return None
    return [_class(call, k) for k in range(len(call.ids))]


def takes(weight: Tensor) -> bool:
    """Whether the kernels can read this table."""
    rows, dim = weight.shape
    return (
        weight.dtype in CODES
        and weight.layout is torch.strided
        and rows <= _MOST_ROWS
        and weight.stride(0) <= _MOST_STRIDE
        and (weight.stride(1) == 1 or dim <= 1)
    )


def _class(call: Call, k: int) -> Class:
    weight, mode = call.weight(k), call.layout.mode[k]
    dim, size, most = weight.shape[1], weight.itemsize, 16 // weight.itemsize
    vec = most
    while dim % vec or weight.stride(0) % vec or weight.data_ptr() % (vec * size):
        vec //= 2
    wide = -(-max(dim, 1) // vec)  # lanes that would read a whole row at once
    lanes = min(32, 1 << (wide - 1).bit_length())
    chunks = min(4, 1 << (-(-wide // lanes) - 1).bit_length())
    fixed = _fixed(call, k)
    may_be_long = mode in ("sum", "mean") and (fixed == 0 or fixed >= LONG)
    may_be_single = mode != "max" and fixed <= 1
    return Class(
        CODES[weight.dtype],
        CODES[call.dtype(k)],
        vec,
        lanes,
        chunks,
        mode == "max",
        _UNDER_WAY // chunks if may_be_single else 1,
        LONG if may_be_long else 0,
    )


def _capturing(on: Gpu) -> bool:
    return on.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _wait(on: Gpu) -> None:
    if on.device.type == "cuda":
        torch.cuda.current_stream(on.device).synchronize()


# ---------------------------------------------------------------- gradient of per-sample weights


@lru_cache(maxsize=64)
def _weight_grad(table: int, grad: int, lanes: int) -> Kernel:
    defines = {
        "RECAST_TABLE": table, "RECAST_GRAD": grad, "RECAST_LANES": lanes, "RECAST_BLOCK": BLOCK,
    }  # fmt: skip
    program = nvrtc.program("embedding_weight_grad.cu", defines=defines)
    return Kernel(program, "embedding_weight_grad")


def sample_weights(call: Call, k: int, grad: Tensor, on: Gpu) -> Tensor | None:
    """The gradient of the per-sample weights of lookup ``k``, shaped like its ids.

    ``grad``: (bags, dim). None if the kernel does not take the table or the gradient.
    """
    weight, ids, offsets = call.weight(k), call.ids[k].contiguous(), call.offsets[k]
    if not takes(weight) or grad.dtype not in CODES:
        return None
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    if offsets is not None:
        offsets = offsets.contiguous()
    out = torch.empty(ids.shape, dtype=weight.dtype, device=ids.device)
    dim, padding, count = weight.shape[1], call.padding(k), ids.numel()
    lanes = min(32, 1 << (max(dim, 1) - 1).bit_length())
    blocks = -(-count // (BLOCK // lanes))
    arguments: list[Argument] = [
        c_void_p(weight.data_ptr()), *map(c_int64, (*weight.shape, weight.stride(0))),
        c_void_p(ids.data_ptr()), c_int32(ids.dtype is torch.int64), c_int64(count),
        c_void_p(None if offsets is None else offsets.data_ptr()),
        c_int32(offsets is not None and offsets.dtype is torch.int64),
        c_int64(0 if offsets is None else len(offsets)), c_int64(max(1, ids.shape[-1])),
        c_int64(len(grad)), c_int64(-1 if padding is None else padding),
        c_void_p(grad.data_ptr()), c_int64(grad.stride(0)), c_void_p(out.data_ptr()),
    ]  # fmt: skip
    kernel = _weight_grad(CODES[weight.dtype], CODES[grad.dtype], lanes)
    on.launch(kernel, (blocks, 1, 1), (BLOCK, 1, 1), 0, arguments)
    return out
