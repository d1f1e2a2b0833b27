"""``dot_interaction`` on a GPU: the addresses of T's rows, and the launches.

``csrc/cuda/dot_interaction.cu`` reads every feature row by its address and stride, so nothing is
stacked. It is compiled for each :class:`Class`: the shape, the dtypes, and the width of loads.
Between calls only addresses change; they are uploaded as one table. For few rows there are kernels
on tensor cores (:mod:`.dot_warps`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime import aligned
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions import dot_warps
from recast.runtime.interactions.dot_pairs import Pairs, pairs_of
from recast.runtime.recorded import recording

CONDITION = (
    "float32, float16 and bfloat16 features whose rows, and products, fit into 96 KiB of shared"
    " memory; tensor cores for 16-bit features, and for float32 where TF32 is allowed"
)
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as RECAST_IN and RECAST_OUT
TF32 = 3  # RECAST_ELEMENT also knows
_INTS = frozenset((torch.int64, torch.int32))

_SHARED = 96 << 10  # bytes per block; every architecture from sm_80 on has them
_GOAL = 24 << 10  # so that several blocks share a multiprocessor
_MOST_SAMPLES = 32
_BLOCK = 128
_MOST = 2**31 - 1


# ---------------------------------------------------------------- what a launch is compiled for


class Class(NamedTuple):
    """The macros of dot_interaction.cu, but for the number of samples, which follows."""

    features: int
    dim: int
    pairs: int
    in_: int
    element: int
    out: int
    vec: int


class Compiled(NamedTuple):
    """Both kernels of a class, and the shared bytes per block of each."""

    forward: Kernel
    backward: Kernel
    samples: int
    forward_bytes: int
    backward_bytes: int


@lru_cache(maxsize=1024)
def compiled(of: Class, count: int, table: int | None = None) -> Compiled | None:
    """The kernels of a class with ``count`` pairs; None if one sample is too large for them.

    ``table``: the dtype of tables that rows are looked up in; None: all rows are given.
    """
    multiple, size = (16 if of.element else 4), (2 if of.element in (1, 2) else 4)
    rows = _up(of.features, multiple)
    kept = rows * (_up(of.dim, multiple) * size + 16)
    products = of.features**2 if of.pairs == 0 else count
    forward = _up(kept, 16) + _up(4 * products, 16)
    backward = _up(kept, 16) + _up(rows * (rows * size + 16), 16)
    most = max(forward, backward)
    if most > _SHARED:
        return None
    samples = max(1, min(_GOAL // most, _MOST_SAMPLES))
    defines = {f"RECAST_{name.upper().strip('_')}": value for name, value in of._asdict().items()}
    defines |= {"RECAST_SAMPLES": samples, "RECAST_BLOCK": _BLOCK}
    if table is None:
        program = nvrtc.program("dot_interaction.cu", defines=defines)
    else:
        program = nvrtc.program("dot_gathered.cu", defines=defines | {"RECAST_TABLE": table})
    kernels = Kernel(program, "dot_forward"), Kernel(program, "dot_backward")
    return Compiled(*kernels, samples, samples * forward, samples * backward)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---------------------------------------------------------------- one call


class Rows(NamedTuple):
    """Where the rows of T lie."""

    shapes: list[torch.Size]
    counts: list[int]  # rows of each feature
    at: array[int]  # (address, stride) of each row
    bits: int  # of all addresses and of all strides in bytes, for their common alignment


def rows_of(features: Sequence[Tensor]) -> Rows | None:
    """The rows of features (B, D) or (B, f, D) of one dtype on one device; None for any other."""
    first = features[0]
    if first.dim() < 2:
        return None
    dtype, size, where = first.dtype, first.element_size(), first.get_device()
    batch, dim = first.shape[0], first.shape[-1]
    flat, bits = (batch, dim), 0
    shapes: list[torch.Size] = []
    counts, at = [1] * len(features), array("q")
    for k, f in enumerate(features):
        shape, strides, address = f.shape, f.stride(), f.data_ptr()
        if f.dtype != dtype or f.get_device() != where or len(shape) < 2:
            return None
        if strides[-1] != 1 and dim > 1:
            return None
        if shape == flat:
            at.append(address)
            at.append(strides[0])
        elif len(shape) == 3 and shape[0] == batch and shape[2] == dim:
            counts[k], step = shape[1], strides[1] * size
            for r in range(shape[1]):
                at.extend((address + r * step, strides[0]))
            bits |= step
        else:
            return None
        bits |= address | strides[0] * size
        shapes.append(shape)
    return Rows(shapes, counts, at, bits)


class Prepared(NamedTuple):
    """The arguments as the kernels take them."""

    features: Sequence[Tensor]
    dense: Tensor | None
    rows: Rows | None
    products: torch.dtype  # what features are rounded to as they are read


def prepared(
    features: Sequence[Tensor], dense: Tensor | None, cast: torch.dtype | None
) -> Prepared:
    """The arguments as the kernels take them; what has to change is recorded by autograd.

    ``cast``: what autocast rounds float32 to, else None. Features of one dtype stay as they are,
    also under autocast: the kernels round as they read. Of several dtypes they are promoted, under
    autocast to whichever of the two is that of most rows. The dense part gets the dtype of the
    output. Columns that are not neighbours in memory are copied.
    """
    done: dict[tuple[int, torch.dtype], Tensor] = {}

    def one(t: Tensor, to: torch.dtype) -> Tensor:
        if t.dtype == to and t.dim() and (t.stride(-1) == 1 or t.shape[-1] == 1):
            return t
        if (id(t), to) not in done:
            done[id(t), to] = t.to(to).contiguous()
        return done[id(t), to]

    rows, dtype = rows_of(features), features[0].dtype
    if rows is None:
        dtype = _common(features, cast)
        features = [one(f, dtype) for f in features]
        rows = rows_of(features)
    products = cast if cast is not None and dtype in CODES else dtype
    if dense is not None:
        dense = one(dense, torch.promote_types(products, dense.dtype))
    return Prepared(features, dense, rows, products)


def _common(features: Sequence[Tensor], cast: torch.dtype | None) -> torch.dtype:
    """The dtype that features of several are read in."""
    widest = reduce(torch.promote_types, (f.dtype for f in features))
    if cast is None or widest != torch.float32 or {f.dtype for f in features} - {widest, cast}:
        return widest
    counts = {f.dtype: 0 for f in features}
    for f in features:
        counts[f.dtype] += f.shape[1] if f.dim() == 3 else 1
    return max(counts, key=counts.__getitem__)


@dataclass(slots=True)
class Interaction:
    """One call as the kernels read it: addresses, which hold as long as the tensors live."""

    gpu: Gpu
    rows: Rows
    dtype: torch.dtype  # of the features
    dense: tuple[int, int, int]  # address, stride and width
    out: torch.dtype
    pad: int
    pairs: Pairs
    kernels: Compiled
    table: Tensor | None = None  # the rows, on the device
    sources: tuple[Argument, ...] = ()  # of rows that are looked up: for dot_gathered.cu
    aligned: bool = False  # rows of the result are zero-padded and aligned to 16 bytes
    warps: dot_warps.Warps | None = None  # for few rows, all of one dtype

    def reads(self, features: Sequence[Tensor]) -> bool:
        """Whether these are the features, where they were."""
        place = 0
        for f, count in zip(features, self.rows.counts, strict=True):
            if f.data_ptr() != self.rows.at[place]:
                return False
            place += 2 * count
        return True

    def forward(self) -> Tensor:
        """The result: (B, width + pairs + pad)."""
        batch, pairs = self.rows.shapes[0][0], self.pairs
        address, stride, width = self.dense
        columns = width + pairs.count + self.pad
        if self.aligned:
            out = aligned.mark(aligned.empty(batch, columns, self.out, self.gpu.device))
        else:
            out = torch.empty((batch, columns), dtype=self.out, device=self.gpu.device)
        if not batch or not columns:
            return out
        by = aligned.stride(columns, self.out) if self.aligned else columns
        pad = self.pad + by - columns
        if self.warps is not None and self.warps.launch_forward(
            self.gpu, self._rows(), self.dense, pad, batch, (out.data_ptr(), by), self.sources
        ):
            return out
        self._launch(
            self.kernels.forward,
            self.kernels.forward_bytes,
            c_void_p(address), c_int64(stride), c_int32(width),
            c_void_p(pairs.lists[0].data_ptr() if pairs.lists else None),
            c_int32(pairs.count), c_int32(pad), c_int32(batch),
            c_void_p(out.data_ptr()), c_int64(by), *self.sources,
        )  # fmt: skip
        return out

    def backward(self, grad: Tensor, same: int, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradient of each feature that ``needs`` one; ``grad`` has contiguous rows.

        ``same``: the feature that is the dense part and gets its gradient as well, or -1. It gets
        memory of its own, since what made it is often a product that wants its rows so.
        """
        batch = self.rows.shapes[0][0]
        grads, table = self._allocate(same, needs)
        if not batch or not table:
            return grads
        into = self.gpu.upload(table)
        width, row = self.dense[2], sum(self.rows.counts[:same]) if same >= 0 else -1
        if self.warps is not None and self.warps.launch_backward(
            self.gpu, self._rows(), (grad.data_ptr(), grad.stride(0)), width, batch, row,
            c_void_p(into.data_ptr()), self.sources,
        ):  # fmt: skip
            return grads
        lists = [c_void_p(t.data_ptr()) for t in self.pairs.lists[1:]] or [c_void_p(None)] * 3
        self._launch(
            self.kernels.backward,
            self.kernels.backward_bytes,
            c_void_p(grad.data_ptr()), c_int64(grad.stride(0)), c_int32(width),
            *lists, c_int32(self.pairs.lists[1].shape[0] if self.pairs.lists else 0),
            c_int32(batch), c_int32(row),
            c_void_p(into.data_ptr()), *self.sources,
        )  # fmt: skip
        return grads

    def _launch(self, kernel: Kernel, shared: int, *arguments: Argument) -> None:
        recorded = recording.current()
        if recorded is not None:
            recorded.keep(self.pairs)
        blocks = -(-self.rows.shapes[0][0] // self.kernels.samples)
        self.gpu.launch(kernel, (blocks, 1, 1), (_BLOCK, 1, 1), shared, (self._rows(), *arguments))

    def _rows(self) -> c_void_p:
        """Their addresses and strides, on the device."""
        if self.table is None:
            self.table = self.gpu.upload(self.rows.at)
        return c_void_p(self.table.data_ptr())

    def _allocate(self, same: int, needs: Sequence[bool]) -> tuple[list[Tensor | None], array[int]]:
        """Adjacent gradients of the features that need one, and their rows for the kernel."""
        shapes, counts = self.rows.shapes, self.rows.counts
        batch, dim = shapes[0][0], shapes[0][-1]
        shared = [k for k, need in enumerate(needs) if need and k != same]
        rows = sum([counts[k] for k in shared])
        grads: list[Tensor | None] = [None] * len(counts)
        starts, strides = [0] * len(counts), [0] * len(counts)
        step = dim * self.dtype.itemsize
        if rows:
            whole = self._empty((batch, rows, dim))
            if rows == len(shared):
                cut = torch.unbind(whole, 1)
            else:
                cut = torch.split_with_sizes(whole, [counts[k] for k in shared], 1)
            start = whole.data_ptr()
            for k, part in zip(shared, cut, strict=True):
                grads[k] = part if part.dim() == len(shapes[k]) else part.view(shapes[k])
                starts[k], strides[k] = start, rows * dim
                start += counts[k] * step
        if same >= 0 and needs[same]:
            grads[same] = alone = self._empty(tuple(shapes[same]))
            starts[same], strides[same] = alone.data_ptr(), counts[same] * dim
        if not any(starts):
            return grads, array("q")
        places = zip(starts, strides, counts, strict=True)
        table = [(at + r * step if at else 0, by) for at, by, count in places for r in range(count)]
        return grads, array("q", chain.from_iterable(table))

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.gpu.device)


