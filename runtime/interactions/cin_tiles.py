"""``compressed_interaction`` on a GPU's tensor cores: products of pairs in registers only.

The layer is a matrix product; one factor, the products of all pairs, has H M numbers per column.
The kernels compute this factor as they multiply, so they read the features once and write the
result: nothing of that size goes to memory or even to a cache. There are three, in ``csrc/cuda``:

    cin_forward   out = act(W (x ∘ y) + b)
    cin_inputs    dx and dy: the gradient of the products, a column's at a time, and both its sums
    cin_weight    dW and db, sums over columns; blocks sum some columns each, in a fixed order

They serve what torch would multiply on tensor cores: 16-bit numbers, and float32 if torch's
settings for convolutions allow TF32, as they do by default: the plain layer is a Conv1d. Each
kernel keeps the features of one side, ``inner``, in registers and loops over those of the other,
``outer``, choosing the sides so as to waste less.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.runtime.gpu import cublaslt, nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel, pointer
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES

_MOST = 2**31 - 2**20  # columns: int32, less what the last block counts past the end
_DEEPEST = 5  # steps of inner features kept in registers, at most
_KEPT = 14  # outer features times tiles of inner ones per warp of cin_weight, at most
_EMULATED = 163 << 10  # bytes of shared memory on the emulator, as on sm_80
_WAVES = 4  # blocks of cin_weight per multiprocessor, at most


class Ends(NamedTuple):
    """The two sides of the pairs, in a kernel's order."""

    outer: Tensor
    inner: Tensor
    outer_step: int  # in the weight, from the products of one feature to the next
    inner_step: int


class Split(NamedTuple):
    """The share of a block of cin_weight."""

    outer: int  # features of a warp
    inner: int  # tiles of a warp
    split: int  # warps with the same outer features

    @property
    def outers(self) -> int:
        return self.outer * 8 // self.split

    @property
    def inners(self) -> int:
        return 8 * self.inner * self.split


