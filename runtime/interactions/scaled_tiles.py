"""``scaled_einsum`` on a GPU's tensor cores: product and scaling in one kernel, and the gradients.

For rows x, a weight W and a scale s, with rows r, columns (e, i) and terms j of the sum::

    out[r, e, i] = s[r, i] Σ_j W[e, i, j] x[r, j]

The product is as large as the result, which for a short sum is nearly all the traffic: a separate
kernel for the scaling moves it twice more, and keeping the product for backward twice again. Here
it exists in registers only, and backward computes it again. The kernels, in ``csrc/cuda``:

    scaled_tiles_forward   reads x and s, writes the result
    scaled_tiles_inputs    reads x, s and the gradient, writes dx and ds
    scaled_weight          reads the same, sums dW; blocks sum some rows each, in a fixed order

They serve what torch would multiply on tensor cores: 16-bit numbers, and float32 if torch's
settings allow TF32. A warp keeps its rows of x in registers, so that j goes up to 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32, c_int64
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime.batched_grads import each_of_batch
from recast.runtime.gpu import cublaslt, gpu, nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel, pointer
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES

_MOST = 2**31 - 1
_GROUPS = 8  # sixteens of j that registers have room for
_FEW = 16  # columns of one e: of fewer, most of a tile would be behind the last
_FORWARD, _INPUTS = 128, 256  # threads of a block
_TILES = 2  # sixteens of rows of a warp of the forward


class _Plan(NamedTuple):
    """The roles of the letters in an equation that the kernels support."""

    rows_second: bool  # the rows are the second operand, the weight the first
    rows: str
    between: str  # columns that the scale lacks
    inner: str  # columns that it has
    summed: str


@lru_cache(maxsize=256)
def plan(scale: str, a: str, b: str, output: str) -> _Plan | None:
    """None: letters of a batch, of sums over one operand only, or in another order."""
    for second in (True, False):
        rows_of, weight_of = (b, a) if second else (a, b)
        rows = "".join(c for c in rows_of if c not in weight_of)
        summed = "".join(c for c in rows_of if c in weight_of)
        columns = output[len(rows) :]
        if output[: len(rows)] != rows or {*weight_of} != {*columns, *summed}:
            continue
        inner = scale.removeprefix(rows)
        if not rows or not inner or not summed or {*summed} & {*output}:
            continue
        if scale == rows + inner and columns.endswith(inner):
            return _Plan(second, rows, columns.removesuffix(inner), inner, summed)
    return None


def scaled(scale: Tensor, a: Tensor, b: Tensor, terms: tuple[str, str, str, str]) -> Tensor | None:
    """The result; None if the kernels do not support it. ``terms``: of factors and result."""
    there = gpu.serving(b)
    found = None if there is None else plan(*terms)
    if there is None or found is None or torch._C._len_torch_dispatch_stack():
        return None
    dtype = b.dtype
    if dtype not in CODES or not _multiplied(dtype):
        return None
    if any(t.dtype != dtype or t.device != b.device for t in (scale, a)):
        return None
    both = ((a, terms[1]), (b, terms[2]))
    (weight, of_weight), (x, of_x) = both if found.rows_second else both[::-1]
    sizes: dict[str, int] = {}
    for term, t in zip((of_x, of_weight, terms[0]), (x, weight, scale), strict=True):
        for letter, size in zip(term, t.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return None  # torch broadcasts a dimension of 1, and refuses all others
    rows, between, inner, depth = (
        torch.Size(sizes[c] for c in letters).numel()
        for letters in (found.rows, found.between, found.inner, found.summed)
    )
    if not serves(rows, between, inner, depth):
        return None
    flat = _fours(_arranged(x, of_x, found.rows + found.summed, (rows, depth)))
    if scale is x and of_x == found.rows + found.summed:  # one gradient: the kernel adds
        by, flat = None, flat.contiguous()
    else:
        by = _fours(_arranged(scale, terms[0], terms[0], (rows, inner)).contiguous())
    order = found.between + found.inner + found.summed
    of = _arranged(weight, of_weight, order, (between, inner, depth))
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, scale)):
        out: Tensor = ScaledTiles.apply(there, flat, of, by)
    else:
        out = _forward(there, flat, of, flat if by is None else by)
    shape = [sizes[letter] for letter in terms[3]]
    return out if out.dim() == len(shape) else out.view(shape)


def _multiplied(dtype: torch.dtype) -> bool:
    """Whether torch, too, would multiply numbers of ``dtype`` on tensor cores."""
    return dtype != torch.float32 or cublaslt.tf32(dtype)


def serves(rows: int, between: int, inner: int, depth: int) -> bool:
    """Whether the kernels take such sizes: fours are read at once, of sixteens most are needed."""
    if not 0 < rows <= _MOST or not 0 < between * inner <= _MOST // 2 or inner % 4 or depth % 4:
        return False
    tiles = between * -(-inner // 16) * -(-depth // 16)
    return 0 < depth <= 16 * _GROUPS and inner >= _FEW and tiles <= 1 << 20


def _arranged(t: Tensor, term: str, order: str, shape: tuple[int, ...]) -> Tensor:
    """``t`` with its dimensions in another order, then together."""
    if term != order:
        t = t.permute([term.index(letter) for letter in order])
    return t if t.shape == shape else t.reshape(shape)


def _fours(t: Tensor) -> Tensor:
    """Rows, four numbers of which may be read at once."""
    fits = t.stride(1) == 1 and t.stride(0) % 4 == 0 and t.data_ptr() % (4 * t.itemsize) == 0
    return t if fits else t.clone(memory_format=torch.contiguous_format)


class ScaledTiles(torch.autograd.Function):
    """Inputs: the device, x (rows, depth), the weight (between, inner, depth), and the scale (rows,
    inner), contiguous, or None: x. The result: (rows, between, inner).
    """

    @staticmethod
    def forward(ctx: Any, there: Gpu, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        ctx.there = there
        ctx.save_for_backward(x, weight, scale)
        return _forward(there, x, weight, x if scale is None else scale)

    @staticmethod
    @each_of_batch
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        _, of_x, of_weight, of_scale = ctx.needs_input_grad
        if torch.is_grad_enabled() or not _multiplied(x.dtype):
            return None, *_differentiable(ctx.needs_input_grad[1:], x, weight, scale, grad)
        by = x if scale is None else scale
        grad = grad.contiguous()
        if grad.data_ptr() % (4 * grad.itemsize):
            grad = grad.clone()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if of_x else None
        ds = torch.empty_like(by) if of_scale else dx if scale is None else None
        if dx is not None or ds is not None:
            _inputs(ctx.there, x, weight, by, grad, ds, dx)
        dw = _weight(ctx.there, x, weight, by, grad) if of_weight else None
        return None, dx, dw, ds if of_scale else None


def _differentiable(
    needs: Sequence[bool], x: Tensor, weight: Tensor, scale: Tensor | None, grad: Tensor
) -> list[Tensor | None]:
    """In plain torch: with ``create_graph``, and where TF32 is not allowed any more."""
    by = x if scale is None else scale
    scaled = grad * by.unsqueeze(1)
    dx = torch.einsum("rei,eij->rj", scaled, weight)
    ds = (torch.einsum("eij,rj->rei", weight, x) * grad).sum(1)
    dw = torch.einsum("rei,rj->eij", scaled, x)
    found = (dx + ds if scale is None else dx, dw, ds)
    return [t if need else None for t, need in zip(found, needs, strict=True)]


@lru_cache(maxsize=64)
def _kernel(name: str, dtype: int, groups: int, tiles: int) -> Kernel:
    defines = {"RECAST_IN": dtype, "RECAST_GROUPS": groups, "RECAST_TILES": tiles}
    return Kernel(nvrtc.program("scaled_tiles.cu", defines=defines), name)


@lru_cache(maxsize=16)
def _of_weight(dtype: int, halves: int) -> Kernel:
    defines = {"RECAST_IN": dtype, "RECAST_HALVES": halves}
    return Kernel(nvrtc.program("scaled_weight.cu", defines=defines), "scaled_weight")


class _Call(NamedTuple):
    """The sizes of a call, and its kernels."""

    there: Gpu
    x: Tensor
    weight: Tensor

    def kernel(self, name: str) -> Kernel:
        return _kernel(name, CODES[self.x.dtype], self.groups, _TILES)

    @property
    def groups(self) -> int:
        return -(-self.x.shape[1] // 16)

    def of_rows(self, scale: Tensor) -> tuple[Argument, ...]:
        between, inner, depth = self.weight.shape
        return (
            pointer(self.x), c_int64(self.x.stride(0)), pointer(scale), c_int64(len(self.x)),
            *map(c_int32, (between, inner, depth)),
        )  # fmt: skip

    def packed(self, ways: int) -> Tensor:
        """The weight in the order of the lanes; 2: turned, too."""
        between, inner, depth = self.weight.shape
        tiles = between * -(-inner // 16) * self.groups
        words = 64 * self.weight.itemsize  # of a tile
        kernel = self.kernel("scaled_pack")
        made = torch.empty(ways * tiles * words, dtype=torch.int32, device=self.x.device)
        arguments: tuple[Argument, ...] = (
            pointer(self.weight), *map(c_int64, self.weight.stride()),
            *map(c_int32, (between, inner, depth)), pointer(made),
        )  # fmt: skip
        self.there.launch(kernel, (-(-tiles // 8), ways, 1), (256, 1, 1), 0, arguments)
        return made


def _forward(there: Gpu, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    call = _Call(there, x, weight)
    out = x.new_empty(len(x), *weight.shape[:2])
    packed = call.packed(1)
    arguments = (*call.of_rows(scale), pointer(packed), pointer(out))
    grid = (-(-len(x) // (_FORWARD // 2 * _TILES)), 1, 1)
    shared = 768 * call.groups * x.itemsize
    there.launch(call.kernel("scaled_tiles_forward"), grid, (_FORWARD, 1, 1), shared, arguments)
    return out


def _inputs(
    there: Gpu, x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor, ds: Tensor | None,
    dx: Tensor | None,
) -> None:  # fmt: skip
    """``ds`` may be ``dx``: it gets the sum of both."""
    call = _Call(there, x, weight)
    packed = call.packed(2)
    arguments = (
        *call.of_rows(scale), pointer(packed), pointer(grad), pointer(ds), pointer(dx),
        c_int32(ds is not None and ds is dx),
    )  # fmt: skip
    shared = 1536 * call.groups * x.itemsize + (24 << 10) * (x.itemsize == 4)
    grid = (-(-len(x) // (_INPUTS // 2)), 1, 1)
    there.launch(call.kernel("scaled_tiles_inputs"), grid, (_INPUTS, 1, 1), shared, arguments)


def _weight(there: Gpu, x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
    between, inner, depth = weight.shape
    count, halves = between * inner, 1 << (-(-depth // 32) - 1).bit_length()
    high, step = 128 if halves > 2 else 256, 64 // x.itemsize
    across, steps = -(-count // high), -(-len(x) // step)
    parts = min(steps, max(1, there.multiprocessors // across))
    each = -(-steps // parts)
    parts = -(-steps // each)
    sums = torch.empty(parts, count, depth, dtype=torch.float32, device=x.device)
    arguments: tuple[Argument, ...] = (
        pointer(x), c_int64(x.stride(0)), pointer(scale), pointer(grad), c_int64(len(x)),
        *map(c_int32, (count, inner, depth)), c_int64(each), pointer(sums),
    )  # fmt: skip
    shared = 2 * 4 * 16 * (high + 8 + 32 * halves + 8)
    kernel = _of_weight(CODES[x.dtype], halves)
    there.launch(kernel, (across, parts, 1), (256, 1, 1), shared, arguments)
    found = sums[0] if parts == 1 else sums.sum(0)
    return found.view(weight.shape).to(weight.dtype)