def interaction(
    gpu: Gpu, given: Prepared, li: Tensor, lj: Tensor, pad: int, aligned: bool = False
) -> Interaction | None:
    """The call; None if the kernels do not support it."""
    first, dense, rows, products = given.features[0], given.dense, given.rows, given.products
    if rows is None or not rows.at:
        return None
    (batch, *_, dim), dtype = first.shape, first.dtype
    beside, out = (0, 0, 0), products
    if dense is not None:
        if dense.dim() != 2 or dense.shape[0] != batch or dense.device != first.device:
            return None
        beside, out = (dense.data_ptr(), dense.stride(0), dense.shape[1]), dense.dtype
    if not dim or pad < 0 or batch > _MOST or not {dtype, products, out} <= CODES.keys():
        return None
    if not {li.dtype, lj.dtype} <= _INTS or li.dim() != 1 or li.shape != lj.shape:
        return None
    features = len(rows.at) // 2
    pairs = pairs_of(gpu, li, lj, features)
    if pairs is None or beside[2] + pairs.count + pad > _MOST:
        return None
    size, vec = dtype.itemsize, 16 // dtype.itemsize
    while dim % vec or rows.bits % (vec * size):
        vec //= 2
    element = CODES[products]
    if dtype == products == torch.float32 and allows_tf32():
        element = TF32
    of = Class(features, dim, pairs.kind, CODES[dtype], element, CODES[out], vec)
    kernels = compiled(of, pairs.count)
    if kernels is None:
        return None
    made = Interaction(gpu, rows, dtype, beside, out, pad, pairs, kernels, aligned=aligned)
    if {dtype, products} == {out} and vec * size == 16:
        made.warps = dot_warps.compiled(features, dim, pairs.kind, pairs.count, element)
    return made


def allows_tf32() -> bool:
    """Whether torch's settings allow TF32 in products of float32 matrices."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
