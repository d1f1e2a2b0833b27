"""What Python objects hold: attributes by name, those of slots and classes too; entries."""

from __future__ import annotations

import array
import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from recast.rewriter.capture.frames import LIBRARIES

PLAIN = (int, float, bool, str, type(None))
CALLED = (FunctionType, BuiltinFunctionType, MethodType, type, ModuleType)
METHODS = (FunctionType, property, staticmethod, classmethod)  # as a class has them
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
ARRAYS = (np.ndarray, array.array, bytearray)
ARRAY_BYTES = 1 << 26  # of an array that is copied, at most
_SLOTS: WeakKeyDictionary[type, list[str]] = WeakKeyDictionary()  # asked for at each call


class Absent:
    """Stands for a missing attribute."""


def attributes(value: Any) -> Mapping[Any, Any]:
    """The contents of an object by name: entries of a mapping, ``__dict__``, ``__slots__``."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    held = getattr(value, "__dict__", None)
    slots = slots_of(type(value))
    if not slots:
        return {} if held is None else held
    return {**(held or {}), **{k: getattr(value, k) for k in slots if hasattr(value, k)}}


def field(value: Any, held: Mapping[Any, Any], name: str) -> Any:
    """What an object, whose ``attributes`` are ``held``, or a class has under a name: its own, or
    that of its class or base.
    """
    own = held.get(name, Absent)
    if own is not Absent:
        return own
    for base in value.__mro__ if isinstance(value, type) else type(value).__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return Absent


def inherited(kind: type) -> dict[str, Any]:
    """What the objects of a class have of it and of its bases, methods included. Not what a base
    in a library hides, as nn.Module does the ``__repr__`` of a mixin behind it.
    """
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in LIBRARIES:
            found |= vars(base)
    slots = MemberDescriptorType
    return {
        k: v
        for k, v in found.items()
        if not hidden(k, v) and not isinstance(v, slots) and field(kind, {}, k) is v
    }


def hidden(name: str, value: Any) -> bool:
    """Whether a class has this for itself, and not for its objects to use."""
    return name.startswith("__") and not isinstance(value, METHODS)


def slots_of(kind: type) -> list[str]:
    """The names of the slots of a class."""
    known = _SLOTS.get(kind)
    if known is None:
        found: list[str] = []
        for base in kind.__mro__:
            own = vars(base).get("__slots__", ())
            found += [_mangled(base, k) for k in ([own] if isinstance(own, str) else own)]
        known = _SLOTS[kind] = [name for name in found if not name.startswith("__")]
    return known


def _mangled(kind: type, name: str) -> str:
    """What Python makes of a private name in a class."""
    private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if private else name


def copied(value: Any) -> Any:
    """A copy of a container and of the containers and arrays in it; everything else is the same
    object.
    """
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return set(value)
    if isinstance(value, deque):
        return deque(copied(v) for v in value)
    if isinstance(value, (list, tuple)):
        entries = [copied(v) for v in value]
        return entries if isinstance(value, list) else tuple(entries)
    return _numbers(value) if isinstance(value, ARRAYS) else value


def untouched(value: Any, before: Any, arrays: bool = True) -> bool:
    """Whether a container holds the very objects that its copy ``before`` holds, or new keys with
    tensors that depend on no input, as a cache does; and ``arrays`` in it the same numbers.
    """
    if isinstance(value, dict) and isinstance(before, dict):
        new = [v for k, v in value.items() if k not in before]
        return all(getattr(v, "static", False) for v in new) and all(
            k in value and untouched(value[k], v, arrays) for k, v in before.items()
        )
    if isinstance(value, (set, frozenset)):
        return bool(value == before)
    if isinstance(value, (list, tuple, deque)) and isinstance(before, (list, tuple, deque)):
        both = zip(value, before, strict=False)
        return len(value) == len(before) and all(untouched(v, w, arrays) for v, w in both)
    if isinstance(before, _Numbers):
        return isinstance(value, ARRAYS) and (not arrays or _numbers(value) == before)
    return value is before


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What is in an array: a copy, as of a container."""

    form: tuple[Any, ...]
    values: bytes


def _numbers(value: Any) -> Any:
    """The numbers in an array. One that is too large to copy is the same object: a graph that reads
    it is refused.
    """
    if array_bytes(value) > ARRAY_BYTES:
        return value
    form = (type(value), getattr(value, "dtype", None), getattr(value, "shape", None))
    return _Numbers(form, bytes(value) if isinstance(value, bytearray) else value.tobytes())


def array_bytes(value: Any) -> int:
    """How many bytes an array is."""
    size: int = value.nbytes if isinstance(value, np.ndarray) else memoryview(value).nbytes
    return size
