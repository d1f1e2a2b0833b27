"""Lookups that write one matrix on a GPU, sample by sample: ``csrc/cuda/embedding_samples.cu``.

A block writes whole rows of the matrix, and reads the ids of a few samples once for all columns.
Small table rows need this: one lookup at a time would write scattered pieces of 16 to 64 bytes.
It takes lookups that gather, sum or average the same number of ids for every sample.
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

_LEAST = 2  # lookups per launch: a single one has no neighbours to be written with
_MOST_IDS = 128  # per bag: one thread sums them
_MOST_PIECES = 1 << 14  # per sample
_MOST_BYTES = 1 << 32  # row stride of a table
_MOST_STRIDE = 1 << 24  # row stride of the matrix, in elements; a block has 64 rows at most
_READS = 4096  # pieces read per block, about: enough to keep its threads busy
_LEAST_BITS, _MOST_BITS = 2, 6  # log2 of the samples per block
_USUAL_BITS = 3  # 8 samples, whose 8-byte ids are read in whole 64-byte segments
_FULL = 4  # blocks that a multiprocessor runs at once
_SHARED = 47 << 10  # dynamic shared memory that a block may use without opting in to more
_HELD, _WORD = 48, 4  # bytes of shared memory per lookup, and per piece or id


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
    """The lookups of one launch: those with several ids per sample come first."""

    kind: Kind
    lookups: list[int]
    before: list[int]  # per lookup: pieces << 32 | ids, per sample, of the lookups before it
    pieces: int  # per sample
    pooled: int  # pieces of lookups with several ids, per sample
    ids: int  # per sample
    reads: int  # pieces read, per sample

    def shared(self, bits: int) -> int:
        """Bytes of shared memory of a block of 2^bits samples."""
        return _HELD * len(self.lookups) + _WORD * (self.pieces + self.ids + (self.ids << bits))

    def bits(self, samples: int, multiprocessors: int) -> int:
        """log2 of the samples per block."""
        bits = _USUAL_BITS
        while bits < _MOST_BITS and self.reads << bits < _READS and self.shared(bits + 1) < _SHARED:
            bits += 1
        while bits > _LEAST_BITS and samples >> bits < _FULL * multiprocessors:
            bits -= 1
        return bits


def groups(call: Call, kinds: Sequence[Kind]) -> list[Group]:
    """The lookups of ``call`` that are done by samples, launch by launch.

    ``kinds``: for every lookup, the kind that its table allows.
    """
    columns = call.columns
    if columns is None or columns.stride > _MOST_STRIDE:
        return []
    starts, of = columns.starts(), dict[Kind, list[int]]()
    for k in columns.order:
        if k >= 0 and _takes(call, k):
            # A thread writes pieces as wide as it reads: narrower ones if columns are unaligned.
            vec = math.gcd(kinds[k].vec, starts[k], columns.stride)
            of.setdefault(kinds[k]._replace(vec=vec), []).append(k)
    found = []
    for kind, lookups in sorted(of.items()):
        lookups.sort(key=lambda k: -_ids(call, k))  # stable: equal ones keep the order of columns
        while lookups:
            group = _group(call, kind, lookups)
            if len(group.lookups) >= _LEAST:
                found.append(group)
            lookups = lookups[len(group.lookups) :]
    return found


def _ids(call: Call, k: int) -> int:
    """Ids per sample of lookup k."""
    return 1 if call.layout.mode[k] == "none" else call.ids[k].shape[1]


def _takes(call: Call, k: int) -> bool:
    mode, weight = call.layout.mode[k], call.weight(k)
    if mode == "max" or call.per_sample_weights[k] is not None or not weight.shape[1]:
        return False
    if weight.stride(0) * weight.itemsize >= _MOST_BYTES:
        return False
    return mode == "none" or (call.offsets[k] is None and 1 <= _ids(call, k) <= _MOST_IDS)


def _group(call: Call, kind: Kind, lookups: Sequence[int]) -> Group:
    """As many of the first ``lookups`` as one launch has room for; at least one."""
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
    """A group and a number of samples. ``first``: the index of its first lookup among all;
    ``stride``: the row stride of the matrix, in elements.
    """

    def __init__(
        self, group: Group, first: int, samples: int, stride: int, multiprocessors: int
    ) -> None:
        self.group, self.first, self.samples, self.stride = group, first, samples, stride
        self.bits = group.bits(samples, multiprocessors)
        self.blocks = -(-samples >> self.bits)
        self.kernel, self.shared = group.kind.kernel(), group.shared(self.bits)

    def run(self, on: Gpu, words: int, errors: int, parts: Placed | None, matrix: int) -> None:
        """Launch it. ``words``, ``errors`` and ``matrix`` are the addresses of this group's
        lookups, the error counters and the matrix; ``parts``: other tensors to write there too.
        """
        group, (given, at) = self.group, parts or (None, None)
        arguments = (
            c_void_p(words), c_int32(len(group.lookups)), c_void_p(errors), c_int64(self.samples),
            c_int32(self.bits), c_int32(group.pieces), c_int32(group.pooled), c_int32(group.ids),
            c_void_p(at), c_int32(given.number if given else 0),
            c_int32(given.columns if given else 0), c_void_p(matrix), c_int64(self.stride),
        )  # fmt: skip
        on.launch(self.kernel, (self.blocks, 1, 1), (BLOCK, 1, 1), self.shared, arguments)
