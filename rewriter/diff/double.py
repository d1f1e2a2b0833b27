"""The same model in float64: the judge of :mod:`.equivalence`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from recast.rewriter.compiled import trees

_LOW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
_DRAWS = (torch.rand, torch.randn, torch.rand_like, torch.randn_like)
_FILLS = (
    Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.geometric_, Tensor.cauchy_,
    Tensor.log_normal_,
)  # fmt: skip

_OUTER: list[torch.dtype] = []  # the default dtypes that were found by those who are inside
_LOCK = threading.Lock()


class InDouble(TorchFunctionMode):
    """Casts to lower precision give float64; random numbers are those drawn in float32; a float32
    tensor that meets a float64 one, as the labels in a loss do, is read in float64.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].double()
        if func in _DRAWS:
            return func(*args, **{**kwargs, "dtype": torch.float32}).double()
        if func in _FILLS and args[0].dtype == torch.float64:
            return args[0].copy_(func(args[0].float(), *args[1:], **kwargs))
        if any(type(a) is torch.dtype for a in (*args, *kwargs.values())):
            args = tuple(_wide(a) for a in args)
            kwargs = {k: _wide(v) for k, v in kwargs.items()}
        if not _writes(func, kwargs) and _mixed(args, kwargs):
            args, kwargs = pytree.tree_map_only(Tensor, _as_double, (args, kwargs))
        return func(*args, **kwargs)


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") or "out" in kwargs  # __setitem__, __get__ and add_, say


def _mixed(args: Any, kwargs: dict[str, Any]) -> bool:
    dtypes = {t.dtype for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
    return torch.float64 in dtypes and not dtypes.isdisjoint(_LOW)


def _as_double(t: Tensor) -> Tensor:
    return t.double() if t.dtype in _LOW else t


def _wide(value: Any) -> Any:
    return _widened(value) if type(value) is torch.dtype else value


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _LOW else dtype


@contextmanager
def in_double() -> Iterator[None]:
    """Everything computed inside is float64.

    The default dtype is that of the whole process: where several threads are inside at a time, the
    last one that leaves restores it.
    """
    with _LOCK:
        _OUTER.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        with _LOCK:
            torch.set_default_dtype(_OUTER.pop())


def doubled(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in float64, plain tensor attributes included."""
    twin = copy.deepcopy(model).double()
    for m in twin.modules():
        for name, value in vars(m).items():
            if name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                continue
            if isinstance(value, (Tensor, list, tuple, dict)):  # objects may be shared: left alone
                vars(m)[name] = pytree.tree_map_only(Tensor, _up, value)
    return twin


def widen(batch: Any) -> Any:
    """``batch`` with its floating tensors in float64."""
    return trees.mapped(_up, batch)


def _up(t: Tensor) -> Tensor:
    wide = t.detach().to(_widened(t.dtype))
    return t if wide.dtype == t.dtype else wide.requires_grad_(t.requires_grad)
