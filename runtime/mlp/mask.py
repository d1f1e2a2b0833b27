"""Relu and dropout on the GPU, and the masks for their gradients; see csrc/cuda/mlp_epilogue.cu.

What is saved is one bit per element, that it was positive and not dropped, or, for a relu alone,
only its output (:class:`Gate`). The bits are in the layout of cublasLt's DRELU epilogue, so that a
product in backward can apply relu and dropout of the layer below by itself. Which elements are kept
comes from Philox 4x32-7 of a seed in device memory and the element's index: a graph that draws a
new seed at each replay has a new mask each time.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int32, c_void_p
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu import nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Dims, Kernel, pointer
from recast.runtime.gpu.gpu import Gpu

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as RECAST_OF and RECAST_SUM
BLOCK = 256
_AHEAD = 64  # bytes of a matrix that a thread reads at a time, or 8 columns of two rows
_GROUP = 8  # columns a thread takes: those of one byte
# Blocks per multiprocessor in kernels that sum over rows: as many as their registers let run.
BLOCKS = {
    "mlp_mask_gradient": 4, "mlp_output_gradient": 4, "mlp_one_output": 3,
    "mlp_one_output_forward": 8,
}  # fmt: skip
_MOST_BLOCKS = 65535  # in the second direction of a grid
# Rows, and columns: the kernels count each in 32 bits, up to the end of the last block.
MOST = 2**31 - 2**12

Finish = Callable[[], None]  # what is left to do, on any stream that waits for this one


class Gate(NamedTuple):
    """Where a gradient passes relu and dropout, and its factor. Exactly one of the two tensors is
    given.
    """

    bits: Tensor | None  # uint8 (rows, bytes)
    out: Tensor | None = None  # (rows, n), output of a relu alone: it passes where not <= 0
    scale: float = 1.0  # of the dropout


@lru_cache(maxsize=256)
def kernel(name: str, of: int, sum: int, vec: int, lanes: int) -> Kernel:
    """A kernel of mlp_epilogue.cu or mlp_one_output.cu by its macros: dtypes, and how it reads."""
    values = {"OF": of, "SUM": sum, "VEC": vec, "LANES": lanes, "BLOCK": BLOCK}
    values["AHEAD"] = ahead(of)
    defines = {f"RECAST_{macro}": value for macro, value in values.items()}
    source = "mlp_one_output.cu" if name.startswith("mlp_one_output") else "mlp_epilogue.cu"
    return Kernel(nvrtc.program(source, defines=defines), name)


def ahead(of: int) -> int:
    """Rows that a thread reads at a time; ``of``: the code of their dtype."""
    return _AHEAD // (_GROUP * (2 if of else 4))


def row_bytes(columns: int) -> int:
    """Bytes of one row of a mask: cublasLt wants rows of 128 bits."""
    return -(-columns // 128) * 16


def empty(rows: int, columns: int, like: Tensor) -> Tensor:
    """An uninitialised mask: uint8 (rows, bytes)."""
    return torch.empty(rows, row_bytes(columns), dtype=torch.uint8, device=like.device)


def seed_for(x: Tensor) -> Tensor:
    """(1,) int64 on the device of ``x``, from torch's generator there."""
    return torch.empty(1, dtype=torch.int64, device=x.device).random_()


