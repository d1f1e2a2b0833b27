"""Relu and dropout on the GPU, remembered as one bit an element; see csrc/cuda/mlp_epilogue.cu.

The bit says whether the gradient passes: the element was positive and was kept. It lies as
cublasLt's DRELU epilogue reads it, so that a product backward applies relu and dropout of the layer
below by itself. Keep bits are Philox 4x32-10 of a seed in device memory and the element's place: a
graph that draws a new seed at each replay has a new mask at each.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Dims, Kernel
from recast.runtime.gpu.gpu import Gpu

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as RECAST_OF and RECAST_SUM
BLOCK = 256
# Rows a thread reads at a time.
AHEAD = {"mlp_activate": 2, "mlp_mask_gradient": 4, "mlp_one_output": 2}
_GROUP = 8  # columns a thread takes: those of one byte
_ROWS = 8  # of each thread, at least, before the sums of a column are split further
_BLOCKS = 4  # for each multiprocessor, where sums are split
_MOST_BLOCKS = 65535  # in the second direction of a grid


@lru_cache(maxsize=256)
def kernel(name: str, of: int, sum: int, vec: int, lanes: int) -> Kernel:
    """A kernel of mlp_epilogue.cu by its macros: codes of dtypes, and how it reads."""
    values = {"OF": of, "SUM": sum, "VEC": vec, "LANES": lanes, "BLOCK": BLOCK}
    values["AHEAD"] = AHEAD.get(name, 1)
    defines = {f"RECAST_{macro}": value for macro, value in values.items()}
    return Kernel(nvrtc.program("mlp_epilogue.cu", defines=defines), name)


def row_bytes(columns: int) -> int:
    """Bytes of one row of a mask: cublasLt wants rows of 128 bits."""
    return -(-columns // 128) * 16


def empty(rows: int, columns: int, like: Tensor) -> Tensor:
    """A mask to be written: uint8 (rows, bytes)."""
    return torch.empty(rows, row_bytes(columns), dtype=torch.uint8, device=like.device)


def seed_for(x: Tensor) -> Tensor:
    """(1,) int64 on the device of ``x``, from torch's generator there."""
    return torch.empty(1, dtype=torch.int64, device=x.device).random_()


