"""``field_attention`` on a GPU: one head per warp on tensor cores, or heads in shared memory.

For F fields with vectors of d elements, a head moves 4 F d elements forward and 7 F d backward,
plus F² each for the mask, the weights and their gradient if present.
``scaled_dot_product_attention``, which ``torch.compile`` leaves alone, moves 4 F d and at least
9 F d, and works on tiles of 64 or 128 fields, where there are 20 to 40; with dropout or weights,
torch writes and reads F² some four times forward and eight times backward. Vectors longer than 32
are left to torch.

``attention_tiles.cu`` multiplies on tensor cores in TF32, which is exact for 16-bit numbers, and
takes float32 only if torch's settings allow TF32. Otherwise, and for more than 64 keys, whose
scores would not fit into registers, ``field_attention.cu`` gives each thread a query or a key.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int32
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from recast.runtime.gpu import cublaslt, nvrtc
from recast.runtime.gpu.cuda_launch import Argument, Kernel, pointer
from recast.runtime.gpu.gpu import Gpu
from recast.runtime.interactions.dot_cuda import CODES

CONDITION = (
    "float32, float16 and bfloat16 of one dtype, vectors of at most 32 elements, whose heads fit"
    " into 96 KiB of shared memory; under autocast such of its dtype, without dropout and weights;"
    " tensor cores for 16-bit numbers, and for float32 where TF32 is allowed"
)
_BLOCK = 128
_LONGEST = 32
_SHARED = 96 << 10  # bytes per block; every architecture from sm_80 on has them
_GOAL = 40 << 10  # bytes per block, so that several blocks share a multiprocessor
_MOST = 2**31 - 2**20  # int32, less what the last blocks count past the end
_MOST_KEYS = 64  # a warp keeps their scores in registers
_WARPS = 4


@lru_cache(maxsize=16)
def _kernels(dtype: int, width: int) -> tuple[Kernel, Kernel]:
    defines = {"RECAST_IN": dtype, "RECAST_WIDTH": width, "RECAST_BLOCK": _BLOCK}
    program = nvrtc.program("field_attention.cu", defines=defines)
    return Kernel(program, "attention_forward"), Kernel(program, "attention_backward")


@lru_cache(maxsize=64)
def _tile_kernels(dtype: int, steps: int, keys: int, bare: bool, vec: int) -> tuple[Kernel, Kernel]:
    defines = {"IN": dtype, "STEPS": steps, "KEYS": keys, "BARE": bare, "VEC": vec}
    program = nvrtc.program(
        "attention_tiles.cu", defines={f"RECAST_{k}": v for k, v in defines.items()}
    )
    return Kernel(program, "attention_tiles_forward"), Kernel(program, "attention_tiles_backward")


@dataclass(frozen=True, slots=True)
class Attention:
    """A call as the kernels read it, with the C++ one's interface. Its tensors must live on."""

    gpu: Gpu
    q: Tensor  # (N, H, Q, d), last dimension contiguous; so are k and v
    k: Tensor  # (N, H, K, d)
    v: Tensor  # (N, H, K, e)

    def forward(
        self, out: Tensor, scale: float, noise: Tensor | None, weights: Tensor | None, threads: int
    ) -> None:
        """Write the result into ``out``, and the weights into ``weights`` unless it is None."""
        self._launch(0, [out], scale, noise, weights)

    def backward(
        self, grad: Tensor, scale: float, noise: Tensor | None, of_weights: Tensor | None,
        dq: Tensor, dk: Tensor, dv: Tensor, threads: int,
    ) -> None:  # fmt: skip
        """Write the gradients of q, k and v."""
        self._launch(1, [grad, dq, dk, dv], scale, noise, of_weights)

    def _launch(
        self, which: int, others: list[Tensor], scale: float, noise: Tensor | None,
        weights: Tensor | None,
    ) -> None:  # fmt: skip
        (batch, each, queries, dim), (keys, values) = self.q.shape, self.v.shape[2:]
        every = (self.q, self.k, self.v, *others)
        views = array("q")
        for t in every:
            views.extend((t.data_ptr(), *t.stride()[:3], t.shape[3]))
        table = self.gpu.upload(views)
        width = _width(dim, values)
        if keys <= _MOST_KEYS and (self.q.itemsize == 2 or cublaslt.tf32(self.q.dtype)):
            self._launch_tiles(which, every, table, scale, noise, weights)
            return
        size = _bytes(queries, keys, width)[which]
        heads = batch * each
        together = max(1, min(_GOAL // size, -(-2 * _BLOCK // max(queries, keys)), heads))
        kernel = _kernels(CODES[self.q.dtype], width)[which]
        arguments = (
            pointer(table), c_int32(heads), c_int32(together), c_int32(each), c_int32(queries),
            c_int32(keys), c_float(scale), pointer(noise), pointer(weights),
        )  # fmt: skip
        grid = (-(-heads // together), 1, 1)
        self.gpu.launch(kernel, grid, (_BLOCK, 1, 1), together * size, arguments)

    def _launch_tiles(
        self, which: int, every: Sequence[Tensor], table: Tensor, scale: float,
        noise: Tensor | None, weights: Tensor | None,
    ) -> None:  # fmt: skip
        (batch, each, queries, dim), (keys, values) = self.q.shape, self.v.shape[2:]
        width, heads = _width(dim, values), batch * each
        size = _tile_bytes(queries, keys, width) * which
        warps = min(_WARPS, max(1, 2 * _GOAL // size)) if size else _WARPS
        bare = noise is None and weights is None
        sizes = width // 8, -(-keys // 8)
        kernel = _tile_kernels(CODES[self.q.dtype], *sizes, bare, _vec(every))[which]
        arguments: tuple[Argument, ...] = (
            pointer(table), *map(c_int32, (heads, each, queries, keys)), c_float(scale),
            pointer(noise), pointer(weights),
        )  # fmt: skip
        grid = (-(-heads // warps), 1, 1)
        self.gpu.launch(kernel, grid, (32 * warps, 1, 1), warps * size, arguments)


def attention(gpu: Gpu, q: Tensor, k: Tensor, v: Tensor) -> Attention | None:
    """The call; None if the kernels do not support it. Shapes must have been checked."""
    if q.dtype not in CODES or any(t.dtype != q.dtype or t.device != q.device for t in (k, v)):
        return None
    (batch, each, queries, dim), (keys, values) = q.shape, v.shape[2:]
    if not 0 < batch * each <= _MOST or not queries or not keys:
        return None
    if not 0 < dim <= _LONGEST or not 0 < values <= _LONGEST:
        return None
    if max(_bytes(queries, keys, _width(dim, values))) > _SHARED:
        return None
    return Attention(gpu, q, k, v)


def _width(dim: int, values: int) -> int:
    """Elements of a row in registers."""
    return -(-max(dim, values) // 8) * 8


def _bytes(queries: int, keys: int, width: int) -> tuple[int, int]:
    """Bytes of shared memory per head, forward and backward."""
    row = width + 4
    forward = (queries + 2 * keys) * row
    return 4 * forward, 4 * (forward + 2 * queries * row + 3 * queries)


def _tile_bytes(queries: int, keys: int, width: int) -> int:
    """Bytes of shared memory per warp of the backward on tensor cores."""
    of_queries, of_keys = -(-queries // 16) * 16, -(-keys // 16) * 16
    return 4 * (2 * (of_queries + of_keys) * (width + 4) + 3 * of_queries)


def _vec(tensors: Sequence[Tensor]) -> int:
    """How many elements one load may read."""

    def fits(t: Tensor, vec: int) -> bool:
        apart = (t.shape[3], *(s for s, n in zip(t.stride()[:3], t.shape, strict=False) if n > 1))
        return not any(n % vec for n in apart) and not t.data_ptr() % (vec * t.itemsize)

    return next(vec for vec in (4, 2, 1) if all(fits(t, vec) for t in tensors))
