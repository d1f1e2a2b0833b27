"""Whether objects still hold the same objects, and tensors still have the same addresses.

A replay checks this for a model, its parameters, their gradients and the optimizer: a thousand
things in all. The extension, if there is one, does it in a third of the time of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from recast.runtime import device


def same_attributes(objects: list[Any], names: tuple[str, ...], known: list[Any]) -> bool:
    """Whether the attributes ``names`` of ``objects`` are the same objects as in ``known``, which
    lists all of the first object, then of the next. Raises AttributeError if one is missing.
    """
    fast: Any = getattr(device.extension(), "same_attributes", None)
    if fast is not None:
        return fast(objects, names, known)
    now = attributes_of(objects, names)
    return len(now) == len(known) and all(map(is_, now, known))


def attributes_of(objects: Iterable[Any], names: tuple[str, ...]) -> list[Any]:
    """The list of attributes that :func:`same_attributes` compares."""
    found = map(attrgetter(*names), objects)
    return [*found] if len(names) == 1 else [*chain.from_iterable(found)]


def set_attributes(objects: list[Any], name: str, values: list[Any]) -> None:
    """Set the attribute ``name`` of each object to its value."""
    fast: Any = getattr(device.extension(), "set_attributes", None)
    if fast is not None:
        fast(objects, name, values)
        return
    for one, value in zip(objects, values, strict=True):
        setattr(one, name, value)


def have_only(objects: list[Any], known: list[Any]) -> bool:
    """Whether each object has the known one as its only attribute, under whatever name."""
    fast: Any = getattr(device.extension(), "have_only", None)
    if fast is not None:
        return bool(fast(objects, known))
    held: list[dict[str, Any]] = [one.__dict__ for one in objects]
    return all([len(one) == 1 for one in held]) and same_values(held, known)


def same_objects(objects: Sequence[Any], known: list[Any]) -> bool:
    """Whether these are the same objects, in the same order."""
    fast: Any = getattr(device.extension(), "same_objects", None)
    if fast is not None:
        return bool(fast(objects, known))
    return len(objects) == len(known) and all(map(is_, objects, known))


def same_reference_counts(objects: list[Any]) -> bool:
    """Whether there are as many references to each of them as to the first."""
    fast: Any = getattr(device.extension(), "same_reference_counts", None)
    if fast is not None:
        return bool(fast(objects))
    counts = [*map(sys.getrefcount, objects)]
    return counts.count(counts[0]) == len(counts)


def same_values(dicts: list[dict[Any, Any]], known: list[Any]) -> bool:
    """Whether the values of ``dicts``, one dict after the other, are the same objects as in
    ``known``. Raises TypeError for anything but a dict.
    """
    fast: Any = getattr(device.extension(), "same_values", None)
    if fast is not None:
        return fast(dicts, known)
    now = values_of(dicts)
    return len(now) == len(known) and all(map(is_, now, known))


def values_of(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    """The list of values that :func:`same_values` compares."""
    return [*chain.from_iterable(map(dict.values, dicts))]


def same_items(
    dicts: list[dict[str, Any]], keys: list[str], known: list[Any], absent: object
) -> bool:
    """Whether each dict has the known object under its key; ``absent`` means no entry."""
    fast: Any = getattr(device.extension(), "same_items", None)
    if fast is not None:
        return bool(fast(dicts, keys, known, absent))
    held = zip(dicts, keys, known, strict=True)
    return all([d.get(k, absent) is value for d, k, value in held])


class WatchedDicts:
    """Tells whether ``dicts`` were written to, without looking into them. To compare what a model
    of 60 modules holds reads 2,000 objects in memory.
    """

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._dicts = [*{id(one): one for one in dicts}.values()]
        fast: Any = getattr(device.extension(), "WatchedDicts", None)
        made = None if fast is None else fast(self._dicts)
        self._watched = made if made is not None and made.usable else None

    def unwritten(self) -> bool:
        """True: none was written to since this was made or renewed. False: maybe one was."""
        return self._watched is not None and bool(self._watched.unwritten(self._dicts))

    def renew(self) -> None:
        """Called before they are compared: from now on."""
        if self._watched is not None:
            self._watched.renew(self._dicts)


def known_calls(form: list[Any], lazy: list[int], dicts: list[dict[Any, Any]]) -> Any:
    """The extension's ``KnownCalls``, which looks at the modules and the arguments of a call in one
    step; None without it.
    """
    fast: Any = getattr(device.extension(), "KnownCalls", None)
    return None if fast is None else fast(form, lazy, dicts)


class Versions:
    """How often each of ``tensors``, a list that must not be changed, had been written to when this
    was made or renewed.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        fast: Any = getattr(device.extension(), "Numbers", None)
        self._numbers = None if fast is None else fast(tensors, "_version")
        self._known = [] if fast is not None else self._look()

    def unchanged(self) -> bool:
        """Whether none was written to since."""
        if self._numbers is not None:
            return bool(self._numbers.are_of(self._tensors))
        return self._look() == self._known

    def renew(self) -> None:
        """From now on."""
        if self._numbers is not None:
            self._numbers.renew(self._tensors)
        else:
            self._known = self._look()

    def _look(self) -> list[int]:
        return [t._version for t in self._tensors]


