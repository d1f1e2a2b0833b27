"""The launches of ``csrc/cuda/dot_warps.cu``: few rows, on tensor cores, one warp per sample.

It does the work of ``dot_interaction.cu`` in a fifth of the instructions, and loads the rows of the
next sample meanwhile, so memory is the bottleneck: for 27 x 128 in bfloat16 an H200 moves 3.8 TB/s
forward and 3.9 backward, compared with 2.7 and 3.1 by that kernel and 4.2 in a copy.
``dot_warps_gathered.cu`` likewise replaces ``dot_gathered.cu``.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import NamedTuple

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu

_SHARED = 96 << 10  # bytes per block; every architecture from sm_80 on has them
_WARPS = 2
# Of a multiprocessor: a few times those it has at once, so that blocks that begin late, where
# another kernel runs beside, are not the last to end.
_BLOCKS = 48
_MOST_ROWS = 32


class Warps(NamedTuple):
    """Both kernels of a class."""

    forward: Kernel
    backward: Kernel
    features: int
    dim: int
    products: int
    size: int  # bytes of an element
    staged: bool  # rows are looked up that are of another dtype

    def launch_forward(
        self, gpu: Gpu, rows: c_void_p, dense: tuple[int, int, int], pad: int, batch: int,
        out: tuple[int, int], more: Sequence[Argument],
    ) -> bool:  # fmt: skip
        """``dense``: address, stride and width; ``out``: address and stride; ``more``: the sources
        of rows that are looked up. Whether it is done.
        """
        address, stride, width = dense
        if width and (address % 16 or (stride | width) * self.size % 16):
            return False
        line = _up(self.size * (width + self.products + pad))
        shared = _up(8 * self.features) + self._rows(self.features) + 2 * line
        return self._launch(
            gpu, self.forward, shared, batch,
            (
                rows, c_void_p(address), c_int64(stride), c_int32(width), c_int32(pad),
                c_int32(batch), c_void_p(out[0]), c_int64(out[1]), *more,
            ),
        )  # fmt: skip

    def launch_backward(
        self, gpu: Gpu, rows: c_void_p, grad: tuple[int, int], width: int, batch: int, same: int,
        into: c_void_p, more: Sequence[Argument],
    ) -> bool:  # fmt: skip
        """``grad``: address and stride; ``same``: as the kernel takes it. Whether it is done."""
        address, stride = grad
        if address % 16 or stride * self.size % 16:
            return False
        line = _up(self.size * (width + self.products + 1))
        shared = 16 * self.features + self._rows(self.features + 1) + 2 * line
        return self._launch(
            gpu, self.backward, shared, batch,
            (
                rows, c_void_p(address), c_int64(stride), c_int32(width), c_int32(batch),
                c_int32(same), into, *more,
            ),
        )  # fmt: skip

    def _rows(self, count: int) -> int:
        """Bytes of a warp for so many rows of two samples, or of one and what is looked up."""
        rows = count * (self.size * self.dim + 16)
        return rows + 4 * self.features * self.dim if self.staged else 2 * rows

    def _launch(
        self, gpu: Gpu, kernel: Kernel, shared: int, batch: int, arguments: tuple[Argument, ...]
    ) -> bool:
        if _WARPS * shared > _SHARED:
            return False
        blocks = min(-(-batch // _WARPS), _BLOCKS * gpu.multiprocessors)
        gpu.launch(kernel, (blocks, 1, 1), (32 * _WARPS, 1, 1), _WARPS * shared, arguments)
        return True


@lru_cache(maxsize=1024)
def compiled(
    features: int, dim: int, pairs: int, count: int, element: int, table: int | None = None
) -> Warps | None:
    """The kernels for rows and results of one dtype that start at multiples of 16 bytes, and are
    multiplied as ``element``, the same or TF32; None where they do not take them. The rest as of
    ``dot_cuda.compiled``.
    """
    if not pairs or not count or features > _MOST_ROWS or dim % 16 or not element:
        return None
    own = element % 3  # TF32 numbers are those of float32
    values = {"FEATURES": features, "DIM": dim, "PAIRS": pairs, "ELEMENT": element}
    defines = {f"RECAST_{name}": value for name, value in values.items()}
    defines["RECAST_BLOCK"] = 32 * _WARPS
    if table is None:
        program = nvrtc.program("dot_warps.cu", defines=defines)
    elif table in (0, own):
        program = nvrtc.program("dot_warps_gathered.cu", defines=defines | {"RECAST_TABLE": table})
    else:
        return None
    forward, backward = Kernel(program, "dot_forward"), Kernel(program, "dot_backward")
    size, staged = (2 if own else 4), table is not None and table != own
    return Warps(forward, backward, features, dim, count, size, staged)


def _up(bytes_: int) -> int:
    return -(-bytes_ // 16) * 16
