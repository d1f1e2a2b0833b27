"""Sorting the ids of lookups by row on a GPU, all tables at once, by ``csrc/cuda/row_sort.cu``.

The keys of a sort number the rows of all its tables, one table after the other. So each table is a
contiguous range of the sorted entries, and so are neighbouring tables that share a launch: one
sort, and one launch for each class of tables. Within each launch of the sort, a table is sorted by
itself, in the passes that its own rows need. Tables are ordered so that equal classes are
neighbours. The host never waits.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu import copies, nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.recorded import recording
from recast.runtime.recorded.recording import Recording
from recast.runtime.rows.cuda_passes import SEGMENT, plan
from recast.runtime.rows.kernel import id_error, offsets_error

if TYPE_CHECKING:
    from recast.runtime.rows.pieces import Piece

# The limits of one sort; see row_sort.cu.
MOST_ENTRIES = 2**30 - 1
MOST_ROWS = 2**32 - 2  # with 32-bit keys
MOST_SOURCES = 2**32  # pieces times 2^(bits that number the bags of one)

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_WIDE_IDS, _WIDE_OFFSETS, _MEAN, _PLAIN = 1, 2, 4, 8  # as in pieces.cuh
_ID_DTYPES = (torch.int64, torch.int32)
_MOST_BLOCKS = 65535  # in the y dimension of a grid
_THREADS, _WARPS, _SCAN = 256, 8, 4096
_PIECE = 18  # words of a Piece
_PLACE_BITS = 40  # of a first error: low bits for its position, the others for the piece
_FACTOR = struct.Struct("<fI")
_ONE = int.from_bytes(_FACTOR.pack(1.0, 0), "little")

Pointer = ctypes.c_void_p
Int = ctypes.c_int32


@dataclass(slots=True)
class Table:
    """What one table's gradient is made of.

    pieces: those with ids. rows, dim, dtype: of the table. entries: the number of ids in all
    pieces. sources: how many different sources (bags; ids if weighted) an entry's value must be
    able to number within a piece. grad: the dtype of the rows of all pieces; fp32 if they differ,
    None if the kernels do not know one of them.
    """

    pieces: list[Piece]
    rows: int
    dim: int
    dtype: torch.dtype
    entries: int
    sources: int
    grad: torch.dtype | None

    @staticmethod
    def of(pieces: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype) -> Table:
        """The table of ``shape`` (rows, D) whose gradient is the sum of ``pieces``."""
        kept: list[Piece] = []
        entries = sources = 0
        grad: torch.dtype | None = None
        known = True
        for piece in pieces:
            n, bags, of = piece.ids.numel(), piece.rows.size(0), piece.rows.dtype
            if n == 0 or bags == 0:
                continue
            if of is not grad:
                known = known and of in CODES
                grad = torch.float32 if kept else of
            kept.append(piece)
            entries += n
            sources = max(sources, bags if piece.weights is None else n)
        rows, dim = shape
        return Table(kept, rows, dim, dtype, entries, sources, grad if known else None)

    def fits(self) -> bool:
        """Whether one sort can take it."""
        if self.dtype not in CODES or (self.pieces and self.grad is None):
            return False
        few = len(self.pieces) << bits(self.sources) <= MOST_SOURCES
        return few and self.entries <= MOST_ENTRIES

    def some(self) -> bool:
        """Whether there is anything to sum."""
        return bool(self.pieces) and self.rows > 0 and self.dim > 0


class Summed(NamedTuple):
    """One table of a sort, as the kernels that sum see it."""

    first_key: int
    rows: int
    dim: int
    grad: int  # code of the dtype of its gradient rows
    aligned: int  # alignment of these rows in bytes, 16 at most
    entries: int  # an upper bound: some may get no gradient


def split(tables: Sequence[Table]) -> list[list[int]]:
    """The indices of the tables of each sort, in as few sorts as their order allows.

    A table with too many rows for 32-bit keys is sorted alone, with 64-bit keys.
    """
    sorts: list[list[int]] = []
    entries = rows = pieces = sources = 0
    for number, table in enumerate(tables):
        entries += table.entries
        rows += table.rows + 1
        pieces += len(table.pieces)
        sources = max(sources, table.sources)
        over = entries > MOST_ENTRIES or pieces << bits(sources) > MOST_SOURCES
        if not sorts or over or rows > MOST_ROWS:
            sorts.append([])
            entries, rows = table.entries, table.rows + 1
            pieces, sources = len(table.pieces), table.sources
        sorts[-1].append(number)
    return sorts


def bits(n: int) -> int:
    """How many bits it takes to number ``n`` things; at least one."""
    return max(1, (n - 1).bit_length())


class Sorted:
    """The entries of tables, sorted by row, and where those of each table start.

    ``tables`` are reordered; ``place[k]`` is the new place of the k-th that was passed in.
    ``errors``: (4,) int64 that count ids outside their table and wrong offsets; None without
    ``counting``.
    """

    def __init__(self, gpu: Gpu, tables: Sequence[Table], counting: bool = False) -> None:
        self.gpu = gpu
        order = sorted(range(len(tables)), key=lambda k: _likeness(tables[k]))
        self.place = [0] * len(tables)
        for place, number in enumerate(order):
            self.place[number] = place
        given = [tables[number] for number in order]
        self.more = 0
        self.given = pieces = [piece for table in given for piece in table.pieces]
        self.entries = sum([table.entries for table in given])
        # Each table has one more key than rows, for ids without gradient; this is the last one.
        self.no_key = sum([table.rows + 1 for table in given]) - 1
        self.wide = self.no_key > MOST_ROWS
        self.bag_bits = bits(max([table.sources for table in given]))
        self.errors = torch.zeros(4, dtype=torch.int64, device=gpu.device) if counting else None
        self.key_words = 2 if self.wide else 1
        self._counted = [(p, t.rows) for t in given for p in t.pieces] if counting else []
        means = [piece.rows.shape[0] for piece in pieces if piece.mean]
        self._means, self._most_mean = sum(means), max(means, default=0)
        self._weighed = sum([p.ids.numel() for p in pieces if p.weights is not None])
        # In a recording, ids of the batch are sorted while the forward runs.
        recorded = recording.current()
        self._early = recorded if recorded and not counting and is_given(recorded, pieces) else None
        with self._begin():
            self._allocate(len(given))
        self._held: list[Tensor] = []  # copies that the descriptors point to
        self._factors: dict[int, Tensor] = {}
        self.tables: list[Summed] = []
        self._describe(given)
        with self._begin():
            self._sort()

    def _begin(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._early is None else self.gpu.from_start()

    # --- memory ----------------------------------------------------------------------------------

    def _allocate(self, tables: int) -> None:
        n, words = self.entries, self.key_words
        sizes = (words * n, n, tables + 1, self._means, self._weighed)
        self._memory, at = _room(self.gpu, sizes, self._early)
        self.keys, self.values, self.table_starts, self._bag_factors, self._bag_of = at
        self._first_factor = self._bag_factors

    def raise_errors(self) -> None:
        """Raise IdError for an id outside its table, or wrong offsets. Waits for the device."""
        assert self.errors is not None
        bad_ids, first_id, bad_offsets, _ = self.errors.tolist()
        if bad_ids:
            number, place = ~first_id >> _PLACE_BITS, ~first_id & (1 << _PLACE_BITS) - 1
            piece, rows = self._counted[number]
            raise id_error(copies.original_id(piece.ids, place), rows)
        if bad_offsets:
            raise offsets_error()

    def renumbered(self, ranks: Tensor, n: int) -> Sorted:
        """The same sort of one table, its keys replaced by (entries,) ``ranks`` of ``n`` rows."""
        other = copy.copy(self)
        keys = ranks.to(torch.int64 if self.wide else torch.int32)
        other._held = [*self._held, keys]
        other.keys, other.no_key = keys.data_ptr(), n
        other.tables = [self.tables[0]._replace(rows=n)]
        return other

    def key_tensor(self) -> Tensor:
        """(entries,) int32, or int64 if wide: the bits of the sorted keys, which are unsigned."""
        keys = self._memory[: self.entries * self.key_words]
        return keys.view(torch.int64) if self.wide else keys

    # --- descriptors -----------------------------------------------------------------------------

    def _describe(self, tables: Sequence[Table]) -> None:
        """Upload a Piece for each lookup, and the first key of each table."""
        words: array[int] = array("q")
        firsts: list[int] = []
        first_key = entry = 0
        for table in tables:
            firsts.append(first_key)
            grad, aligned = table.grad or torch.float32, 16
            for piece in table.pieces:
                fields = self._fields(piece, table, grad, first_key, entry)
                aligned |= fields[14] | fields[15] * grad.itemsize
                words.extend(fields)
                entry += fields[2]
            self.tables.append(
                Summed(
                    first_key, table.rows, table.dim, CODES[grad], aligned & -aligned, table.entries
                )
            )
            first_key += table.rows + 1
        self.n_pieces = len(words) // _PIECE
        words.extend((*firsts, first_key))
        of = tuple([(table.rows, table.entries, table.first_key) for table in self.tables])
        self._plan = plan(of, 2048 if self.wide else 4096)
        words.extend(self._plan.words)
        self._upload(words)

    def _upload(self, words: array[int]) -> None:
        self._described, self._words = words, self.gpu.upload(words)
        self.pieces = self._words.data_ptr()
        self._first_keys = self.pieces + 8 * _PIECE * self.n_pieces
        self._segments = self._first_keys + 8 * (len(self.tables) + 1)

    def again(
        self, ids: Sequence[int], offsets: Sequence[int], rows: Sequence[int], more: array[int]
    ) -> Sorted:
        """A sort of other pieces, which differ from these in addresses only; same order.

        Pieces must have no weights and no factors on the device. The words ``more`` are uploaded
        with the descriptors; the result's ``more`` is their address.
        """
        other = copy.copy(self)
        other.given, other._held, other._factors = [], [], {}
        other._allocate(len(self.tables))
        words, past = self._described[:], _PIECE * self.n_pieces
        for column, addresses in ((0, ids), (1, offsets), (14, rows)):
            words[column:past:_PIECE] = array("q", addresses)
        if self._means:
            # Each piece with means has its own part of the bag factors.
            move = other._first_factor - self._first_factor
            moved = [at + move if at else 0 for at in words[12:past:_PIECE]]
            words[12:past:_PIECE] = array("q", moved)
        words.extend([0] * (len(words) % 2))  # aligns ``more`` to 16 bytes
        at = 8 * len(words)
        words.extend(more)
        other._upload(words)
        other.more = other.pieces + at
        other._sort()
        return other

    def forgetting(self) -> Sorted:
        """A copy that holds no device memory; it serves for :meth:`again` only."""
        other = copy.copy(self)
        other.given, other._held, other._factors, other._counted = [], [], {}, []
        del other._memory, other._words
        return other

    def _fields(
        self, piece: Piece, table: Table, grad: torch.dtype, first_key: int, entry: int
    ) -> tuple[int, ...]:
        ids, rows, offsets, weights = piece.ids, piece.rows, piece.offsets, piece.weights
        scale, bags, n, flags = piece.scale, rows.shape[0], ids.numel(), 0
        if ids.dtype not in _ID_DTYPES or not ids.is_contiguous():
            ids = self._hold(ids.long().contiguous())
        if ids.dtype is torch.int64:
            flags = _WIDE_IDS
        if rows.dtype is not grad:
            rows = self._hold(rows.to(grad))
        if (rows.stride(1) != 1 and rows.shape[1] != 1) or rows.stride(0) >= 2**32:
            rows = self._hold(rows.contiguous())
        offsets_at = n_offsets = weights_at = bag_of = bag_factors = factor = 0
        times = _ONE
        if offsets is not None:
            if offsets.dtype not in _ID_DTYPES or not offsets.is_contiguous():
                offsets = self._hold(offsets.long().contiguous())
            if offsets.dtype is torch.int64:
                flags |= _WIDE_OFFSETS
            offsets_at, n_offsets = offsets.data_ptr(), offsets.numel()
        if weights is not None:
            if weights.dtype is not table.dtype or not weights.is_contiguous():
                weights = self._hold(weights.to(table.dtype).contiguous())
            weights_at, bag_of = weights.data_ptr(), self._bag_of
            self._bag_of += 4 * n
        if piece.mean:
            flags |= _MEAN
            bag_factors = self._bag_factors
            self._bag_factors += 4 * bags
        if isinstance(scale, Tensor) and scale.device == self.gpu.device:
            factor = self.number(scale)
        elif scale is not None:
            times = int.from_bytes(_FACTOR.pack(float(scale), 0), "little")
        elif weights is None and not piece.mean:
            flags |= _PLAIN
        return (
            ids.data_ptr(), offsets_at, n, n_offsets, piece.fixed, bags,
            -1 if piece.padding_idx is None else piece.padding_idx, flags, entry, first_key,
            table.rows, weights_at, bag_factors, bag_of, rows.data_ptr(), rows.stride(0), factor,
            times,
        )  # fmt: skip

    def number(self, scalar: Tensor) -> int:
        """The device address of ``scalar`` as fp32."""
        held = self._factors.get(id(scalar))
        if held is None:
            # Keep the scalar alive too, as its ``id()`` is the key.
            self._held.append(scalar)
            held = self._factors[id(scalar)] = scalar.detach().float()
        return held.data_ptr()

    def _hold(self, tensor: Tensor) -> Tensor:
        self._held.append(tensor)
        return tensor

    # --- launches --------------------------------------------------------------------------------

    def _sort(self) -> None:
        kernels, launch, n, work = _kernels(self.wide), self._launch, self.entries, self._plan
        scans = -(-max([one.counts for one in work.passes]) // _SCAN)
        _memory, (other_keys, other_values, counts_at, totals_at) = _room(
            self.gpu, (self.key_words * n, n, work.counts, scans), self._early
        )
        buffers = [
            (Pointer(self.keys), Pointer(self.values)),
            (Pointer(other_keys), Pointer(other_values)),
        ]
        totals, entries, zero = Pointer(totals_at), Int(n), Int(0)
        described, n_pieces = Pointer(self.pieces), Int(self.n_pieces)
        if self._means:
            grid = (self.n_pieces, min(-(-self._most_mean // _THREADS), _MOST_BLOCKS), 1)
            self.gpu.launch(kernels.bag_factors, grid, (_THREADS, 1, 1), 0, (described,))
        errors = Pointer(None if self.errors is None else self.errors.data_ptr())
        launch(
            kernels.linearise, work.tiles, described, n_pieces, Pointer(self._segments),
            Int(len(self.tables)), Int(self.bag_bits), *buffers[0], *buffers[1], errors,
            Pointer(counts_at),
        )  # fmt: skip
        for p, one in enumerate(work.passes):
            # Alternating so that the last pass writes the first buffer.
            (keys, values), to = (
                buffers[(len(work.passes) - p) % 2],
                buffers[(len(work.passes) - p - 1) % 2],
            )
            segments = Pointer(self._segments + 8 * SEGMENT * one.first), Int(one.segments)
            counts = Pointer(counts_at + 4 * one.first_count)
            if not one.counted:
                launch(kernels.digit_counts, one.tiles, keys, entries, zero, zero,
                       Pointer(counts_at), *segments)  # fmt: skip
            blocks = -(-one.counts // _SCAN)
            if blocks > 1:
                launch(kernels.scan_totals, blocks, counts, Int(one.counts), totals)
            launch(kernels.scan_counts, blocks, counts, Int(one.counts), totals)
            launch(kernels.scatter, one.tiles, keys, values, entries, zero, zero,
                   Pointer(counts_at), *to, *segments)  # fmt: skip
        keys = buffers[0][0]
        firsts = len(self.tables) + 1
        launch(
            kernels.find_tables, -(-firsts // _WARPS), keys, entries, Pointer(self._first_keys),
            Int(firsts), Pointer(self.table_starts),
        )  # fmt: skip

    def _launch(self, kernel: Kernel, blocks: int, *arguments: Argument) -> None:
        self.gpu.launch(kernel, (blocks, 1, 1), (_THREADS, 1, 1), 0, arguments)


def _likeness(table: Table) -> tuple[int, int, int]:
    """A sort key that is equal for tables that probably share a launch."""
    return CODES[table.dtype], CODES[table.grad or torch.float32], table.dim


def is_given(recorded: Recording, pieces: Sequence[Piece]) -> bool:
    """Whether a sort of ``pieces`` reads only inputs of the recording, and in place."""
    read = [t for p in pieces for t in (p.ids, p.offsets) if t is not None]
    plain = all(t.dtype in _ID_DTYPES and t.is_contiguous() for t in read)
    return plain and recorded.are_inputs(read)


def _room(gpu: Gpu, sizes: Sequence[int], kept_by: Recording | None) -> tuple[Tensor, list[int]]:
    """Memory for arrays of ``sizes`` 4-byte words, and their addresses, aligned to 16 bytes."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + (size + 3 & ~3))
    memory = torch.empty(max(1, places.pop()), dtype=torch.int32, device=gpu.device)
    if kept_by is not None:
        kept_by.keep(memory)
    first = memory.data_ptr()
    return memory, [first + 4 * place for place in places]


class _Kernels(NamedTuple):
    bag_factors: Kernel
    linearise: Kernel
    digit_counts: Kernel
    scan_totals: Kernel
    scan_counts: Kernel
    scatter: Kernel
    find_tables: Kernel


@cache
def _kernels(wide: bool) -> _Kernels:
    program = nvrtc.program("row_sort.cu", defines={"RECAST_WIDE_KEY": wide})
    return _Kernels(*(Kernel(program, name) for name in _Kernels._fields))