def held_in_torch(tensors: Sequence[Tensor]) -> object:
    """What holds a reference to each of ``tensors`` in torch itself, as long as it exists.

    To read or write a tensor that only Python refers to takes torch twice as long: at each call,
    torch and Python pass the ownership to and fro. Private; without it, nothing is held.
    """
    held: Any = getattr(torch._C, "ScriptList", None)
    return None if held is None or not tensors else held(list(tensors))


class ReferenceCounts:
    """How many references to each of ``objects``, a list that must not be changed, there are when
    this is made.
    """

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        fast: Any = getattr(device.extension(), "ReferenceCounts", None)
        self._counts = None if fast is None else fast(objects)
        self._known = [] if fast is not None else self._look()

    def unchanged(self) -> bool:
        """Whether there are as many now."""
        if self._counts is not None:
            return bool(self._counts.are_of(self._objects))
        return self._look() == self._known

    def _look(self) -> list[int]:
        return [*map(sys.getrefcount, self._objects)]


class TensorLayouts:
    """The addresses, dtypes, shapes and strides of ``tensors``, a list that must not be changed, at
    the time this is made.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        fast: Any = getattr(device.extension(), "Places", None)
        self._places = None if fast is None else fast(tensors)
        if self._places is None or not self._places.readable:  # subclasses answer in their own way
            self._places, self._known = None, self._look()

    def unchanged(self) -> bool:
        """Whether they are still the same."""
        if self._places is not None:
            return bool(self._places.are_of(self._tensors))
        return self._look() == self._known

    def _look(self) -> tuple[Any, ...]:
        held = self._tensors
        return addresses_of(held), [t.dtype for t in held], shapes_of(held)


def addresses_of(tensors: Iterable[Tensor]) -> tuple[Hashable, ...]:
    """The address of each; for one made of several tensors, such as a sparse one, those of all."""
    held = list(tensors)
    try:
        return tuple(map(Tensor.data_ptr, held))  # map takes a third of the time of a loop
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
    # For others torch says nothing: take the object itself, though it may be written to in place.
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def shapes_of(tensors: Sequence[Tensor]) -> tuple[tuple[Hashable, ...], ...]:
    """The shape of each, and what determines its strides: that it is contiguous, or the strides. To
    ask all for strides would take as long as everything else that is checked about parameters.
    """
    try:
        flags = tuple(map(Tensor.is_contiguous, tensors))
    except RuntimeError:  # sparse ones have no strides
        flags = tuple([t.layout is not torch.strided or t.is_contiguous() for t in tensors])
    gaps = () if all(flags) else tuple(
        [t.stride() for t, f in zip(tensors, flags, strict=True) if not f]
    )  # fmt: skip
    return tuple(map(Tensor.size, tensors)), flags, gaps
