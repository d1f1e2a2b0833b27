"""numpy in forward: arrays that depend on the batch are tensors while forward is traced.

``np.tile(np.arange(n), [len(x), 1])`` takes real numbers, ``torch.LongTensor(array)`` a real array,
or list, or range, and ``torch.Size((n, 1))`` real numbers. A trace that meets one is repeated with
copies of the model's methods (see :mod:`.replaced_builtins`) in which the modules ``numpy`` and
``torch`` are the stand-ins made here: they give torch's function where an argument is a
:class:`.values.Value`, and the module's own elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from recast.rewriter.compiled.array_inputs import tensor_of

from .shapes import Size, broadcast_shapes
from .values import Repeated, Span, Value, counted


class Array(Value):
    """A Value that is an array to forward: it has some of its methods, and torch can be asked to
    make a tensor of it.
    """

    @staticmethod
    def of(value: Any) -> Any:
        """``value`` as an array."""
        value.__class__ = Array
        return value

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        return self.to(_dtype(dtype), copy=copy)

    def copy(self) -> Any:
        return self.clone()


class StandIn:
    """A module of which the functions ``own`` are others where they are given a Value."""

    def __init__(self, module: ModuleType, own: dict[str, Callable[..., Any]]) -> None:
        self._module = module
        self._own = own

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self._module, name)
        traced = self._own.get(name)
        if traced is None or isinstance(traced, type):
            return traced or plain
        return _chosen(plain, traced, torch.float64 if self._module is np else None)


def _chosen(
    plain: Callable[..., Any], traced: Callable[..., Any], floats: torch.dtype | None
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        typed = "dtype" in kwargs or isinstance(plain, type)
        args = tuple(_listed(one, floats, typed) for one in args)
        given = [*args, *kwargs.values()]
        return (traced if any(map(_varies, given)) else plain)(*args, **kwargs)

    return call


def stand_in(module: Any) -> StandIn | None:
    """What stands for a global of the user's: None for all but the two modules."""
    if module is np:
        made = {name: _array(made) for name, made in _NUMPY.items()}
        return StandIn(np, {**made, **_ROUNDED})
    return StandIn(torch, _TORCH) if module is torch else None


def _listed(value: Any, floats: torch.dtype | None, typed: bool) -> Any:
    """``value``; for ``range(n)`` and ``[number] * n`` the array of what they hold. ``floats``: the
    dtype that the module gives to Python's, if not torch's default one. ``typed``: whether the call
    says the dtype; if it does not, what is made of nothing is of floats, which is asked each time.
    """
    if type(value) is Repeated:
        of_floats = type(value.entry) is float
        if not typed and not of_floats and not value.times > 0:
            return value
        size = (torch.sym_max(0, value.times),)  # a list may be repeated -1 times
        return Array.of(torch.full(size, value.entry, dtype=floats if of_floats else None))
    if type(value) is not Span or len(value.ends) > 2:
        return value
    start, stop = value.ends if len(value.ends) == 2 else (0, *value.ends)
    return Array.of(counted(start, stop)) if typed or stop > start else value


def _varies(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_varies, value))
    return isinstance(value, Value)


def _array(made: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return Array.of(made(*args, **kwargs))

    return call


# ---------------------------------------------------------------- numpy


def _tensor(value: Any) -> Any:
    return value if isinstance(value, Value) else tensor_of(np.asarray(value))


def _sizes(shape: Any) -> tuple[Any, ...]:
    return tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)


def _dtype(kind: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, kind)).dtype


def _tile(array: Any, reps: Any) -> Any:
    return torch.tile(_tensor(array), _sizes(reps))


def _repeat(array: Any, repeats: Any, axis: int | None = None) -> Any:
    many = repeats if isinstance(repeats, (int, Value)) else _tensor(repeats)
    return torch.repeat_interleave(_tensor(array), many, dim=axis)


def _arange(*ends: Any, dtype: Any = np.int64) -> Any:
    return torch.arange(*ends, dtype=_dtype(dtype))


def _zeros(shape: Any, dtype: Any = np.float64) -> Any:
    return torch.zeros(_sizes(shape), dtype=_dtype(dtype))


def _ones(shape: Any, dtype: Any = np.float64) -> Any:
    return torch.ones(_sizes(shape), dtype=_dtype(dtype))


def _full(shape: Any, fill_value: Any, dtype: Any = None) -> Any:
    kind = np.asarray(fill_value).dtype if dtype is None else dtype
    return torch.full(_sizes(shape), fill_value, dtype=_dtype(kind))


def _where(condition: Any, x: Any, y: Any) -> Any:
    return torch.where(_tensor(condition), _tensor(x), _tensor(y))


def _concatenate(arrays: Any, axis: int = 0) -> Any:
    return torch.cat([_tensor(one) for one in arrays], axis)


def _stack(arrays: Any, axis: int = 0) -> Any:
    return torch.stack([_tensor(one) for one in arrays], axis)


def _expand_dims(array: Any, axis: int) -> Any:
    return torch.unsqueeze(array, axis)


def _copied(array: Any, dtype: Any = None, copy: bool = True) -> Any:
    if isinstance(array, (tuple, list)):
        return _copied(_stack(array), dtype, copy=False)
    return array.to(array.dtype if dtype is None else _dtype(dtype), copy=copy)


def _as_it_is(array: Any, dtype: Any = None) -> Any:
    return _copied(array, dtype, copy=False).contiguous()


def _rounded(number: Callable[..., Any], tensor: Callable[..., Any]) -> Callable[..., Any]:
    """Of a size, or of an array of floats."""

    def call(x: Any) -> Any:
        return number(x) * 1.0 if x.number else Array.of(tensor(x))

    return call


_NUMPY: dict[str, Callable[..., Any]] = {
    "tile": _tile, "repeat": _repeat, "arange": _arange, "zeros": _zeros, "ones": _ones,
    "full": _full, "where": _where, "concatenate": _concatenate, "stack": _stack,
    "expand_dims": _expand_dims, "array": _copied, "asarray": _as_it_is,
    "ascontiguousarray": _as_it_is,
}  # fmt: skip

_ROUNDED = {"ceil": _rounded(math.ceil, torch.ceil), "floor": _rounded(math.floor, torch.floor)}

# ---------------------------------------------------------------- torch


def _from(
    kind: Callable[..., Any], dtype: torch.dtype | None = None, copies: bool = False
) -> Callable[..., Any]:
    """``kind`` for an array: a tensor of ``dtype``, or of its own without one. It shares the memory
    of an array of that dtype unless it ``copies``.
    """

    def call(data: Any, *sizes: Any, **kwargs: Any) -> Any:
        if not isinstance(data, Array):
            return kind(data, *sizes, **kwargs)
        to = kwargs.pop("dtype", None) or dtype or data.dtype
        made: Any = data.to(dtype=to, copy=copies, **kwargs)
        made.__class__ = Value
        return made

    return call


_KINDS = {
    "LongTensor": torch.int64, "IntTensor": torch.int32, "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64, "BoolTensor": torch.bool,
}  # fmt: skip
_TORCH: dict[str, Callable[..., Any]] = {
    **{name: _from(getattr(torch, name), dtype) for name, dtype in _KINDS.items()},
    "tensor": _from(torch.tensor, copies=True),
    "as_tensor": _from(torch.as_tensor),
    "from_numpy": _from(torch.from_numpy),
    "Size": Size,
    "broadcast_shapes": broadcast_shapes,
}
