"""``gathered_dots`` on a GPU: where each row comes from, given or looked up by the kernel itself.

``csrc/cuda/dot_gathered.cu`` reads looked-up rows from their tables, in forward and again in
backward; ``dot_warps_gathered.cu`` does so for few rows, on tensor cores. All else is as in
:mod:`~recast.runtime.interactions.dot_cuda`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime import checked
from recast.runtime.embedding import cuda_classes
from recast.runtime.embedding.call import Call, check_values
from recast.runtime.gpu.cuda_launch import pointer
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions import dot_warps
from recast.runtime.interactions.dot_cuda import (
    CODES,
    TF32,
    Class,
    Interaction,
    Rows,
    allows_tf32,
    compiled,
    rows_of,
)
from recast.runtime.interactions.dot_pairs import pairs_of
from recast.runtime.recorded import recording

CONDITION = (
    "sums and means of float32, float16 or bfloat16 tables of one dtype and width, without factors;"
    " given features of the dtype that the lookups would be written in; else as dot_interaction"
)

_WIDE_IDS, _WIDE_OFFSETS, _MEAN = 1, 2, 4  # as in dot_source.cuh
_MOST = 2**31 - 1


class Ready(NamedTuple):
    """One call of the kernels, and what must live until it is launched."""

    interaction: Interaction
    words: Tensor | None  # of errors: see checked.Counts
    held: list[Tensor]


def takes(call: Call) -> bool:
    """Whether the kernels support these lookups, whatever the given features."""
    first, width = call.weights[0], call.weights[0].shape[1]
    if any(w is not None for w in call.per_sample_weights) or any(call.layout.sparse):
        return False
    if not {*call.layout.mode} <= {"sum", "mean", "none", "total"}:
        return False
    for k, ids in enumerate(call.ids):
        if call.layout.mode[k] == "none" and ids.dim() != 1:
            return False
    return all(
        cuda_classes.takes(w) and w.dtype == first.dtype and w.shape[1] == width
        and w.device == first.device
        and w.shape[0] > 0  # an empty table has no address, by which the kernel would know it
        for w in call.weights
    )  # fmt: skip


def ready(
    gpu: Gpu,
    call: Call,
    features: Sequence[Tensor],
    order: Sequence[int],
    dense: Tensor | None,
    pairs: tuple[Tensor, Tensor],
    pad: int,
    cast: torch.dtype | None,
    counting: bool,
    aligned: bool = False,
) -> Ready | None:
    """The call; None if the kernels do not support it. ``counting``: count out-of-range ids.

    ``aligned``: rows of the result are aligned to 16 bytes.
    """
    rows, dtype = _rows(call, features, order), call.dtype(0)
    products = cast if cast is not None and dtype in CODES else dtype
    if rows is None or not {dtype, products} <= CODES.keys() or pad < 0:
        return None
    batch, dim = rows.shapes[0][0], rows.shapes[0][1]
    beside, out = (0, 0, 0), products
    if dense is not None:
        fits = dense.dim() == 2 and dense.shape[0] == batch and dense.device == gpu.device
        wanted = torch.promote_types(products, dense.dtype) if fits else None
        if dense.dtype != wanted or wanted not in CODES or dense.stride(1) != 1:
            return None
        beside, out = (dense.data_ptr(), dense.stride(0), dense.shape[1]), dense.dtype
    known = pairs_of(gpu, *pairs, len(order))
    if known is None or not dim or batch > _MOST or beside[2] + known.count + pad > _MOST:
        return None
    element = CODES[products]
    if dtype == products == torch.float32 and allows_tf32():
        element = TF32
    vec = _vec(call, dtype, dim, rows.bits)
    of = Class(len(order), dim, known.kind, CODES[dtype], element, CODES[out], vec)
    kernels = compiled(of, known.count, CODES[call.weights[0].dtype])
    if kernels is None:
        return None
    words, held = _sources(call, order)
    sources = gpu.upload(words)
    counts = _counts(gpu, call) if counting else None
    arguments = (
        c_void_p(sources.data_ptr()), pointer(counts),
    )  # fmt: skip
    made = Interaction(gpu, rows, dtype, beside, out, pad, known, kernels, sources=arguments)
    made.aligned = aligned
    if {dtype, products} == {out} and vec * dtype.itemsize == 16:
        tables = CODES[call.weights[0].dtype]
        made.warps = dot_warps.compiled(len(order), dim, known.kind, known.count, element, tables)
    return Ready(made, counts, [*held, sources])


def _rows(call: Call, features: Sequence[Tensor], order: Sequence[int]) -> Rows | None:
    """All rows in order; looked-up rows have no address."""
    batch, dim, dtype = call.bags(0), call.weights[0].shape[1], call.dtype(0)
    if any(call.bags(k) != batch or call.dtype(k) != dtype for k in range(len(call.ids))):
        return None
    given = rows_of(features) if features else None
    if features:
        if given is None or features[0].dtype != dtype or {*given.counts} != {1}:
            return None
        if features[0].device != call.weights[0].device:
            return None
        if any(tuple(shape) != (batch, dim) for shape in given.shapes):
            return None
    at = array("q")
    for place in order:
        start = -2 * (1 + place)
        at.extend(given.at[start : start + 2] if place < 0 and given is not None else (0, 0))
    shape = torch.Size((batch, dim))
    return Rows([shape] * len(order), [1] * len(order), at, 0 if given is None else given.bits)


def _vec(call: Call, dtype: torch.dtype, dim: int, bits: int) -> int:
    """The most elements that all rows, given and looked up, let be read at once."""
    vec = 16 // dtype.itemsize
    while dim % vec or bits % (vec * dtype.itemsize) or not _aligned(call, vec):
        vec //= 2
    return vec


def _aligned(call: Call, vec: int) -> bool:
    """Whether rows of all tables start where so many elements, or 16 bytes, are read at once."""
    size = call.weights[0].itemsize
    read = min(16, vec * size)
    return not any(w.data_ptr() % read or w.stride(0) * size % read for w in call.weights)


def _sources(call: Call, order: Sequence[int]) -> tuple[array[int], list[Tensor]]:
    """A Source of dot_source.cuh for each row, and what they point to."""
    words, held = array("q"), list[Tensor]()

    def address(t: Tensor) -> int:
        held.append(t if t.is_contiguous() else t.contiguous())
        return held[-1].data_ptr()

    for k in order:
        if k < 0:
            words.extend((0,) * 11)
            continue
        weight, ids, mode = call.weight(k), call.ids[k], call.layout.mode[k]
        offsets = None if mode == "none" else call.offsets[k]
        padding = call.left_out(k)
        flags = _WIDE_IDS * (ids.dtype is torch.int64) | _MEAN * (mode == "mean")
        if offsets is not None:
            flags |= _WIDE_OFFSETS * (offsets.dtype is torch.int64)
        words.extend(
            (
                weight.data_ptr(), weight.shape[0], weight.stride(0), address(ids), ids.numel(),
                0 if offsets is None else address(offsets),
                0 if offsets is None else offsets.shape[0], ids.shape[1] if ids.dim() == 2 else 1,
                -1 if padding is None else padding, flags, k,
            )
        )  # fmt: skip
    return words, held


def _counts(gpu: Gpu, call: Call) -> Tensor:
    """Where the kernel counts ids that it skips; reports those of earlier calls."""
    key = "gathered", gpu
    counts: checked.Counts | None = call.layout.served.get(key)
    if counts is None:
        name = f"gathered_dots of {len(call.ids)} lookups"
        counts = checked.Counts(gpu.counters(4), name, call.layout.table)
        call.layout.served[key] = counts
    counts.look()
    recorded = recording.current()
    if recorded is not None:
        recorded.before_replay(counts.look)
    if checked.is_checked() and recorded is None:
        check_values(call)
    return counts.words