def scale_of(p: float) -> float:
    """What dropout multiplies the elements by that it keeps."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def activate(
    gpu: Gpu,
    x: Tensor,
    out: Tensor | None,
    bits: Tensor | None,
    *,
    relu: bool,
    p: float = 0.0,
    seed: Tensor | None = None,
    layer: int = 0,
) -> None:
    """out = dropout(relu(x), p), and its mask.

    ``x, out``: (rows, n), contiguous; ``out`` may be ``x``, None if only the mask is wanted.
    ``bits``: (rows, row_bytes(n)), or None. ``seed``: from :func:`seed_for`; None: no dropout.
    ``layer``: equal seeds draw independent masks for different layers.
    """
    rows, n = x.shape
    at = x.data_ptr()
    to = None if out is None else at if out is x else out.data_ptr()
    vec = _vec(n, at | (to or 0), x.itemsize)
    chosen, grid, bytes_, numbers = _activation(
        x.dtype, rows, n, None if bits is None else bits.shape[1], vec, relu, p,
        seed is not None, layer,
    )  # fmt: skip
    gpu.launch(
        chosen, grid, (BLOCK, 1, 1), 0,
        (
            c_void_p(at), c_void_p(to), c_void_p(None if bits is None else bits.data_ptr()), bytes_,
            c_void_p(None if seed is None else seed.data_ptr()), *numbers,
        ),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _activation(
    of: torch.dtype, rows: int, n: int, width: int | None, vec: int, relu: bool, p: float,
    drops: bool, layer: int,
) -> tuple[Kernel, Dims, Argument, tuple[Argument, ...]]:  # fmt: skip
    """What of a launch of ``mlp_activate`` is alike in all calls but for addresses."""
    bytes_ = -(-n // _GROUP) if width is None else width
    lanes = _lanes(bytes_)
    # The last of 2^32 random numbers that drops; passed by its bits.
    last = max(round(p * 2**32), 1) - 1 if drops else 0
    at_once = BLOCK // lanes * AHEAD["mlp_activate"]
    return (
        kernel("mlp_activate", CODES[of], 0, vec, lanes),
        (-(-rows // at_once), -(-bytes_ // lanes), 1),
        c_int32(bytes_),
        (c_int32(layer), c_int32(last), c_float(scale_of(p)), *map(c_int32, (relu, rows, n))),
    )


class Cut(NamedTuple):
    """How a matrix is cut among the blocks of a launch."""

    tiles: int  # of columns
    blocks: int  # of rows
    chunk: int  # rows of each
    lanes: int


def cut(gpu: Gpu, rows: int, n: int, summed: bool) -> Cut:
    """Of (rows, n); ``summed``: each block leaves sums of its rows, so that there are few."""
    return _cut(gpu.multiprocessors if summed else 0, rows, n)


def _cut(multiprocessors: int, rows: int, n: int) -> Cut:
    groups = -(-n // _GROUP)
    lanes = _lanes(groups)
    tiles, at_once = -(-groups // lanes), BLOCK // lanes
    most = -(-_BLOCKS * multiprocessors // tiles) if multiprocessors else _MOST_BLOCKS
    chunk = max(at_once * _ROWS, -(-rows // (most * at_once)) * at_once)
    return Cut(tiles, -(-rows // chunk), chunk, lanes)


def gradient(
    gpu: Gpu, dy: Tensor, bits: Tensor, scale: float, out: Tensor, sums: Tensor | None = None
) -> None:
    """out = dy * scale where the mask is set, else 0; sums = the column sums of that, always alike.

    ``dy, out``: (rows, n), contiguous, may be one. ``bits``: (rows, row_bytes(n)). ``sums``: (n,),
    of any dtype in :data:`CODES`, or None.
    """
    (rows, n), of, parts = dy.shape, dy.dtype, None
    at = dy.data_ptr()
    to = at if out is dy else out.data_ptr()
    chosen, grid, width, numbers = _masking(
        of, rows, n, bits.shape[1], _vec(n, at | to, dy.itemsize),
        0 if sums is None else gpu.multiprocessors, scale,
    )  # fmt: skip
    if sums is not None:
        parts = torch.empty(grid[1], n, dtype=torch.float32, device=dy.device)
    gpu.launch(
        chosen, grid, (BLOCK, 1, 1), 0,
        (
            c_void_p(at), c_void_p(bits.data_ptr()), *width, c_void_p(to),
            c_void_p(None if parts is None else parts.data_ptr()), *numbers,
        ),
    )  # fmt: skip
    if sums is not None and parts is not None:
        chosen, grid, numbers = _joining(of, sums.dtype, len(parts), n)
        gpu.launch(
            chosen, grid, (BLOCK, 1, 1), 0,
            (c_void_p(parts.data_ptr()), *numbers, c_void_p(sums.data_ptr())),
        )  # fmt: skip


@lru_cache(maxsize=256)
def _masking(
    of: torch.dtype, rows: int, n: int, bytes_: int, vec: int, multiprocessors: int, scale: float
) -> tuple[Kernel, Dims, tuple[Argument, ...], tuple[Argument, ...]]:
    """Likewise of ``mlp_mask_gradient``; ``multiprocessors``: 0 without sums."""
    tiles, blocks, chunk, lanes = _cut(multiprocessors, rows, n)
    return (
        kernel("mlp_mask_gradient", CODES[of], 0, vec, lanes),
        (tiles, blocks, 1),
        (c_int32(bytes_), c_float(scale)),
        tuple(map(c_int32, (rows, n, chunk))),
    )


@lru_cache(maxsize=256)
def _joining(
    of: torch.dtype, sums: torch.dtype, blocks: int, n: int
) -> tuple[Kernel, Dims, tuple[Argument, ...]]:
    """Likewise of ``mlp_sum_parts``."""
    chosen = kernel("mlp_sum_parts", CODES[of], CODES[sums], 1, 1)
    return chosen, (-(-n // 32), 1, 1), (c_int32(blocks), c_int32(n))


def dropout(
    gpu: Gpu,
    x: Tensor,
    ours: bool,
    relu: bool,
    p: float,
    seed: Tensor | None,
    layer: int,
    keeps: bool,
) -> tuple[Tensor, Tensor | None]:
    """dropout(relu(x), p), in place of ``x`` where it is ``ours``, and with ``keeps`` its mask.

    ``x`` of any shape; the mask is that of :func:`flat`. The rest is as for :func:`activate`.
    """
    dense = x.contiguous()
    out = dense if ours or dense is not x else torch.empty_like(dense)
    rows = flat(dense)
    bits = empty(rows.shape[0], rows.shape[1], x) if keeps else None
    activate(gpu, rows, flat(out), bits, relu=relu, p=p, seed=seed, layer=layer)
    return out, bits


def flat(x: Tensor) -> Tensor:
    """(rows, n) of a contiguous tensor of any shape."""
    return x.view(-1, x.shape[-1]) if x.dim() else x.view(1, 1)


def unpack(bits: Tensor, columns: int) -> Tensor:
    """A mask as bool (rows, columns)."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) >> places & 1).flatten(1)[:, :columns].bool()


def masks(out: Tensor) -> list[Tensor]:
    """What each dropout of the call that made ``out`` let pass, in order: bool, of its shape.

    A dropout behind a relu: also what the relu let pass. With ``dropout(relu(z))`` replaced by
    ``relu(z) * mask / (1 - p)``, plain torch gives the same result and the same gradients. ``out``
    is the very result of ``mlp`` or ``relu_dropout`` on a GPU, with gradients recorded, before any
    backward freed them; of anything else there are none.
    """
    node: Any = out.grad_fn
    maker: Any = getattr(node, "_forward_cls", None)
    return maker.masks(node) if hasattr(maker, "masks") else []


def _lanes(groups: int) -> int:
    """The least power of two that takes the groups of a row, up to a warp."""
    return min(1 << (groups - 1).bit_length(), 32)


def vec_of(n: int, *tensors: Tensor) -> int:
    """Elements to be read at once: 16 bytes where sizes (``n`` by bits) and addresses allow it."""
    low = n
    for t in tensors:
        low |= t.data_ptr() // t.element_size()
    return min(low & -low, _GROUP)


def _vec(n: int, addresses: int, size: int) -> int:
    """The same of the bits of all addresses, of elements of ``size`` bytes, a power of two."""
    low = n | addresses // size
    return min(low & -low, _GROUP)
