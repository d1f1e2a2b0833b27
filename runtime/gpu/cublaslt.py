"""Matrix products by cublasLt with fused epilogues: relu, its mask, bias, bias gradient.

The extension ``_C`` calls the library that torch has loaded (``csrc/cublaslt.cpp``). All matrices
here are row-major, as in torch; the library sees their transposes. A product's descriptors and
algorithm are made at the first call of its kind and kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recast.errors import KernelError
from recast.runtime import device
from recast.runtime.gpu import cuda_launch

WORKSPACE = 32 << 20  # bytes an algorithm may use; what NVIDIA recommends from Hopper on
_F32 = torch.float32
_TYPES = {_F32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
ALIGNMENT = 256  # bytes; more makes no difference to cublasLt
_MOST = 4096  # products kept: sizes that change with every batch must not fill up memory


class Epilogue(IntEnum):
    """``cublasLtEpilogue_t`` for D = A B: what is done to D, and what else is read or written."""

    NONE = 1
    RELU = 2
    BIAS = 4  # + bias (columns of D)
    RELU_BIAS = 6
    RELU_AUX = 130  # writes the mask of the relu
    RELU_AUX_BIAS = 134
    DRELU = 136  # 0 where the mask is not set
    DRELU_BGRAD = 152  # the same, and writes the column sums of D
    BGRAD = 512  # writes the row sums of A


_library: Any = None
_on_cpu = False  # a test's stand-in works on the memory of the CPU
_products: dict[tuple[Any, ...], Product | None] = {}
_NONE_YET: Any = object()


@cache
def why_not() -> str | None:
    """Why cublasLt cannot be called in this process; None when it can."""
    return cuda_launch.why_not() or device.why_missing() or _open("")


def serves(tensor: Tensor) -> bool:
    """Whether products on the device of ``tensor`` can be computed here."""
    return (why_not() is None) if tensor.is_cuda else (_on_cpu and tensor.is_cpu)


def _open(path: str) -> str | None:
    global _library
    try:
        _library = device.extension().CublasLt(path)
    except RuntimeError as error:
        return str(error)
    return None


@contextlib.contextmanager
def stand_in(path: Path) -> Iterator[None]:
    """Let the library at ``path`` serve CPU tensors. For tests; not thread-safe.

    Raises KernelError if it does not open.
    """
    global _library, _on_cpu
    why_not()  # opens the real one, which is restored at the end
    before, products = (_library, _on_cpu), dict(_products)
    _products.clear()
    why = device.why_missing() or _open(str(path))
    if why is not None:
        raise KernelError("no stand-in for cublasLt", why=why)
    _on_cpu = True
    try:
        yield
    finally:
        _library, _on_cpu = before
        _products.clear()
        _products.update(products)


def tf32(dtype: torch.dtype) -> bool:
    """Whether torch's settings allow TF32 for products of ``dtype``, which must be float32."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def any_reduction(dtype: torch.dtype) -> bool:
    """Whether torch's settings allow partial sums to be kept in ``dtype``."""
    matmul = torch.backends.cuda.matmul
    if dtype == torch.bfloat16:
        return matmul.allow_bf16_reduced_precision_reduction
    return dtype != torch.float16 or matmul.allow_fp16_reduced_precision_reduction


class Product(NamedTuple):
    """out = epilogue(alpha a b) for matrices of certain sizes, dtypes, strides and alignments."""

    plan: Any
    workspace: int  # bytes
    algorithm: bytes  # its parameters; these and ``of`` together identify the kernel
    of: tuple[object, ...]  # device, dtypes, whether in TF32, and epilogue


class Ready(NamedTuple):
    """A product with its operands, which the caller keeps alive."""

    product: Product
    addresses: tuple[int, ...]  # as the plan takes them
    out: Tensor

    def run(self, alpha: float = 1.0) -> None:
        """Start it on torch's current stream. Raises KernelError with the library's status."""
        plan, size, out = self.product.plan, self.product.workspace, self.out
        room = torch.empty(size, dtype=torch.uint8, device=out.device) if size else None
        stream = cuda_launch.raw_stream(out.get_device()) if out.is_cuda else 0
        try:
            with on_device(out):
                plan.run(*self.addresses, alpha, 0 if room is None else room.data_ptr(), stream)
        except RuntimeError as error:
            raise _refused(error) from None


