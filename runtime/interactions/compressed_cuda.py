"""``compressed_interaction`` on a GPU: the products of pairs of a few samples at a time, multiplied
by torch's matrix products. This is for float32 if TF32 is not allowed for convolutions (the plain
layer is one), and for shapes for which the kernels of :mod:`.cin_tiles`, which are tried first,
lack registers.

A layer of H by M features with O outputs needs 2 O H M operations per column (an element of a
sample) and, if the products are stored, passes over H M numbers: a write and a read in forward, a
read, a write and a read in backward. A matrix product of our own would be slower than cuBLAS, so
cuBLAS multiplies, but so few samples at a time that the products, and later their gradient in the
same place, stay in the L2 cache: H + M + O numbers per column go to memory and back, while
``torch.compile`` moves 5 H M more (26 by 26 features: 3380 beside 26 + 26 + O). Nothing of that
size is allocated, nor kept for the backward: for one layer of 200 by 39 features, 65536 samples of
16, that would be 33 GB.

The bias is one more column of the weight, for a row of ones in the products; its gradient comes
with the weight's. Sums over samples are fp32.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recast.runtime.gpu import cublaslt, nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions import cin_tiles
from recast.runtime.interactions.cin_tiles import Tiles, takes
from recast.runtime.interactions.dot_cuda import CODES

CONDITION = (
    "float32, float16 and bfloat16 of one dtype; under autocast of several; tensor cores for 16-bit"
    " products, and for float32 where convolutions may use TF32; not where only matrix products may"
)
GOAL = 16 << 20  # bytes of products stored at a time, so that they stay in the cache
_BLOCK = 256
_HELD = 8  # features that a thread of cin_products holds
_SHARED = 96 << 10  # bytes per block; every architecture from sm_80 on has them
_FEW = 48 << 10  # bytes per block, so that several blocks share a multiprocessor
_STEP = 8  # products, and samples of a chunk, come in multiples of it: aligned matrices
_MOST = 2**31 - 1


@lru_cache(maxsize=16)
def _kernels(dtype: int, product: int) -> dict[str, Kernel]:
    defines = {"RECAST_IN": dtype, "RECAST_PRODUCT": product, "RECAST_BLOCK": _BLOCK}
    program = nvrtc.program("compressed_interaction.cu", defines=defines)
    names = ("cin_products", "cin_products_4", "cin_gradients")
    return {name: Kernel(program, name) for name in names}


@dataclass(frozen=True, slots=True)
class Interaction:
    """A call as the kernels read it, with the C++ one's interface. Its tensors must live on."""

    gpu: Gpu
    x: Tensor  # (B, H, D)
    y: Tensor  # (B, M, D)
    weight: Tensor  # (O, H M), of the dtype of the products
    bias: Tensor | None  # (O,)

    def forward(self, out: Tensor, relu: bool, threads: int) -> None:
        """Write the result to ``out`` (B, O, D)."""
        weight = self._padded()
        room = self._room(weight)
        for first, last in self._chunks(weight):
            products = self._products(room, first, last)
            made = torch.mm(weight, products)
            if relu:
                made.relu_()
            self._of(out, first, last).copy_(made.view(len(weight), last - first, -1))

    def backward(
        self, grad: Tensor, dx: Tensor, dy: Tensor, dw: Tensor, db: Tensor, threads: int
    ) -> None:
        """Write the gradients; ``grad`` (B, O, D) is that of the result before its relu."""
        weight, count = self._padded(), self.weight.shape[1]
        turned = weight[:, :count].t()
        room = self._room(weight)
        sums = torch.zeros(weight.shape, dtype=torch.float32, device=self.gpu.device)
        of_bias = torch.zeros(len(weight), dtype=torch.float32, device=self.gpu.device)
        for first, last in self._chunks(weight):
            products = self._products(room, first, last)
            part = self._of(grad, first, last).to(weight.dtype).reshape(len(weight), -1)
            sums += _wide(part, products.t())
            if self.bias is None:
                of_bias += part.sum(1, dtype=torch.float32)
            gradient = products[:count]
            torch.mm(turned, part, out=gradient)
            self._gradients(gradient, first, dx, dy)
        dw.copy_(sums[:, :count].view(dw.shape))
        db.copy_(of_bias if self.bias is None else sums[:, count])

    def _padded(self) -> Tensor:
        """The weight, then the bias as a column, then zeros up to a multiple of :data:`_STEP`."""
        outputs, count = self.weight.shape
        width = -(-(count + (self.bias is not None)) // _STEP) * _STEP
        if width == count:
            return self.weight.contiguous()
        padded = self.weight.new_zeros(outputs, width)
        padded[:, :count] = self.weight
        if self.bias is not None:
            padded[:, count] = self.bias
        return padded

    def _chunks(self, weight: Tensor) -> list[tuple[int, int]]:
        """The start and end of each chunk of samples."""
        batch, each = len(self.x), self._samples(weight)
        return [(first, min(first + each, batch)) for first in range(0, batch, each)]

    def _samples(self, weight: Tensor) -> int:
        bytes_ = weight.shape[1] * self.x.shape[2] * weight.itemsize
        return min(len(self.x), max(GOAL // bytes_ // _STEP * _STEP, _STEP))

    def _room(self, weight: Tensor) -> Tensor:
        """A buffer for the products of a chunk."""
        size = weight.shape[1] * self._samples(weight) * self.x.shape[2]
        return torch.empty(size, dtype=weight.dtype, device=self.gpu.device)

    def _products(self, room: Tensor, first: int, last: int) -> Tensor:
        """(products, ones for the bias and zeros; columns) of these samples."""
        (_, left, dim), right, count = self.x.shape, self.y.shape[1], self.weight.shape[1]
        columns = (last - first) * dim
        width = -(-(count + (self.bias is not None)) // _STEP) * _STEP
        made = room[: width * columns].view(width, columns)
        if not first or made.numel() != room.numel():  # else left by the previous chunk
            made[count:].zero_()
            if self.bias is not None:
                made[count].fill_(1)
        vec = 1 if dim % 4 else 4
        grid = (-(-columns // (vec * _BLOCK)), -(-left // _HELD), 1)
        arguments = (
            *_view(self.x), *_view(self.y), *map(c_int32, (left, right, dim, first, columns)),
            c_void_p(made.data_ptr()),
        )  # fmt: skip
        kernel = self._kernel("cin_products" if vec == 1 else "cin_products_4")
        self.gpu.launch(kernel, grid, (_BLOCK, 1, 1), 0, arguments)
        return made

    def _gradients(self, gradient: Tensor, first: int, dx: Tensor, dy: Tensor) -> None:
        """Both inputs' gradients for a chunk; shared memory sums the side with fewer features."""
        (_, left, dim), right = self.x.shape, self.y.shape[1]
        ends = [(self.x, dx, right, left), (self.y, dy, 1, right)]
        outer, inner = ends if right <= left else ends[::-1]
        columns = gradient.shape[1]
        warps = _warps(min(left, right))
        arguments = (
            c_void_p(gradient.data_ptr()), c_int64(outer[2]), c_int64(inner[2]),
            *_view(outer[0]), c_int32(outer[3]), *_view(inner[0]), c_int32(inner[3]),
            *map(c_int32, (dim, first, columns)), *_view(outer[1]), *_view(inner[1]),
        )  # fmt: skip
        shared = (warps + 1) * inner[3] * 128
        grid, block = (-(-columns // 32), 1, 1), (32 * warps, 1, 1)
        self.gpu.launch(self._kernel("cin_gradients"), grid, block, shared, arguments)

    def _kernel(self, name: str) -> Kernel:
        return _kernels(CODES[self.x.dtype], CODES[self.weight.dtype])[name]

    @staticmethod
    def _of(tensor: Tensor, first: int, last: int) -> Tensor:
        """(O, samples, D) of a (B, O, D)."""
        return tensor[first:last].transpose(0, 1)


def interaction(
    gpu: Gpu, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
) -> Interaction | Tiles | None:
    """The call; None if the kernels do not support it. Shapes must have been checked.

    ``weight``: (O, H M), with the dtype of ``bias``, which may differ from that of ``x`` and ``y``.
    """
    given = [t for t in (y, weight, bias) if t is not None]
    if not {x.dtype, weight.dtype} <= CODES.keys() or any(t.device != x.device for t in given):
        return None
    if y.dtype != x.dtype or (bias is not None and bias.dtype != weight.dtype):
        return None
    (batch, left, dim), right = x.shape, y.shape[1]
    if not x.numel() or not y.numel() or not weight.numel() or batch * dim > _MOST:
        return None
    if takes(x, y, weight):
        return Tiles(gpu, x, y, weight, bias)
    if cublaslt.tf32(weight.dtype) and not cin_tiles.tf32():
        return None  # torch.mm would round what a convolution must not
    if 2 * min(left, right) * 128 > _SHARED:
        return None
    return Interaction(gpu, x, y, weight, bias)


def _warps(features: int) -> int:
    """Of a block of cin_gradients that sums for so many features."""
    return max(1, min(_BLOCK // 32, _FEW // (features * 128) - 1))


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """a b in fp32."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _view(tensor: Tensor) -> tuple[Argument, ...]:
    """Address and strides of a (B, features, D)."""
    return c_void_p(tensor.data_ptr()), *map(c_int64, tensor.stride())
