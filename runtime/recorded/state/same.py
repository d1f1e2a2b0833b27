"""Whether objects hold the very objects that they held, and tensors lie where they lay.

A replay asks that of a model, its parameters, their gradients and the optimizer: a thousand things
in all, which the extension asks in a third of the time of Python, once it is there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from recast.runtime import device


def attributes(objects: list[Any], names: tuple[str, ...], known: list[Any]) -> bool:
    """Whether the attributes ``names`` of ``objects`` are those ``known``: all of the first object,
    then of the next. Raises AttributeError where there is none.
    """
    fast: Any = getattr(device.extension(), "same_attributes", None)
    if fast is not None:
        return fast(objects, names, known)
    now = attributes_of(objects, names)
    return len(now) == len(known) and all(map(is_, now, known))


def attributes_of(objects: Iterable[Any], names: tuple[str, ...]) -> list[Any]:
    """What :func:`attributes` compares."""
    found = map(attrgetter(*names), objects)
    return [*found] if len(names) == 1 else [*chain.from_iterable(found)]


def values(dicts: list[dict[Any, Any]], known: list[Any]) -> bool:
    """Whether the values of ``dicts``, one after the other, are those ``known``. Raises TypeError
    for what is no dict.
    """
    fast: Any = getattr(device.extension(), "same_values", None)
    if fast is not None:
        return fast(dicts, known)
    now = values_of(dicts)
    return len(now) == len(known) and all(map(is_, now, known))


def values_of(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    """What :func:`values` compares."""
    return [*chain.from_iterable(map(dict.values, dicts))]


def items(dicts: list[dict[str, Any]], keys: list[str], known: list[Any], absent: object) -> bool:
    """Whether each dict has the object known under its key, ``absent`` where it has none."""
    fast: Any = getattr(device.extension(), "same_items", None)
    if fast is not None:
        return bool(fast(dicts, keys, known, absent))
    held = zip(dicts, keys, known, strict=True)
    return all([d.get(k, absent) is value for d, k, value in held])


class Where:
    """Where ``tensors``, a list that nobody changes, lie when this is made: addresses, dtypes,
    shapes and strides.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        fast: Any = getattr(device.extension(), "Places", None)
        self._places = None if fast is None else fast(tensors)
        if self._places is None or not self._places.readable:  # a subclass is asked its own way
            self._places, self._known = None, self._look()

    def stands(self) -> bool:
        """Whether they lie so now."""
        if self._places is not None:
            return bool(self._places.are_of(self._tensors))
        return self._look() == self._known

    def _look(self) -> tuple[Any, ...]:
        held = self._tensors
        return addresses_of(held), [t.dtype for t in held], shapes_of(held)


def addresses_of(tensors: Iterable[Tensor]) -> tuple[Hashable, ...]:
    """Of each where it lies; of one that is made of several, as sparse ones are, where these do."""
    held = list(tensors)
    try:
        return tuple(map(Tensor.data_ptr, held))  # by map: a third of the time of a loop
    except RuntimeError:
        return tuple([_addresses(t) for t in held])


def _addresses(tensor: Tensor) -> Hashable:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().data_ptr(), tensor._values().data_ptr(), tensor._nnz()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        return tuple([t.data_ptr() for t in parts]), tensor._nnz()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        return tuple([t.data_ptr() for t in parts]), tensor._nnz()
    # Of others torch tells nothing: the object, which somebody may write to in its place.
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def shapes_of(tensors: Sequence[Tensor]) -> tuple[tuple[Hashable, ...], ...]:
    """Of each its shape, and what tells its strides: that there are no gaps, or they themselves.

    To ask for the strides of all takes as long as all else that is asked of parameters.
    """
    try:
        flags = tuple(map(Tensor.is_contiguous, tensors))
    except RuntimeError:  # sparse ones have no strides
        flags = tuple([t.layout is not torch.strided or t.is_contiguous() for t in tensors])
    gaps = () if all(flags) else tuple(
        [t.stride() for t, f in zip(tensors, flags, strict=True) if not f]
    )  # fmt: skip
    return tuple(map(Tensor.size, tensors)), flags, gaps
