"""Steps on rows by the kernels themselves, on the emulator, and the same by plain torch.

``Class`` is what the macros of a kernel say, ``Given`` some tables with gradients for them,
``update`` a step by the kernels, ``expected`` what the formulas give.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import simt_build
import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.rows.cuda_passes import DIGIT, SEGMENT, Plan
from recast.runtime.rows.cuda_step import _TILES, numbers
from recast.runtime.rows.pieces import Piece, merge

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CODES = {F32: 0, F16: 1, BF16: 2}
WIDE_IDS, WIDE_OFFSETS, MEAN, PLAIN = 1, 2, 4, 8
ONE = int.from_bytes(struct.pack("<fI", 1.0, 0), "little")
SCAN = 4096
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Class:
    """What the macros of row_sort.cu and row_update.cu say."""

    action: int = 1
    grad: torch.dtype = F32
    table: torch.dtype = F32
    state: torch.dtype = F32
    stochastic: bool = False
    vec: int = 4
    lanes: int = 4
    chunks: int = 1
    tile: int = 32
    block: int = 64
    wide: bool = False

    def sort(self) -> simt_build.Kernels:
        defines = {"RECAST_WIDE_KEY": int(self.wide)}
        return simt_build.kernels(simt_build.CUDA / "row_sort.cu", defines=defines)

    def update(self) -> simt_build.Kernels:
        defines = {
            "RECAST_ACTION": self.action,
            "RECAST_GRAD": CODES[self.grad],
            "RECAST_TABLE": CODES[self.table],
            "RECAST_STATE": CODES[self.state],
            "RECAST_STOCHASTIC": int(self.stochastic),
            "RECAST_VEC": self.vec,
            "RECAST_LANES": self.lanes,
            "RECAST_CHUNKS": self.chunks,
            "RECAST_TILE": self.tile,
            "RECAST_BLOCK": self.block,
            "RECAST_WIDE_KEY": int(self.wide),
        }
        return simt_build.kernels(simt_build.CUDA / "row_update.cu", defines=defines)

    def key(self) -> torch.dtype:
        return torch.int64 if self.wide else torch.int32


@dataclass
class Sorted:
    """What row_sort.cu leaves for row_update.cu."""

    pieces: Tensor
    bag_bits: int
    keys: Tensor
    values: Tensor
    table_starts: Tensor
    errors: list[int]
    held: list[Tensor]  # what the fields of `pieces` point to


@dataclass
class Given:
    """Tables, and the pieces of each, those of a table side by side."""

    tables: list[Tensor]
    pieces: list[tuple[int, Piece]]
    gap: int = 0  # keys that no table has, before the first

    def first_keys(self) -> list[int]:
        firsts = [self.gap]
        for table in self.tables:
            firsts.append(firsts[-1] + table.shape[0] + 1)  # and the key of no row
        return firsts

    def in_order(self) -> list[tuple[int, Piece]]:
        return sorted(self.pieces, key=lambda one: one[0])

    def of(self, table: int) -> list[Piece]:
        return [piece for t, piece in self.pieces if t == table]


def fields(given: Given) -> tuple[Tensor, list[Tensor]]:
    """The pieces as the kernels read them, and the memory they point to."""
    firsts, rows, held, entry = given.first_keys(), [], [], 0
    for number, piece in given.in_order():
        n, bags, offsets = piece.ids.numel(), piece.rows.shape[0], piece.offsets
        factors = torch.full((bags,), float("nan")) if piece.mean else None
        bag_of = torch.full((n,), 2**30, dtype=torch.int32) if piece.weights is not None else None
        factor = None if piece.scale is None else torch.tensor(float(piece.scale))
        flags = WIDE_IDS * (piece.ids.dtype == torch.int64) + MEAN * piece.mean
        if offsets is not None:
            flags += WIDE_OFFSETS * (offsets.dtype == torch.int64)
        flags += PLAIN * (piece.weights is None and not piece.mean and factor is None)
        pointers = [piece.weights, factors, bag_of, piece.rows]
        weights, factors_at, bag_of_at, gradient = (
            0 if t is None else t.data_ptr() for t in pointers
        )
        held += [t for t in (factors, bag_of, factor) if t is not None]
        rows.append([
            piece.ids.data_ptr(), 0 if offsets is None else offsets.data_ptr(),
            n, 0 if offsets is None else len(offsets), piece.fixed, bags,
            -1 if piece.padding_idx is None else piece.padding_idx, flags, entry,
            firsts[number], given.tables[number].shape[0], weights, factors_at, bag_of_at, gradient,
            piece.rows.stride(0), 0 if factor is None else factor.data_ptr(), ONE,
        ])  # fmt: skip
        entry += n
    return torch.tensor(rows), held


def scan(kernels: simt_build.Kernels, counts: Tensor, **how: int) -> None:
    """Exclusive sums in place."""
    blocks = -(-len(counts) // SCAN)
    totals = torch.full((blocks,), -1, dtype=torch.int32)
    unsigned = counts.view(torch.uint32)
    kernels.launch("scan_totals", blocks, 256, 0, unsigned, len(counts),
                   totals.view(torch.uint32), **how)  # fmt: skip
    kernels.launch("scan_counts", blocks, 256, 0, unsigned, len(counts),
                   totals.view(torch.uint32), **how)  # fmt: skip


def integers(n: int, most: int) -> Tensor:
    return torch.randint(0, most, (n,), generator=torch.Generator().manual_seed(n))


def u32(n: int) -> Tensor:
    return torch.full((n,), -1, dtype=torch.int32).view(torch.uint32)


def radix_sort(
    of: Class, keys: Tensor, values: Tensor, bits: int, **how: int
) -> tuple[Tensor, Tensor]:
    """``keys`` and ``values``, those of one table, in the order of keys."""
    kernels, n = of.sort(), len(keys)
    passes = max(1, -(-bits // DIGIT))
    tiles = -(-n // (2048 if of.wide else 4096))
    for p in range(passes):
        shift = p * bits // passes
        width = (p + 1) * bits // passes - shift
        counts = torch.full((tiles << width,), -1, dtype=torch.int32)
        kernels.launch("digit_counts", tiles, 256, 0, unsigned(keys), n, shift, width,
                       counts.view(torch.uint32), None, 0, **how)  # fmt: skip
        scan(kernels, counts, **how)
        to_keys, to_values = torch.full_like(keys, -1), u32(n)
        kernels.launch("scatter", tiles, 256, 0, unsigned(keys), values, n, shift, width,
                       counts.view(torch.uint32), unsigned(to_keys), to_values, None, 0,
                       **how)  # fmt: skip
        keys, values = to_keys, to_values
    return keys, values


def unsigned(keys: Tensor) -> Tensor:
    return keys.view(torch.uint64 if keys.dtype == torch.int64 else torch.uint32)


def sort(of: Class, given: Given, **how: int) -> Sorted:
    kernels = of.sort()
    pieces, held = fields(given)
    n = sum(piece.ids.numel() for _, piece in given.pieces)
    sources = [p.ids.numel() if p.weights is not None else len(p.rows) for _, p in given.pieces]
    bag_bits = max(1, max(sources) - 1).bit_length()
    most = max(len(p.rows) for _, p in given.pieces)
    kernels.launch("bag_factors", (len(pieces), -(-most // 256)), 256, 0, pieces, **how)
    entries = [sum(p.ids.numel() for p in given.of(k)) for k in range(len(given.tables))]
    described = [
        (table.shape[0], count, first)
        for first, table, count in zip(given.first_keys(), given.tables, entries, strict=False)
        if count
    ]
    plan = Plan(described, 2048 if of.wide else 4096)
    segments = torch.tensor(plan.words).view(-1, SEGMENT)
    buffers = [(torch.full((n,), -1, dtype=of.key()), u32(n)) for _ in range(2)]
    plain = [(unsigned(keys), values) for keys, values in buffers]
    errors = torch.zeros(4, dtype=torch.int64)
    counts = torch.full((plan.counts,), -1, dtype=torch.int32)
    all_counts = counts.view(torch.uint32)
    kernels.launch("linearise", plan.tiles, 256, 0, pieces, len(pieces), segments,
                   len(described), bag_bits, *plain[0], *plain[1], errors,
                   all_counts, **how)  # fmt: skip
    for p, one in enumerate(plan.passes):
        source, to = (len(plan.passes) - p) % 2, (len(plan.passes) - p - 1) % 2
        mine = segments[one.first : one.first + one.segments]
        told = (n, 0, 0, all_counts)
        kernels.launch("digit_counts", one.tiles, 256, 0, plain[source][0], *told, mine, len(mine),
                       **how)  # fmt: skip
        anew, again = mine.clone(), torch.full_like(counts, -1)
        anew[:, 9] &= ~1
        kernels.launch("digit_counts", one.tiles, 256, 0, plain[source][0], *told[:3],
                       again.view(torch.uint32), anew, len(mine), **how)  # fmt: skip
        counted = counts[one.first_count :][: one.counts]
        assert torch.equal(counted, again[one.first_count :][: one.counts])
        scan(kernels, counted, **how)
        kernels.launch("scatter", one.tiles, 256, 0, *plain[source], *told, *plain[to], mine,
                       len(mine), **how)  # fmt: skip
    keys, values = buffers[0]
    firsts = torch.tensor(given.first_keys())
    table_starts = u32(len(firsts))
    kernels.launch("find_tables", -(-len(firsts) // 8), 256, 0, unsigned(keys), n, firsts,
                   len(firsts), table_starts, **how)  # fmt: skip
    return Sorted(pieces, bag_bits, keys, values, table_starts, errors.tolist(), held)


def words(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.int64)


@dataclass
class Step:
    """Numbers of one optimizer step."""

    lr: float = 0.1
    eps: float = 1e-3
    scale: float = 1.0
    grad_scale: float | None = None
    found_inf: float | None = None
    seed: int | None = None


def update(
    of: Class, given: Given, states: list[Tensor], step: Step, grid: int = 5, **how: int
) -> Sorted:
    """One step on the tables and states, in place."""
    done, kernels = sort(of, given, **how), of.update()
    packed = numbers(step.lr, step.eps, step.scale, seed=step.seed or 0) * len(given.tables)
    tables = torch.tensor([
        [
            table.data_ptr(), table.stride(0), state.data_ptr() if of.action else 0,
            state.stride(0) if of.action else 0, 0, 0, first, *table.shape, 0,
        ]
        for table, state, first in zip(given.tables, states, given.first_keys(), strict=False)
    ])  # fmt: skip
    n, stride = len(done.keys), max(t.shape[1] for t in given.tables)
    tiles = -(-n // of.tile)
    partials = torch.full((2 * tiles * stride,), float("nan"))

    def one(value: float | None) -> Tensor | None:
        return None if value is None else torch.tensor([value])

    # All tables, in two launches where there are several: neighbours of one class.
    cut = len(tables) // 2
    for first, past in ((0, cut), (cut, len(tables))) if cut else ((0, len(tables)),):
        widest = max(table.shape[1] for table in given.tables[first:past])
        front = (tables[first:], past - first, words(packed[40 * first :]),
                 unsigned(done.keys))  # fmt: skip
        span = (done.table_starts[first:], done.table_starts[past:], n)
        back = (partials, stride, one(step.grad_scale), one(step.found_inf))
        kernels.launch("row_update", grid, of.block, 0, done.pieces, done.bag_bits, *front,
                       done.values, *span, widest, *back, **how)  # fmt: skip
        kernels.launch("row_combine", 1 + -(-tiles // _TILES), of.block, 0, *front, *span, *back,
                       **how)  # fmt: skip
    return done


def example(of: Class, seed: int, dims: tuple[int, ...] = (2, 4, 1, 7)) -> Given:
    """Hot rows, one row, duplicates, padding, weights, means, ragged, both widths of ids."""
    g = torch.Generator().manual_seed(seed)
    counts = (10, 1, 300, 7)
    tables = [
        torch.randn(rows, (dim + 1) * of.vec, generator=g).to(of.table)[:, of.vec :]
        for rows, dim in zip(counts, dims, strict=True)
    ]

    def ids(table: int, n: int, wide: bool = True) -> Tensor:
        found = torch.randint(0, counts[table], (n,), generator=g)
        return found if wide else found.int()

    def grad(table: int, bags: int) -> Tensor:
        width = dims[table] * of.vec
        return torch.randn(bags, width + of.vec, generator=g).to(of.grad)[:, :width]

    def factors(n: int) -> Tensor:
        return torch.randn(n, generator=g).to(of.table)

    starts = torch.tensor([0, 0, 1, 3, 3, 8, 40])
    ends = torch.tensor([0, 0, 2, 17, 17, 50], dtype=torch.int32)
    pieces = [
        (0, Piece(ids(0, 150), grad(0, 150), None, 1, None, False, None, None)),
        (2, Piece(ids(2, 50), grad(2, 7), starts, 0, None, False, None, None)),
        (1, Piece(ids(1, 40), grad(1, 20), None, 2, None, False, None, 0.5)),
        (0, Piece(ids(0, 120, False), grad(0, 40), None, 3, factors(120), False, 4, None)),
        (3, Piece(ids(3, 50, False), grad(3, 5), ends, 0, factors(50), False, None, -2.0)),
        (3, Piece(ids(3, 50), grad(3, 5), ends, 0, None, True, 2, None)),
        (2, Piece(ids(2, 60), grad(2, 15), None, 4, None, True, None, None)),
    ]
    return Given(tables, pieces)


def states(of: Class, given: Given) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    found = []
    for table in given.tables:
        shape = (table.shape[0], 1) if of.action == 2 else tuple(table.shape)
        found.append(torch.rand(shape, generator=g).to(of.state))
    return found


def merged(pieces: list[Piece], shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with device.use("torch"):
        return merge(pieces, shape, dtype, CPU)


def expected(
    of: Class, given: Given, before: list[Tensor], step: Step, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Tables and states after a step by the formulas, all in ``dtype``."""
    found = []
    for number, (table, state) in enumerate(zip(given.tables, before, strict=True)):
        weight, total = table.to(dtype).clone(), state.to(dtype).clone()
        ids, rows = merged(given.of(number), table.shape, dtype)
        rows = rows * (step.scale / (step.grad_scale or 1.0))
        if of.action == 0:
            weight[ids] -= step.lr * rows
        else:
            square = rows * rows if of.action == 1 else (rows * rows).mean(1, keepdim=True)
            total[ids] += square
            weight[ids] -= step.lr * rows / (total[ids].sqrt() + step.eps)
        found.append((weight, total))
    return found


CLASSES = {
    "sgd": Class(action=0),
    "adagrad": Class(action=1, lanes=2, chunks=2),
    "row-wise": Class(action=2, lanes=4),
    "row-wise by one": Class(action=2, lanes=1),
    "bf16 to fp16": Class(action=1, grad=BF16, table=F16, vec=1, lanes=8),
    "fp16 to bf16": Class(action=0, grad=F16, table=BF16, vec=8, lanes=32, chunks=4, wide=True),
    "all bf16": Class(action=1, grad=BF16, table=BF16, state=BF16, vec=8, lanes=1),
}
