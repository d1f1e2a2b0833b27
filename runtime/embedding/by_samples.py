"""Lookups of one matrix that a GPU takes sample by sample: ``csrc/cuda/embedding_samples.cu``.

A block writes whole rows of the matrix, and the ids of a few samples are read once for all columns.
That is what small rows need, of which one lookup at a time would write 16 to 64 bytes here and
there. Taken are lookups that gather, sum or average the same number of ids for every sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import NamedTuple

from recast.runtime.embedding.call import Call
from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.columns import Parts
from recast.runtime.gpu.cuda_launch import Kernel
from recast.runtime.gpu.gpu import Gpu

BLOCK = 256

Placed = tuple[Parts, int]  # other tensors of the matrix, and the address of their words

_LEAST = 2  # lookups of a launch: with one alone nothing comes to lie side by side
_MOST_IDS = 128  # of a bag: one thread sums them
_MOST_PIECES = 1 << 14  # of a sample
_MOST_BYTES = 1 << 32  # from row to row of a table
_MOST_STRIDE = 1 << 24  # elements from row to row of the matrix, of which a block has 64 at most
_READS = 4096  # pieces that a block reads, about, which keep its threads busy
_LEAST_BITS, _MOST_BITS = 2, 6  # samples of a block, as powers of two
_USUAL_BITS = 3  # 8 samples: what is read of 8-byte ids are then whole 64 bytes
_FULL = 4  # blocks that a multiprocessor runs at once
_SHARED = 47 << 10  # bytes that a block may have without asking, less its own
_HELD, _WORD = 48, 4  # bytes that a block keeps of a lookup, and of a piece or an id


class Kind(NamedTuple):
    """The macros of embedding_samples.cu."""

    table: int
    out: int
    vec: int

    def kernel(self) -> Kernel:
        return _kernel(self)


@lru_cache(maxsize=64)
def _kernel(of: Kind) -> Kernel:
    defines = {f"RECAST_{name.upper()}": value for name, value in of._asdict().items()}
    program = nvrtc.program("embedding_samples.cu", defines={**defines, "RECAST_BLOCK": BLOCK})
    return Kernel(program, "embedding_samples")


class Group(NamedTuple):
    """What one launch takes: those of several ids a sample first."""

    kind: Kind
    lookups: list[int]
    before: list[int]  # of each: pieces << 32 | ids of a sample, of the lookups before it
    pieces: int  # of a sample
    pooled: int  # of them, those of several ids
    ids: int  # of a sample
    reads: int  # of pieces, for a sample

    def shared(self, bits: int) -> int:
        """Bytes of shared memory of a block of 2^bits samples."""
        return _HELD * len(self.lookups) + _WORD * (self.pieces + self.ids + (self.ids << bits))

    def bits(self, samples: int, multiprocessors: int) -> int:
        """How many samples a block takes, as a power of two."""
        bits = _USUAL_BITS
        while bits < _MOST_BITS and self.reads << bits < _READS and self.shared(bits + 1) < _SHARED:
            bits += 1
        while bits > _LEAST_BITS and samples >> bits < _FULL * multiprocessors:
            bits -= 1
        return bits


def groups(call: Call, kinds: Sequence[Kind]) -> list[Group]:
    """The lookups of ``call`` that are taken, launch by launch.

    ``kinds``: of every lookup, by what its table allows.
    """
    columns = call.columns
    if columns is None or columns.stride > _MOST_STRIDE:
        return []
    starts, of = columns.starts(), dict[Kind, list[int]]()
    for k in columns.order:
        if k >= 0 and _takes(call, k):
            # Threads write what they read, side by side: smaller pieces where columns ask for it.
            vec = math.gcd(kinds[k].vec, starts[k], columns.stride)
            of.setdefault(kinds[k]._replace(vec=vec), []).append(k)
    found = []
    for kind, lookups in sorted(of.items()):
        lookups.sort(key=lambda k: -_ids(call, k))  # those of one id stay in the order of columns
        while lookups:
            group = _group(call, kind, lookups)
            if len(group.lookups) >= _LEAST:
                found.append(group)
            lookups = lookups[len(group.lookups) :]
    return found


def _ids(call: Call, k: int) -> int:
    """Ids of each sample."""
    return 1 if call.layout.mode[k] == "none" else call.ids[k].shape[1]


def _takes(call: Call, k: int) -> bool:
    mode, weight = call.layout.mode[k], call.weight(k)
    if mode == "max" or call.per_sample_weights[k] is not None or not weight.shape[1]:
        return False
    if weight.stride(0) * weight.itemsize >= _MOST_BYTES:
        return False
    return mode == "none" or (call.offsets[k] is None and 1 <= _ids(call, k) <= _MOST_IDS)


def _group(call: Call, kind: Kind, lookups: Sequence[int]) -> Group:
    """As many of ``lookups`` as one launch has room for, from the first on; one in any case."""
    group = Group(kind, [], [], 0, 0, 0, 0)
    for k in lookups:
        own, ids = call.weight(k).shape[1] // kind.vec, _ids(call, k)
        grown = Group(
            kind, [*group.lookups, k], [*group.before, group.pieces << 32 | group.ids],
            group.pieces + own, group.pooled + own * (ids > 1), group.ids + ids,
            group.reads + own * ids,
        )  # fmt: skip
        if group.lookups and (grown.shared(_USUAL_BITS) > _SHARED or grown.pieces > _MOST_PIECES):
            break
        group = grown
    return group


class Launch:
    """A group at one number of samples. ``first``: where its lookups begin among all; ``stride``:
    elements from row to row of the matrix.
    """

    def __init__(
        self, group: Group, first: int, samples: int, stride: int, multiprocessors: int
    ) -> None:
        self.group, self.first, self.samples, self.stride = group, first, samples, stride
        self.bits = group.bits(samples, multiprocessors)
        self.blocks = -(-samples >> self.bits)
        self.kernel, self.shared = group.kind.kernel(), group.shared(self.bits)

    def run(self, on: Gpu, words: int, errors: int, parts: Placed | None, matrix: int) -> None:
        """Start it. ``words``, ``errors`` and ``matrix`` are addresses: of this group's lookups, of
        what counts errors, and of where the matrix begins; ``parts``: what else it writes there.
        """
        group, (given, at) = self.group, parts or (None, None)
        arguments = (
            c_void_p(words), c_int32(len(group.lookups)), c_void_p(errors), c_int64(self.samples),
            c_int32(self.bits), c_int32(group.pieces), c_int32(group.pooled), c_int32(group.ids),
            c_void_p(at), c_int32(given.number if given else 0),
            c_int32(given.columns if given else 0), c_void_p(matrix), c_int64(self.stride),
        )  # fmt: skip
        on.launch(self.kernel, (self.blocks, 1, 1), (BLOCK, 1, 1), self.shared, arguments)