def product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    rank: int = 0,
    room: bool = True,
) -> Ready | None:
    """out = epilogue(alpha a b), ready to run; None if the library has no algorithm for it.

    ``a`` (n, k), ``b`` (k, m): one stride of each is 1, the other at least the size of that
    dimension. ``out`` (n, m): contiguous, in float32 or the dtype of a and b. ``bias``: (m,), or
    (n,) to write to for BGRAD, in out's dtype. ``mask``: uint8 (n, bytes), bytes a multiple of 16,
    see ``csrc/cuda/mlp_rows.cuh``. ``rank``: which of the algorithms that the library's
    heuristics propose, 0 being the best. ``room``: whether it may use a workspace.
    Raises KernelError if the library rejects the arguments.
    """
    of, to, index = a.dtype, out.dtype, out.get_device()
    # The library is column-major: it takes our operands as they are, in reverse order.
    addresses = (
        b.data_ptr(), a.data_ptr(), out.data_ptr(),
        0 if bias is None else bias.data_ptr(), 0 if mask is None else mask.data_ptr(),
    )  # fmt: skip
    together = addresses[0] | addresses[1] | addresses[2] | addresses[3] | addresses[4]
    aligned = not together % ALIGNMENT or tuple(map(_alignment, addresses))
    row = 0 if mask is None else mask.shape[1]
    key = (
        a.shape, a.stride(), b.shape, b.stride(), of, to, index, int(epilogue), row, rank, room,
        aligned, tf32(of) if of is _F32 else any_reduction(of),
    )  # fmt: skip
    found = _products.get(key, _NONE_YET)
    if found is _NONE_YET:
        with on_device(out):
            found = _make(key, a, b, out, epilogue, row, addresses, rank, room)
    return None if found is None else Ready(found, addresses, out)


def _make(
    key: tuple[Any, ...],
    a: Tensor,
    b: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    row: int,
    addresses: tuple[int, ...],
    rank: int,
    room: bool,
) -> Product | None:
    """A product of operands like these; None if the library has no algorithm for it."""
    (n, k), (_, m) = a.shape, b.shape
    (turn_a, ld_a), (turn_b, ld_b) = _order(a), _order(b)
    of, index = a.dtype, out.get_device()
    types = _TYPES[of], _TYPES[out.dtype], of is _F32 and tf32(of)
    problem = m, n, k, turn_b, turn_a, *types, ld_b, ld_a, m, int(epilogue), 8 * row
    reduces = of is _F32 or any_reduction(of)
    try:
        most = WORKSPACE if room else 0
        plan = _library.plan(max(index, 0), *problem, *addresses, most, reduces, rank)
    except RuntimeError as error:
        raise _refused(error) from None
    made = None
    if plan is not None:
        made = Product(plan, plan.workspace, plan.algorithm, (index, *types, epilogue))
    if len(_products) >= _MOST:
        _products.clear()
    _products[key] = made
    return made


def on_device(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the device of ``like`` the current one."""
    return cuda_launch.on_device(like.get_device()) if like.is_cuda else contextlib.nullcontext()


def _order(t: Tensor) -> tuple[bool, int]:
    """Whether a matrix is transposed for the library, and its leading dimension."""
    (rows, columns), (down, along) = t.shape, t.stride()
    if along == 1 or columns == 1:
        return False, down if rows > 1 else columns
    return True, along


def _alignment(address: int) -> int:
    return min(address & -address, ALIGNMENT) or ALIGNMENT


def _refused(error: RuntimeError) -> KernelError:
    return KernelError(
        "cublasLt refused a product",
        why=str(error),
        tries=('recast.runtime.device.use("plain") to do without it',),
    )