def scale_of(p: float) -> float:
    """The factor that dropout applies to the elements it keeps."""
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
        (c_void_p(at), c_void_p(to), pointer(bits), bytes_, pointer(seed), *numbers),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _activation(
    of: torch.dtype, rows: int, n: int, width: int | None, vec: int, relu: bool, p: float,
    drops: bool, layer: int,
) -> tuple[Kernel, Dims, Argument, tuple[Argument, ...]]:  # fmt: skip
    """What a launch of ``mlp_activate`` needs besides addresses; cached, as calls repeat."""
    bytes_ = -(-n // _GROUP) if width is None else width
    # The largest 32-bit random number that drops its element; passed by its bits.
    last = max(round(p * 2**32), 1) - 1 if drops else 0
    scale = scale_of(p) if drops else 1.0
    tiles, blocks, lanes = _cut(of, 0, rows, bytes_)
    return (
        kernel("mlp_activate", CODES[of], 0, vec, lanes), (tiles, blocks, 1),
        c_int32(bytes_),
        (c_int32(layer), c_int32(last), c_float(scale), *map(c_int32, (relu, rows, n))),
    )  # fmt: skip


class Cut(NamedTuple):
    """How a matrix is cut among the blocks of a launch."""

    tiles: int  # of columns
    blocks: int  # that share the rows
    lanes: int


def fits(x: Tensor) -> bool:
    """Whether the kernels can count rows and columns of ``x``, as :func:`flat` has it."""
    width = x.shape[-1] if x.dim() else 1
    return width <= MOST and x.numel() <= width * MOST


def cut(gpu: Gpu, x: Tensor, name: str, whole: bool = False) -> Cut:
    """The cut of ``x`` (rows, n) for a kernel whose blocks each write sums over their rows, which
    is why there are few of them. ``whole``: each block takes all columns of its rows.
    """
    blocks, groups = BLOCKS[name] * gpu.multiprocessors, -(-x.shape[1] // _GROUP)
    return _cut(x.dtype, blocks, x.shape[0], min(groups, 32) if whole else groups)


def _cut(of: torch.dtype, blocks: int, rows: int, groups: int) -> Cut:
    """``blocks``: roughly the most in all; 0: any number."""
    lanes = _lanes(groups)
    tiles, at_once = -(-groups // lanes), BLOCK // lanes * ahead(CODES[of])
    return Cut(tiles, min(-(-rows // at_once), -(-blocks // tiles) or _MOST_BLOCKS), lanes)


def gradient(
    gpu: Gpu, dy: Tensor, gate: Gate, out: Tensor, sums: Tensor | None = None
) -> Finish | None:
    """out = dy * scale where the gate is open, else 0; sums = its column sums, deterministic.

    ``dy, out``: (rows, n), contiguous, may be the same tensor. ``gate``: with bits of
    (rows, row_bytes(n)), or a contiguous output of dy's dtype. ``sums``: (n,), of any dtype in
    :data:`CODES`; written by the returned function, to be called once. None: nothing is returned.
    """
    (rows, n), of, parts = dy.shape, dy.dtype, None
    at = dy.data_ptr()
    to = at if out is dy else out.data_ptr()
    bits, by = gate.bits, gate.out
    read = bits if by is None else by
    assert read is not None
    together = at | to | (0 if by is None else by.data_ptr())
    chosen, grid, between, numbers = _masking(
        of, rows, n, None if bits is None else bits.shape[1], _vec(n, together, dy.itemsize),
        0 if sums is None else gpu.multiprocessors, gate.scale,
    )  # fmt: skip
    if sums is not None:
        parts = torch.empty(grid[1], n, dtype=torch.float32, device=dy.device)
    gpu.launch(
        chosen, grid, (BLOCK, 1, 1), 0,
        (
            c_void_p(at), c_void_p(read.data_ptr()), *between, c_void_p(to),
            pointer(parts), *numbers,
        ),
    )  # fmt: skip
    if sums is None or parts is None:
        return None
    return partial(_join, gpu, parts, sums, of)


@lru_cache(maxsize=256)
def _masking(
    of: torch.dtype, rows: int, n: int, bytes_: int | None, vec: int, multiprocessors: int,
    scale: float,
) -> tuple[Kernel, Dims, tuple[Argument, ...], tuple[Argument, ...]]:  # fmt: skip
    """What a launch of ``mlp_mask_gradient`` needs besides addresses; cached, as calls repeat.

    Without ``bytes_``: the same for ``mlp_output_gradient``.
    """
    name = "mlp_output_gradient" if bytes_ is None else "mlp_mask_gradient"
    tiles, blocks, lanes = _cut(of, BLOCKS[name] * multiprocessors, rows, -(-n // _GROUP))
    return (
        kernel(name, CODES[of], 0, vec, lanes),
        (tiles, blocks, 1),
        () if bytes_ is None else (c_int32(bytes_), c_float(scale)),
        (c_int32(rows), c_int32(n)),
    )


def _join(gpu: Gpu, parts: Tensor, sums: Tensor, of: torch.dtype) -> None:
    """sums (n,) = the column sums of ``parts`` (blocks, n)."""
    chosen, grid, numbers = _joining(of, sums.dtype, *parts.shape)
    gpu.launch(
        chosen, grid, (BLOCK, 1, 1), 0,
        (c_void_p(parts.data_ptr()), *numbers, c_void_p(sums.data_ptr())),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _joining(
    of: torch.dtype, sums: torch.dtype, blocks: int, n: int
) -> tuple[Kernel, Dims, tuple[Argument, ...]]:
    """The same for ``mlp_sum_parts``."""
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
    """dropout(relu(x), p), in place if ``x`` is ``ours``, and with ``keeps`` its mask, else None.

    ``x`` may have any shape; the mask is for :func:`flat` of it. The rest is as in
    :func:`activate`.
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
    """The mask of each dropout in the call that made ``out``, in order: bool, of its input's shape.

    After a relu, the mask is of both. With ``dropout(relu(z))`` replaced by
    ``relu(z) * mask / (1 - p)``, plain torch gives the same result and the same gradients. ``out``
    must be the result itself of ``mlp`` or ``relu_dropout`` on a GPU or of ``field_attention``,
    recorded by autograd, before backward frees the masks; for other tensors the list is empty.
    """
    node: Any = out.grad_fn
    maker: Any = getattr(node, "_forward_cls", None)
    return maker.masks(node) if hasattr(maker, "masks") else []


def _lanes(groups: int) -> int:
    """The least power of two of lanes for the groups of a row, up to a warp."""
    return min(1 << (groups - 1).bit_length(), 32)


def vec_of(n: int, *tensors: Tensor) -> int:
    """Elements per load: 16 bytes if sizes (``n``: all of them, or-ed) and addresses allow it."""
    low = n
    for t in tensors:
        low |= t.data_ptr() // t.element_size()
    return min(low & -low, _GROUP)


def _vec(n: int, addresses: int, size: int) -> int:
    """The same for ``addresses`` or-ed; ``size``: bytes per element, a power of two."""
    low = n | addresses // size
    return min(low & -low, _GROUP)
