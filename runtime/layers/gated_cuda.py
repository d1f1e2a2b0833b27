"""``gated_sums`` on a GPU: all gates over one set of vectors in one kernel, and one backward.

With E vectors of D elements and T gates of n columns each, forward reads E D and writes T D;
backward reads both and writes E D: 3 E + 2 T rows of D per sample. (Each gate finds the vectors
that the previous one read in shared memory, or in a cache if there are too many.)
``torch.compile`` stacks the vectors for a product, writing and reading E D, and every gate reads
n D; in backward each gate reads n D and writes a gradient of n D, all of which are read again to be
added: 3 E + 4 T n + 3 T rows. For the 8 experts and 3 gates of an MMoE that is 129 rows; here it
is 30.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES, Rows, rows_of

CONDITION = (
    "float32, float16 and bfloat16 vectors and gates of one dtype; under autocast products of"
    " its dtype"
)
_BLOCK, _LANES = 128, 16  # threads per block, and per sample if shared memory allows
_SHARED = 48 << 10  # bytes per block that a kernel may use without opting in
_MOST = 2**31 - 2**20  # int32, less what the last blocks count past the end


@lru_cache(maxsize=16)
def _kernels(dtype: int, vec: int) -> tuple[Kernel, Kernel]:
    defines = {"RECAST_IN": dtype, "RECAST_VEC": vec, "RECAST_BLOCK": _BLOCK}
    program = nvrtc.program("gated_sums.cu", defines=defines)
    return Kernel(program, "gated_forward"), Kernel(program, "gated_backward")


class _Form(NamedTuple):
    """How a launch is cut: threads per sample, shared bytes per block, and whether the vectors of
    the gates are kept there."""

    lanes: int
    shared: int
    kept: bool


def _form(dim: int, vec: int, columns: int, vectors: int, row: int, copies: int) -> _Form:
    """For gates over ``vectors`` vectors of ``row`` bytes; ``copies``: floats per column.

    With fewer threads per sample, a warp's fixed work is shared by more samples.
    """
    packs = min(32, 1 << (-(-dim // vec) - 1).bit_length())
    forms = []
    for lanes in (packs, _LANES) if packs > _LANES else (packs,):
        samples = _BLOCK // lanes
        weights = copies * samples * columns * 4
        rows = samples * vectors * row + 4
        kept = weights + rows <= _SHARED
        forms.append(_Form(lanes, weights + rows * kept, kept))
    return max(forms, key=lambda form: (form.shared <= _SHARED, form.kept, -form.lanes))


@dataclass(frozen=True, slots=True)
class Sums:
    """A call as the kernels read it, with the C++ one's interface. Its tensors must live on."""

    gpu: Gpu
    vectors: Rows
    gates: Sequence[Tensor]
    chosen: Sequence[int]
    softmax: bool
    dtype: torch.dtype

    def forward(self, outs: Sequence[Tensor], threads: int) -> None:
        """Write the results, (B, D) each with contiguous rows."""
        self._launch(0, 1, outs, self._of_gates(outs, [0] * len(outs)), array("q"), ())

    def backward(
        self, upstream: Sequence[Tensor], of_vectors: Sequence[Tensor], of_gates: Sequence[Tensor],
        threads: int,
    ) -> None:  # fmt: skip
        """Write the gradients of all vectors and gates, contiguous."""
        into = rows_of(of_vectors)
        assert into is not None
        gates = self._of_gates(upstream, [g.data_ptr() for g in of_gates])
        readers: list[list[int]] = [[] for _ in range(len(self.vectors.at) // 2)]
        columns = ((t, k) for t, gate in enumerate(self.gates) for k in range(gate.shape[1]))
        for column, ((t, _), vector) in enumerate(zip(columns, self.chosen, strict=True)):
            readers[vector] += (t, column)
        starts = accumulate((len(r) // 2 for r in readers), initial=0)
        more = into.at + array("q", starts) + array("q", [x for r in readers for x in r])
        self._launch(1, 2, upstream, gates, more, (into.bits,))

    def _of_gates(self, sums: Sequence[Tensor], into: Sequence[int]) -> array[int]:
        """A ``Gate`` for each."""
        words, first = array("q"), 0
        for gate, sum, gradient in zip(self.gates, sums, into, strict=True):
            words.extend((gate.data_ptr(), *gate.stride(), first, gate.shape[1]))
            words.extend((sum.data_ptr(), sum.stride(0), gradient))
            first += gate.shape[1]
        return words

    def _launch(
        self, which: int, copies: int, sums: Sequence[Tensor], gates: array[int],
        more: array[int], bits: tuple[int, ...],
    ) -> None:  # fmt: skip
        (batch, *_, dim), size = self.vectors.shapes[0], self.dtype.itemsize
        vec, together = 16 // size, self.vectors.bits
        for found in (*bits, *(t.data_ptr() | t.stride(0) * size for t in sums)):
            together |= found
        if dim % vec or together % 16:
            vec = 1
        table = self.gpu.upload(self.vectors.at + gates + array("q", self.chosen) + more)
        columns, vectors = len(self.chosen), len(self.vectors.at) // 2

        def at(word: int) -> c_void_p:
            return c_void_p(table.data_ptr() + 8 * word)

        of_gates = 2 * vectors
        of_chosen = of_gates + 8 * len(self.gates)
        rows = vectors + (len(self.gates) if which else 0)
        form = _form(dim, vec, columns, rows, dim * size, copies)
        arguments: tuple[Argument, ...] = (
            at(0), c_int32(vectors), at(of_gates), c_int32(len(self.gates)), at(of_chosen),
            c_int32(columns), c_int32(dim), c_int32(batch), c_int32(form.lanes),
            c_int32(self.softmax), c_int32(form.kept),
        )  # fmt: skip
        if which:
            into = of_chosen + columns
            starts = into + 2 * vectors
            arguments += (at(into), at(starts), at(starts + vectors + 1))
        kernel = _kernels(CODES[self.dtype], vec)[which]
        grid = (-(-batch // (_BLOCK // form.lanes)), 1, 1)
        self.gpu.launch(kernel, grid, (_BLOCK, 1, 1), form.shared, arguments)


def sums(
    gpu: Gpu, vectors: Sequence[Tensor], gates: Sequence[Tensor], chosen: Sequence[int],
    softmax: bool,
) -> Sums | None:  # fmt: skip
    """The call; None if the kernels do not support it. Shapes must have been checked."""
    rows, first = rows_of(vectors), vectors[0]
    if rows is None or first.dtype not in CODES or not gates:
        return None
    if any(g.dtype != first.dtype or g.device != first.device for g in gates):
        return None
    batch, dim = first.shape[0], first.shape[-1]
    if not 0 < batch <= _MOST or not dim or not chosen:
        return None
    # With lanes for reads of single elements there are the fewest samples, with wide ones the most.
    wide = _form(dim, 16 // first.itemsize, len(chosen), 1 << 30, 1, 2)
    if wide.shared > _SHARED:
        return None
    return Sums(gpu, rows, gates, chosen, softmax, first.dtype)
