"""``pair_products`` on a GPU: vectors are read in place, by address and stride.

``csrc/cuda/pair_forward.cu`` and ``pair_backward.cu`` are compiled for the dtype, the sum and the
width of loads. With P pairs of F vectors of D elements, forward reads F D and writes P D, P, D or 1
elements, depending on the sum; the products themselves (P D) are written by a plain kernel whose
blocks write adjacent memory. Backward reads both and writes F D. A block reads its part of the
gradient into shared memory, once, as both vectors of a pair need it.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel, pointer
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES, rows_of
from recast.runtime.interactions.index_copies import on_device

CONDITION = (
    "float32, float16 and bfloat16 features of one dtype, no autocast, whose vectors of a sample"
    " fit into 96 KiB of shared memory, with as many gradients"
)
_BLOCK, _LIST_BLOCK = 128, 256  # threads
_SHARED = 96 << 10  # bytes per block; every architecture from sm_80 on has them
_GOAL = 14 << 10  # of what a block reads ahead
_ALONE_GOAL = 16 << 10  # and where a thread has a pair alone: measured on an H200, as the others
_LISTS = 32 << 10  # of pairs that are worth shared memory
_BLOCKS, _WIDE_BLOCKS = 7, 4  # of a multiprocessor, at most: registers are there for those
_ALONE_BLOCKS = 8  # sums over columns
_ROUNDS = 16  # vectors that a thread of pair_rows writes a part of
_LEAST_ROOM, _OF_BLOCK = 100 << 10, 1 << 10  # bytes of a multiprocessor, and what a block takes
_SECTOR = 32  # bytes that memory is read by
_MOST = 2**31 - 2**20  # int32, less what the last blocks count past the end
_MOST_PAIRS = 1 << 24  # of which a block counts those of some samples
NONE, COLUMNS, PAIRS = range(3)  # of RECAST_SUM

_by_rows = True


@contextlib.contextmanager
def without_rows() -> Iterator[None]:
    """Inside, ``pair_forward`` writes products that are not summed too; used to measure what
    ``pair_rows`` gains.
    """
    global _by_rows
    before, _by_rows = _by_rows, False
    try:
        yield
    finally:
        _by_rows = before


@lru_cache(maxsize=256)
def _kernels(dtype: int, sum: int, vec: int) -> tuple[Kernel, Kernel, Kernel]:
    defines = {"RECAST_IN": dtype, "RECAST_SUM": sum, "RECAST_VEC": vec}
    forward = nvrtc.program("pair_forward.cu", defines=defines)
    backward = nvrtc.program("pair_backward.cu", defines=defines)
    return (
        Kernel(forward, "pair_forward"), Kernel(backward, "pair_lists"),
        Kernel(backward, "pair_backward"),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _rows_kernel(dtype: int, vec: int) -> Kernel:
    defines = {"RECAST_IN": dtype, "RECAST_SUM": NONE, "RECAST_VEC": vec}
    return Kernel(nvrtc.program("pair_forward.cu", defines=defines), "pair_rows")


class _Form(NamedTuple):
    """How a launch is cut; see the kernels for what each number means."""

    samples: int
    pitch: int
    copy_lanes: int
    lanes: int
    columns: int
    in_shared: bool
    shared: int  # bytes


@lru_cache(maxsize=256)
def _form(
    sum: int,
    size: int,
    vec: int,
    vectors: int,
    dim: int,
    pairs: int,
    backward: bool,
    weighted: bool,
) -> _Form:
    """For elements of ``size`` bytes; ``weighted``: weights have gradients, sums over columns."""
    columns = dim
    if backward and sum == NONE and not weighted:
        while pairs * columns * size > 3 * _GOAL and columns * size > _SECTOR:
            if columns % (2 * vec):
                break
            columns //= 2
    copy_lanes = _power(-(-columns // vec))
    alone = sum == COLUMNS and not backward and pairs >= _BLOCK // 4
    # Of those alone, consecutive threads read consecutive vectors: from banks of their own.
    pitch = columns
    if alone and columns // vec % 2 == 0 and 2 * size * vectors * (columns + vec) <= _SHARED - 32:
        pitch += vec
    values, lanes = size * vectors * pitch, 1 if alone else copy_lanes
    each = {NONE: columns * size, COLUMNS: size}.get(sum, 0) * pairs if backward else 0
    lists = 4 * (4 * pairs + vectors + 1 if backward else pairs)
    in_shared = lists <= _LISTS and 2 * (values + each) + lists + 64 <= _SHARED
    goal = _ALONE_GOAL if alone else _GOAL
    most = max(1, min(_BLOCK, goal // (values + each * in_shared)))
    samples = _samples(most, lanes * (vectors if backward else pairs))
    shared = 2 * _up(samples * values, 16)
    shared += (2 * _up(samples * each, 16) + lists) * in_shared
    return _Form(samples, pitch, copy_lanes, lanes, columns, in_shared, shared)


def _samples(most: int, work: int) -> int:
    """How many of up to ``most`` samples leave the fewest threads of a block without work."""
    return min(range(most, 0, -1), key=lambda n: -(-n * work // _BLOCK) / n)


def _power(count: int) -> int:
    """The threads for so many packs: a power of two up to 32."""
    return min(32, 1 << (count - 1).bit_length())


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Products:
    """A call as the kernels read it, with the C++ one's interface. Its tensors must live on."""

    gpu: Gpu
    at: array[int]  # (address, stride) of each vector, left ones first
    bits: int  # of all addresses and of all strides in bytes, for their common alignment
    counts: tuple[int, int]  # vectors on the left and on the right
    batch: int
    dim: int
    pairs: tuple[Tensor, Tensor]
    weight: Tensor | None
    dtype: torch.dtype

    def forward(self, out: Tensor, sum: int, threads: int) -> None:
        """Write the result to ``out``, contiguous."""
        vec = self._vec(0)
        if sum == NONE and _by_rows and self._rows(vec, out):
            return
        form = self._form(sum, vec, False, False)
        kernel = _kernels(CODES[self.dtype], sum, vec)[0]
        self._launch(kernel, form, _blocks(sum, vec), (c_void_p(out.data_ptr()),))

    def _rows(self, vec: int, out: Tensor) -> bool:
        """The same by a plain kernel, where that serves."""
        lanes, pairs = self.dim // vec, len(self.pairs[0])
        each = _BLOCK // lanes * _ROUNDS if lanes <= 32 else 0
        if self.weight is not None or not each or lanes & (lanes - 1):
            return False
        blocks = -(-self.batch * pairs // each)
        if blocks > _MOST:
            return False
        table = self.gpu.upload(self.at)
        arguments: tuple[Argument, ...] = (
            pointer(table), *map(c_int32, self.counts), *map(pointer, self.pairs),
            *map(c_int32, (pairs, self.dim, self.batch, lanes)), pointer(out),
        )  # fmt: skip
        kernel = _rows_kernel(CODES[self.dtype], vec)
        self.gpu.launch(kernel, (blocks, 1, 1), (_BLOCK, 1, 1), 16 * each, arguments)
        return True

    def backward(
        self, grad: Tensor, sum: int, left: list[Tensor], right: list[Tensor],
        weight: Tensor | None, threads: int,
    ) -> None:  # fmt: skip
        """Write the gradients of all vectors of a side to one (batch, vectors, dim)."""
        strides = grad.stride()[: 2 if sum == NONE else 1]
        read_wide = sum in (NONE, PAIRS)
        vec = self._vec(_together(grad, strides) if read_wide else 0)
        form = self._form(sum, vec, True, weight is not None)
        _, lists, backward = _kernels(CODES[self.dtype], sum, vec)
        vectors, pairs = len(self.at) // 2, len(self.pairs[0])
        found = torch.empty(4 * pairs + vectors + 1, dtype=torch.int32, device=self.gpu.device)
        of_vectors = c_void_p(found.data_ptr()), c_void_p(found.data_ptr() + 16 * pairs)
        self.gpu.launch(
            lists, (vectors, 1, 1), (_LIST_BLOCK, 1, 1), 0,
            (*map(pointer, self.pairs), c_int32(pairs), *map(c_int32, self.counts), *of_vectors),
        )  # fmt: skip
        into = [c_void_p(t[0].data_ptr() if t else None) for t in (left, right)]
        rest: tuple[Argument, ...] = (
            pointer(grad), *map(c_int64, grad.stride()[:2]), *of_vectors, *into,
            pointer(weight),
        )  # fmt: skip
        self._launch(backward, form, _blocks(sum, vec), rest)

    def _vec(self, bits: int) -> int:
        """How many columns a thread may read at once."""
        vec, size = 16 // self.dtype.itemsize, self.dtype.itemsize
        while self.dim % vec or (self.bits | bits) % (vec * size):
            vec //= 2
        return vec

    def _form(self, sum: int, vec: int, backward: bool, weighted: bool) -> _Form:
        vectors, size = len(self.at) // 2, self.dtype.itemsize
        return _form(sum, size, vec, vectors, self.dim, len(self.pairs[0]), backward, weighted)

    def _launch(self, kernel: Kernel, form: _Form, blocks: int, rest: Sequence[Argument]) -> None:
        rows, weight = self.gpu.upload(self.at), self.weight
        front: tuple[Argument, ...] = (
            pointer(rows), *map(c_int32, self.counts), *map(pointer, self.pairs), pointer(weight),
            c_int64(0 if weight is None else weight.stride(0)),
            c_int32(len(self.pairs[0])), c_int32(self.dim), c_int32(self.batch),
            c_int32(form.samples), c_int32(form.pitch), c_int32(form.copy_lanes),
            c_int32(form.lanes), c_int32(form.columns), c_int32(form.in_shared),
        )  # fmt: skip
        across = -(-self.dim // form.columns)
        # All blocks at once: each goes on until all samples are done.
        blocks = max(1, min(blocks, _room(self.gpu.device) // (form.shared + _OF_BLOCK)))
        most = self.gpu.multiprocessors * blocks
        tiles = -(-self.batch // form.samples)
        grid = min(tiles, -(-most // across)), across, 1
        self.gpu.launch(kernel, grid, (_BLOCK, 1, 1), form.shared, (*front, *rest))


@lru_cache(maxsize=64)
def _room(where: torch.device) -> int:
    """Bytes of shared memory of a multiprocessor."""
    if where.type != "cuda":
        return _LEAST_ROOM
    properties = torch.cuda.get_device_properties(where)
    return getattr(properties, "shared_memory_per_multiprocessor", _LEAST_ROOM)


def _blocks(sum: int, vec: int) -> int:
    if vec > 4:
        return _WIDE_BLOCKS
    return _ALONE_BLOCKS if sum == COLUMNS else _BLOCKS


def _together(tensor: Tensor, strides: Sequence[int]) -> int:
    """The bits of the address and of strides in bytes."""
    bits = tensor.data_ptr()
    for stride in strides:
        bits |= stride * tensor.itemsize
    return bits


def products(
    gpu: Gpu, left: list[Tensor], right: list[Tensor], li: Tensor, lj: Tensor,
    weight: Tensor | None,
) -> Products | None:  # fmt: skip
    """The call; None if the kernels do not support it. Pairs with an index out of range are
    skipped: checking ``li`` and ``lj`` would wait for the device.
    """
    dtype, rows, others = left[0].dtype, rows_of(left), rows_of(right) if right else None
    if rows is None or (right and (others is None or right[0].dtype != dtype)):
        return None
    if dtype not in CODES or any(t.dtype != torch.int64 or not t.is_contiguous() for t in (li, lj)):
        return None
    where = left[0].device
    places, others_places = on_device(li, where), on_device(lj, where)
    if places is None or others_places is None or any(t.device != where for t in right[:1]):
        return None
    if weight is not None and (weight.dtype != dtype or weight.stride(-1) != 1):
        return None
    at = rows.at + others.at if others is not None else rows.at
    bits = rows.bits | (0 if others is None else others.bits)
    batch, dim, vectors = left[0].shape[0], left[0].shape[-1], len(at) // 2
    each = 2 * 4 * dim * vectors
    if not 0 < batch <= _MOST or not 0 < len(li) <= _MOST_PAIRS or not dim or each > _SHARED:
        return None
    counts = len(rows.at) // 2, 0 if others is None else len(others.at) // 2
    return Products(gpu, at, bits, counts, batch, dim, (places, others_places), weight, dtype)