@dataclass(frozen=True, slots=True)
class Tiles:
    """A call as the kernels read it, with the C++ one's interface. Its tensors must live on."""

    gpu: Gpu
    x: Tensor  # (B, H, D)
    y: Tensor  # (B, M, D)
    weight: Tensor  # (O, H M), of the dtype of the products
    bias: Tensor | None  # (O,)
    result: Tensor | None = None  # (B, O, D) behind a relu, for the backward

    def forward(self, out: Tensor, relu: bool, threads: int) -> None:
        """Write the result to ``out`` (B, O, D), contiguous."""
        ends, outputs, columns = self._ends(8 * self._each), self._outputs, self._columns
        deep, steps = depth(ends.inner.shape[1], 8 * self._each)
        tiles = tiles_of(outputs)
        count = _up(outputs, 16 * tiles) // 16
        packed = self._packed(ends, steps, count, of_inner=False)
        vec = 4 if self._aligned(4, out) else 1
        kernel = self._kernels(deep, tiles, vec)[0]
        bias = self.bias
        arguments = (
            *self._both(ends), c_void_p(packed.data_ptr()), c_int32(steps), c_int32(count),
            pointer(bias),
            c_int64(0 if bias is None else bias.stride(0)), c_int32(outputs), c_int32(relu),
            c_void_p(out.data_ptr()),
        )  # fmt: skip
        grid = (-(-columns // 256), count // tiles, 1)
        self.gpu.launch(kernel, grid, (256, 1, 1), 3 * deep * tiles * 512, arguments)

    def backward(
        self, grad: Tensor, dx: Tensor, dy: Tensor, dw: Tensor, db: Tensor, threads: int
    ) -> None:
        """Write the gradients; ``grad`` (B, O, D) is that of the result, after its relu."""
        self._of_inputs(grad, dx, dy)
        self._of_weight(grad, dw, db)

    def _of_inputs(self, grad: Tensor, dx: Tensor, dy: Tensor) -> None:
        ends = self._order(_inner(self.x, self.y, self.weight) == "y")
        made = (dx, dy) if ends.outer is self.x and ends.inner is self.y else (dy, dx)
        steps, tiles = -(-self._outputs // (8 * self._each)), -(-ends.inner.shape[1] // 16)
        across = width(steps, tiles)
        packed = self._packed(ends, steps, tiles, of_inner=True)
        given = (grad, *made, *(() if self.result is None else (self.result,)))
        defines = {
            "STEPS": steps, "TILES": tiles, "ACROSS": across,
            "VEC": across if self._aligned(across, *given) else 1,
        }  # fmt: skip
        arguments = (
            *self._both(ends), c_void_p(packed.data_ptr()), *_view(grad), *_view(self.result),
            c_int32(self._outputs), *_view(made[0]), *_view(made[1]),
        )  # fmt: skip
        grid = (-(-self._columns // (32 * across)), 1, 1)
        kernel = self._kernel("cin_inputs", "cin_inputs", defines)
        self.gpu.launch(kernel, grid, (128, 1, 1), _staged(steps, tiles), arguments)

    def _of_weight(self, grad: Tensor, dw: Tensor, db: Tensor) -> None:
        ends, outputs, numbers = self._ends(16), self._outputs, self.weight.numel()
        of = split_of(ends.outer.shape[1], ends.inner.shape[1])
        groups = -(-ends.outer.shape[1] // of.outers) * -(-outputs // 32)
        along = -(-ends.inner.shape[1] // of.inners)
        lots = -(-self._columns // (32 * self._each))
        parts = min(lots, shares(groups * along, self.gpu.multiprocessors))
        sums = torch.empty(
            parts, numbers + outputs, dtype=torch.float32, device=self.gpu.device
        )  # fmt: skip
        given = (grad, *(() if self.result is None else (self.result,)))
        defines = {
            "OUTER": of.outer, "INNER": of.inner, "SPLIT": of.split,
            "VEC": 4 if self._aligned(4, *given) else 1,
        }  # fmt: skip
        arguments = (
            *self._both(ends), *_view(grad), *_view(self.result), c_int32(outputs),
            *map(c_int64, (self.weight.shape[1], ends.outer_step, ends.inner_step, numbers)),
            c_int64(numbers + outputs), c_void_p(sums.data_ptr()),
        )  # fmt: skip
        shared = 8704 + 384 * (of.inners + of.outers)
        kernel = self._kernel("cin_weight", "cin_weight", defines)
        self.gpu.launch(kernel, (parts, groups, along), (256, 1, 1), shared, arguments)
        found = sums.sum(0)
        dw.copy_(found[:numbers].view(dw.shape))
        db.copy_(found[numbers:])

    def _packed(self, ends: Ends, steps: int, tiles: int, of_inner: bool) -> Tensor:
        """The weight in the order of the lanes: rows are inner features, or outputs."""
        slices, inner = ends.outer.shape[1], ends.inner.shape[1]
        made = torch.empty(
            slices * steps * tiles * 128, dtype=torch.int32, device=self.gpu.device
        )  # fmt: skip
        row, column = self.weight.stride()
        along, sizes = (row, ends.inner_step * column), (self._outputs, inner)
        if of_inner:
            along, sizes = along[::-1], sizes[::-1]
        arguments: tuple[Argument, ...] = (
            c_void_p(self.weight.data_ptr()), c_int64(ends.outer_step * column),
            *map(c_int64, along), *map(c_int32, (slices, steps, tiles, *sizes)),
            c_void_p(made.data_ptr()),
        )  # fmt: skip
        grid = (-(-slices * steps * tiles // 8), 1, 1)
        deep, _ = depth(self._ends(8 * self._each).inner.shape[1], 8 * self._each)
        vec = 4 if self._aligned(4) else 1
        kernel = self._kernels(deep, tiles_of(self._outputs), vec)[1]
        self.gpu.launch(kernel, grid, (256, 1, 1), 0, arguments)
        return made

    def _ends(self, step: int) -> Ends:
        """The inner side is the one that wastes less when padded to multiples of ``step``."""
        return self._order(_right_wastes_less(self.x.shape[1], self.y.shape[1], step))

    def _order(self, right: bool) -> Ends:
        """``right``: the features of y are the inner ones."""
        count = self.y.shape[1]
        return Ends(self.x, self.y, count, 1) if right else Ends(self.y, self.x, 1, count)

    def _both(self, ends: Ends) -> tuple[Argument, ...]:
        return (
            *_view(ends.outer), c_int32(ends.outer.shape[1]), *_view(ends.inner),
            c_int32(ends.inner.shape[1]), c_int32(self.x.shape[2]), c_int32(self._columns),
        )  # fmt: skip

    def _kernels(self, deep: int, tiles: int, vec: int) -> tuple[Kernel, Kernel]:
        """The forward kernel and the one that packs a weight."""
        defines = {"DEEP": deep, "TILES": tiles, "VEC": vec}
        source = "cin_forward"
        return self._kernel(source, source, defines), self._kernel(source, "cin_pack", defines)

    def _kernel(self, source: str, name: str, defines: dict[str, int]) -> Kernel:
        types = CODES[self.x.dtype], CODES[self.weight.dtype]
        return _kernel(source, name, types, tuple(defines.items()))

    def _aligned(self, vec: int, *others: Tensor) -> bool:
        """Whether ``vec`` columns can be read and written at once."""
        return not self.x.shape[2] % vec and all(
            t.stride(2) == 1
            and not t.stride(0) % vec
            and not t.stride(1) % vec
            and not t.data_ptr() % (vec * t.itemsize)
            for t in (self.x, self.y, *others)
        )

    @property
    def _outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def _columns(self) -> int:
        return self.x.shape[0] * self.x.shape[2]

    @property
    def _each(self) -> int:
        """Elements per register."""
        return 4 // self.weight.itemsize


def tf32() -> bool:
    """Whether torch's settings let a float32 Conv1d, which the plain layer is, use TF32."""
    cudnn: Any = torch.backends.cudnn  # not all of it is typed
    if not cudnn.enabled:  # then it is a matrix product
        return cublaslt.tf32(torch.float32)
    return bool(cudnn.conv.fp32_precision == "tf32")


def takes(x: Tensor, y: Tensor, weight: Tensor) -> bool:
    """Whether the kernels support these in forward and backward; dtypes and shapes must fit."""
    if weight.dtype == torch.float32 and not tf32():
        return False
    if weight.itemsize > x.itemsize or x.shape[0] * x.shape[2] > _MOST:
        return False
    return max(x.shape[1], y.shape[1]) < 1 << 15 and _inner(x, y, weight) is not None


def _inner(x: Tensor, y: Tensor, weight: Tensor) -> str | None:
    """Whose features cin_inputs keeps in registers, ``"x"`` or ``"y"``: of the sides that fit, the
    one that wastes less; None if neither fits.
    """
    left, right, outputs = x.shape[1], y.shape[1], weight.shape[0]
    steps = -(-outputs // (8 * (4 // weight.itemsize)))
    sides = [("y", right), ("x", left)]
    for side, inner in sides if _right_wastes_less(left, right, 16) else sides[::-1]:
        tiles = -(-inner // 16)
        if width(steps, tiles) and _staged(steps, tiles) <= _room(x):
            return side
    return None


def _right_wastes_less(left: int, right: int, step: int) -> bool:
    return left * _up(right, step) <= right * _up(left, step)


def _staged(steps: int, tiles: int) -> int:
    """Bytes of shared memory of cin_inputs."""
    return 3 * steps * tiles * 512


def _room(like: Tensor) -> int:
    """Bytes of shared memory that a block may have."""
    if not like.is_cuda:
        return _EMULATED
    # Missing from torch's stubs.
    of = torch.cuda.get_device_properties(like.device)
    found: int = of.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return found


@lru_cache(maxsize=64)
def _kernel(
    source: str, name: str, types: tuple[int, int], defines: tuple[tuple[str, int], ...]
) -> Kernel:
    macros = {f"RECAST_{key}": value for key, value in defines}
    macros |= {"RECAST_IN": types[0], "RECAST_PRODUCT": types[1]}
    return Kernel(nvrtc.program(f"{source}.cu", defines=macros), name)


def depth(inner: int, step: int) -> tuple[int, int]:
    """How many steps, of ``step`` inner features each, are kept at a time, and how many in all.

    At most one step lies past the last feature, as the kernel requires.
    """
    needed = -(-inner // step)
    if needed <= _DEEPEST:
        return needed, needed
    deep = next(d for d in range(_DEEPEST, 0, -1) if -needed % d <= 1)
    return deep, _up(needed, deep)


def tiles_of(outputs: int) -> int:
    """Tiles of 16 outputs per warp: more share the work on products, fewer waste less."""
    return min((4, 2, 1), key=lambda t: _up(outputs, 16 * t) * (1 + 0.6 / t))


def width(steps: int, tiles: int) -> int:
    """Columns per lane group of cin_inputs that registers allow; 0: it needs too many."""
    if 8 * steps + 48 * tiles <= 160:
        return 4
    return 2 if 4 * steps + 24 * tiles <= 184 else 0


@lru_cache(maxsize=64)
def split_of(outer: int, inner: int) -> Split:
    """The split of cin_weight that wastes least; among equals, the one with the fewest blocks."""
    every = [
        Split(o, i, s) for s in (1, 2, 4, 8) for i in range(1, 6) for o in range(1, _KEPT + 1)
        if o * i <= _KEPT
    ]  # fmt: skip

    def cost(of: Split) -> tuple[float, int]:
        whole = _up(outer, of.outers) * _up(inner, of.inners)
        # A warp reads its outputs once for all its pairs, and its inner features.
        reads = (4 + of.inner + of.outer / 4) / (4 * of.outer * of.inner)
        return whole * (1 + reads), -of.outer * of.inner

    return min(every, key=cost)


def shares(groups: int, multiprocessors: int) -> int:
    """How many blocks share the columns, for ``groups`` that each need all of them."""

    def idle(waves: int) -> float:
        blocks = max(waves * multiprocessors // groups, 1) * groups
        return 1 - blocks / (_up(blocks, multiprocessors))

    best = min(range(1, _WAVES + 1), key=lambda waves: (round(idle(waves), 1), waves))
    return max(best * multiprocessors // groups, 1)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _view(tensor: Tensor | None) -> tuple[Argument, ...]:
    """Address and strides of a (B, features, D)."""
    if tensor is None:
        return c_void_p(None), c_int64(0), c_int64(0), c_int64(0)
    return c_void_p(tensor.data_ptr()), *map(c_int64, tensor.stride())
