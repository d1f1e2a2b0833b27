"""Applies sorted row gradients on a GPU: updates and norms, one launch for each class of tables.

A class is one setting of the macros of ``csrc/cuda/row_update.cu`` and ``row_norm.cu``: dtypes, and
how lanes share the columns of a row. Neighbouring tables of one class share a launch.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.rows.cuda_sort import CODES, Sorted, Summed

ACTIONS = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 2, "adam": 3}
ORDERS = {float("inf"): 0, 1.0: 1, 2.0: 2}

_BLOCK = 128
_NARROW = 64  # columns
_TILES = 32  # per block of row_combine
_SHARES = 32  # parts of a table's entries, in table_norms
ROWS = 10  # words of the struct Rows

Pointer = ctypes.c_void_p
Int = ctypes.c_int32


class Target(NamedTuple):
    """What to do with the summed rows of one table.

    states: the action's, all of one dtype. numbers: packed by ``numbers``. stochastic: whether to
    use stochastic rounding. factor: multiplies the gradient, a scalar on the device; grad_scale,
    found_inf: (1,) fp32.
    """

    action: str
    weight: Tensor
    states: tuple[Tensor, ...]
    numbers: bytes
    stochastic: bool = False
    factor: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


_NUMBERS = struct.Struct("<8fQ")


def numbers(
    lr: float,
    eps: float = 0.0,
    scale: float = 1.0,
    betas: tuple[float, float] = (0.0, 0.0),
    decay: float = 0.0,
    l2: float = 0.0,
    seed: int = 0,
) -> bytes:
    """The struct Numbers of row_update.cu, packed."""
    rates = 1 - betas[0], 1 - betas[1]
    return _NUMBERS.pack(lr, eps, scale, *rates, decay, l2, 0.0, seed)


class Class(NamedTuple):
    """What the tables of one launch have in common. Dtypes are given by their codes."""

    grad: int
    table: int
    state: int
    stochastic: bool
    vec: int
    lanes: int
    chunks: int
    tile: int  # entries that a warp sums in one go
    wide: bool

    def defines(self) -> dict[str, object]:
        """The macros that row_update.cu and row_norm.cu share."""
        return {
            "RECAST_GRAD": self.grad,
            "RECAST_TABLE": self.table,
            "RECAST_VEC": self.vec,
            "RECAST_LANES": self.lanes,
            "RECAST_CHUNKS": self.chunks,
            "RECAST_TILE": self.tile,
            "RECAST_BLOCK": _BLOCK,
            "RECAST_WIDE_KEY": self.wide,
        }


@cache
def _class(
    dim: int,
    grad: int,
    grad_aligned: int,
    table: int,
    state: int | None,
    aligned: int,
    stochastic: bool,
    wide: bool,
) -> Class:
    """The class of a table; ``aligned``: the alignment of its addresses in bytes, 16 at most.

    A lane reads as many columns at once as fit into 16 bytes in the widest dtype: it reads several
    rows at once, and more would not fit into registers. In wide rows it reads as many columns as
    fit in the narrowest dtype: otherwise a warp would handle only one row at a time.
    """
    size = 2 if grad else 4
    sizes = [2 if code else 4 for code in (table, table if state is None else state)]
    vec = 16 // (max if dim <= _NARROW else min)(size, *sizes)
    while dim % vec or grad_aligned < min(16, size * vec) or aligned < min(16, max(sizes) * vec):
        vec //= 2
    lanes = min(32, 1 << (-(-dim // vec) - 1).bit_length())
    chunks = 1
    while chunks < 4 and lanes * vec * chunks < dim:
        chunks *= 2
    tile = 128 if wide or lanes > 8 else 256
    kind = stochastic and table != 0
    return Class(grad, table, state or 0, kind, vec, lanes, chunks, tile, wide)


@cache
def _update_kernels(action: int, of: Class) -> tuple[Kernel, Kernel]:
    own = {
        "RECAST_ACTION": action,
        "RECAST_STATE": of.state,
        "RECAST_STOCHASTIC": of.stochastic,
    }
    program = nvrtc.program("row_update.cu", defines=of.defines() | own)
    return Kernel(program, "row_update"), Kernel(program, "row_combine")


@cache
def _norm_kernels(order: int, of: Class) -> tuple[Kernel, Kernel, Kernel]:
    program = nvrtc.program("row_norm.cu", defines=of.defines() | {"RECAST_ORDER": order})
    first, combine, join = ("row_norm", "row_norm_combine", "table_norms")
    return Kernel(program, first), Kernel(program, combine), Kernel(program, join)


class _Sums:
    """Launches the two kernels that sum rows: tile by tile, then rows of several tiles."""

    def __init__(self, sort: Sorted, kinds: Sequence[Class], dims: Sequence[int]) -> None:
        self.sort = sort
        self.stride = max(dims) + 7 & ~7
        # Only rows that cross the end of a tile leave partial sums here.
        tiles = -(-sort.entries // min(of.tile for of in kinds))
        parts = 2 * tiles * self.stride if tiles > 1 else 0
        self.partials = torch.empty(parts, dtype=torch.float32, device=sort.gpu.device)
        self.parts = Pointer(self.partials.data_ptr()), Int(self.stride)

    def tiles(
        self,
        kernel: Kernel,
        of: Class,
        tables: Tables,
        own: Sequence[Pointer],
        last: Sequence[Pointer],
    ) -> None:
        """Sum the rows of ``tables`` tile by tile."""
        sort, (place, n, _) = self.sort, tables
        widest = max([one.dim for one in sort.tables[place : place + n]])
        described, keys, span = self._described(tables, own)
        grid = (-(-self._tiles(of, tables) * 32 // _BLOCK), 1, 1)
        sort.gpu.launch(
            kernel, grid, (_BLOCK, 1, 1), 0,
            (Pointer(sort.pieces), Int(sort.bag_bits), *described, keys, Pointer(sort.values),
             *span, Int(widest), *self.parts, *last),
        )  # fmt: skip

    def combine(
        self,
        kernel: Kernel,
        of: Class,
        tables: Tables,
        own: Sequence[Pointer],
        last: Sequence[Pointer],
    ) -> None:
        """Sum the rows of ``tables`` that several tiles share, after :meth:`tiles` of all."""
        if self.sort.entries > of.tile:
            described, keys, span = self._described(tables, own)
            grid = (-(-self._tiles(of, tables) // _TILES), 1, 1)
            self.sort.gpu.launch(
                kernel, grid, (_BLOCK, 1, 1), 0, (*described, keys, *span, *self.parts, *last)
            )

    def _described(
        self, tables: Tables, own: Sequence[Pointer]
    ) -> tuple[tuple[Argument, ...], Pointer, tuple[Argument, ...]]:
        place, n, rows = tables
        starts = self.sort.table_starts + 4 * place
        span = Pointer(starts), Pointer(starts + 4 * n), Int(self.sort.entries)
        return (Pointer(rows), Int(n), *own), Pointer(self.sort.keys), span

    def _tiles(self, of: Class, tables: Tables) -> int:
        """How many tiles have entries of ``tables``, at most: the first may start inside a tile."""
        place, n, _ = tables
        entries = sum([one.entries for one in self.sort.tables[place : place + n]])
        return -(-entries // of.tile) + (len(self.sort.tables) > n)


class Tables(NamedTuple):
    """Neighbouring tables of a sort."""

    place: int  # of the first
    n: int
    rows: int  # the address of their Rows


def _neighbours(places: Sequence[int], kinds: Sequence[object]) -> Iterator[tuple[int, int]]:
    """The ranges [first, past) of neighbouring places of one kind."""
    cuts = [
        k + 1
        for k, (a, b) in enumerate(pairwise(zip(places, kinds, strict=True)))
        if b[0] != a[0] + 1 or b[1] != a[1]
    ]
    return pairwise((0, *cuts, len(places)))


# --- updates -------------------------------------------------------------------------------------


def update(sort: Sorted, jobs: Sequence[tuple[int, Target]]) -> Tensor:
    """Update tables of ``sort`` in place; ``jobs``: (place, target) of each, in order of place.

    Returns the packed numbers on the device, (5 * len(jobs),) int64, in the order of ``jobs``.
    """
    rows, launches = described(sort, jobs)
    packed = b"".join([target.numbers for _, target in jobs])
    return launch(sort, rows, packed, launches)


class Launch(NamedTuple):
    """Neighbouring tables that one launch updates."""

    first: int  # of the jobs
    tables: int
    place: int  # of the first in the sort
    kind: _Kind


def described(sort: Sorted, jobs: Sequence[tuple[int, Target]]) -> tuple[array[int], list[Launch]]:
    """The Rows of ``jobs``, and the launches that do them."""
    places: list[int] = []
    rows: array[int] = array("q")
    kinds: list[_Kind] = []
    for place, target in jobs:
        summed, weight = sort.tables[place], target.weight
        fields = [weight.data_ptr(), weight.stride(0)]
        aligned = 16 | fields[0] | fields[1] * weight.itemsize
        for state in target.states:
            at, stride = state.data_ptr(), state.stride(0)
            if state.dim() == 2:
                aligned |= at | stride * state.itemsize
            fields += (at, stride)
        fields += (0,) * (6 - len(fields))
        factor = 0 if target.factor is None else sort.number(target.factor)
        rows.extend((*fields, summed.first_key, summed.rows, summed.dim, factor))
        places.append(place)
        kinds.append(_kind(sort, summed, target, aligned & -aligned))
    return rows, [
        Launch(first, past - first, places[first], kinds[first])
        for first, past in _neighbours(places, kinds)
    ]


def launch(sort: Sorted, rows: array[int], packed: bytes, launches: Sequence[Launch]) -> Tensor:
    """Run ``launches`` on ``rows``, both from :func:`described`.

    ``packed``: the numbers of all jobs; returns them on the device, as :func:`update` does.
    """
    given = sort.gpu.upload(joined(rows, packed))
    launch_at(sort, given.data_ptr(), len(rows), launches)
    return given[len(rows) :]


def joined(rows: array[int], packed: bytes) -> array[int]:
    """The words that :func:`launch_at` expects on the device."""
    words = rows[:]
    words.frombytes(packed)
    return words


def launch_at(sort: Sorted, tables: int, words: int, launches: Sequence[Launch]) -> None:
    """Run ``launches`` on the Rows at the address ``tables``; ``words`` further on are the
    numbers.
    """
    at = tables + 8 * words
    sums = _Sums(sort, [one.kind[1] for one in launches], [one.dim for one in sort.tables])
    waiting: list[Launch] = []
    for one in launches:
        if waiting and not _joined(waiting[-1], one):
            _combine(sums, tables, at, waiting)
            waiting = []
        action, of, grad_scale, found_inf = one.kind
        kernel, _ = _update_kernels(action, of)
        sums.tiles(
            kernel, of, Tables(one.place, one.tables, tables + 8 * ROWS * one.first),
            (Pointer(at + _NUMBERS.size * one.first),), (Pointer(grad_scale), Pointer(found_inf)),
        )  # fmt: skip
        waiting.append(one)
    _combine(sums, tables, at, waiting)


def _joined(a: Launch, b: Launch) -> bool:
    """Whether one launch can combine the rows that tiles share for both: that of the wider rows."""
    (action, x, *scaling), (other, y, *others) = a.kind, b.kind
    near = a.place + a.tables == b.place and action == other and scaling == others
    return near and x._replace(lanes=y.lanes, chunks=y.chunks) == y


def _combine(sums: _Sums, tables: int, at: int, launches: Sequence[Launch]) -> None:
    if launches:
        first = launches[0]
        action, of, grad_scale, found_inf = max(
            [one.kind for one in launches], key=lambda kind: (kind[1].lanes, kind[1].chunks)
        )
        _, kernel = _update_kernels(action, of)
        n = sum([one.tables for one in launches])
        sums.combine(
            kernel, of, Tables(first.place, n, tables + 8 * ROWS * first.first),
            (Pointer(at + _NUMBERS.size * first.first),), (Pointer(grad_scale), Pointer(found_inf)),
        )  # fmt: skip


# What the tables of a launch share: action, class, and the addresses of grad_scale and found_inf.
_Kind = tuple[int, Class, int | None, int | None]


def _kind(sort: Sorted, summed: Summed, target: Target, aligned: int) -> _Kind:
    states = target.states
    of = _class(
        summed.dim, summed.grad, summed.aligned, CODES[target.weight.dtype],
        CODES[states[0].dtype] if states else None, aligned, target.stochastic, sort.wide,
    )  # fmt: skip
    scale, found_inf = target.grad_scale, target.found_inf
    return (
        ACTIONS[target.action],
        of,
        None if scale is None else scale.data_ptr(),
        None if found_inf is None else found_inf.data_ptr(),
    )


# --- norms ---------------------------------------------------------------------------------------


def norms(sort: Sorted, order: float, dtypes: Sequence[torch.dtype]) -> Tensor:
    """(tables,) fp32: the norm of each table's summed gradient, in the order of ``sort.tables``.

    order: a key of ``ORDERS``. dtypes: those of the tables; sums are rounded to them first.
    """
    code, n = ORDERS[order], len(sort.tables)
    words: array[int] = array("q")
    kinds = []
    for summed, dtype in zip(sort.tables, dtypes, strict=True):
        words.extend((0, 0, 0, 0, 0, 0, summed.first_key, summed.rows, summed.dim, 0))
        of = summed.dim, summed.grad, summed.aligned
        kinds.append(_class(*of, CODES[dtype], None, 16, False, sort.wide))
    given = sort.gpu.upload(words)
    sums = _Sums(sort, kinds, [summed.dim for summed in sort.tables])
    device = sort.gpu.device
    of_rows = torch.zeros(sort.entries, dtype=torch.float32, device=device)
    shares = torch.empty(n, _SHARES, dtype=torch.float32, device=device)
    last = (Pointer(of_rows.data_ptr()),)
    for first, past in _neighbours(range(n), kinds):
        kernel, combine, _ = _norm_kernels(code, kinds[first])
        tables = Tables(first, past - first, given.data_ptr() + 8 * ROWS * first)
        sums.tiles(kernel, kinds[first], tables, (), last)
        sums.combine(combine, kinds[first], tables, (), last)
    _, _, join = _norm_kernels(code, kinds[0])
    arguments = (last[0], Pointer(sort.table_starts), Pointer(shares.data_ptr()))
    sort.gpu.launch(join, (n, _SHARES, 1), (_BLOCK, 1, 1), 0, arguments)
    if code == 0:
        return shares.amax(1)
    return shares.sum(1) if code == 1 else shares.sum(1).sqrt_()
