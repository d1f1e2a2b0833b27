"""What is known about torch's calls by name: tables for the tracer and for ordering a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

METHODS = {
    id(getattr(torch.Tensor, name)): name
    for name in dir(torch.Tensor)
    if callable(getattr(torch.Tensor, name, None))
}
GETTERS: dict[Any, str] = {}
SETTERS: dict[Any, str] = {}
for _name in dir(torch.Tensor):
    _held: Any = getattr(torch.Tensor, _name, None)
    if hasattr(_held, "__get__") and hasattr(_held, "__set__"):
        GETTERS[_held.__get__] = _name
        SETTERS[_held.__set__] = _name

OPERATORS = {
    "__getitem__": operator.getitem, "__setitem__": operator.setitem, "__abs__": operator.abs,
    "__invert__": operator.invert, "__neg__": operator.neg, "__and__": operator.and_,
    "__or__": operator.or_, "__xor__": operator.xor, "__iand__": operator.iand,
    "__ior__": operator.ior, "__lt__": operator.lt, "__le__": operator.le, "__gt__": operator.gt,
    "__ge__": operator.ge, "__eq__": operator.eq, "__ne__": operator.ne,
}  # fmt: skip
SWAPPED = {
    "__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv,
    "__rpow__": operator.pow, "__rmatmul__": operator.matmul, "__rfloordiv__": operator.floordiv,
    "__rmod__": operator.mod, "__radd__": operator.add, "__rmul__": operator.mul,
}  # fmt: skip
# calls with the same answer for every batch of the same structure, dtypes and fixed sizes
METADATA = {
    "dim", "ndim", "size", "numel", "nelement", "ndimension", "stride", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "element_size", "itemsize", "get_device", "type",
    "dtype", "layout", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta", "is_nested",
    "is_mkldnn", "is_mps", "is_xpu", "is_leaf", "requires_grad", "names", "is_floating", "device",
    "is_sparse_csr", "storage_offset", "is_inference", "is_neg", "is_conj", "has_names", "name",
    "is_same_size", "is_shared", "is_pinned", "nbytes", "output_nr", "retains_grad", "grad_fn",
    "grad", "_backward_hooks", "_is_view", "is_vulkan", "is_xla", "is_ipu", "is_hpu", "is_mtia",
    "is_maia",
}  # fmt: skip
# of these, calls that return a size, a dtype, or a tensor's memory layout
COUNTS = {"size", "numel", "nelement", "nbytes"}
DTYPES = {
    "is_floating_point", "is_complex", "is_signed", "element_size", "itemsize", "type", "nbytes",
}  # fmt: skip
LAYOUT = {"stride", "is_contiguous", "storage_offset"}
REFUSED = {
    "backward": "runs backward inside forward",
    "register_hook": "registers a gradient hook on a tensor",
    "register_post_accumulate_grad_hook": "registers a gradient hook on a tensor",
    "retain_grad": "keeps the gradient of an inner tensor",
    "numpy": "leaves torch for numpy, where nothing can be followed",
    "__array__": "leaves torch for numpy, where nothing can be followed",
    "data_ptr": "reads the address of a tensor",
    "untyped_storage": "reads the storage of a tensor", "storage": "reads the storage of a tensor",
    "__dlpack__": "leaves torch",
}  # fmt: skip
# the in-place functions of ``operator``, and the out-of-place one for each
OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod, operator.ipow: operator.pow, operator.imatmul: operator.matmul,
    operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor,
    operator.ilshift: operator.lshift, operator.irshift: operator.rshift,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Asks a tensor for its memory layout: ``stride(0)``, ``is_contiguous()``."""

    name: str
    args: tuple[Any, ...]

    def __call__(self, tensor: torch.Tensor) -> Any:
        return getattr(tensor, self.name)(*self.args)
