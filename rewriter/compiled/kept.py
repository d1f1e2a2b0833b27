"""What tells, at each call, whether a value of Python's is as it was when a graph was made.

A graph has such values baked. Numbers, texts and members of an Enum are compared; lists, dicts and
arrays entry by entry; of other objects the fields that the code which ran can name, and the objects
in them. All else has to be the same object.
"""

from __future__ import annotations

import array
import enum
import functools
import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

PLAIN = (int, float, bool, str, type(None))
MOST = 65536  # entries of a container that are compared at each call, which takes 0.2 ms
_BYTES = 1 << 23  # of an array, likewise
_DEEP = 8  # objects within objects
CALLED = (FunctionType, BuiltinFunctionType, MethodType, type, ModuleType)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_HOLDERS = ("collections", "functools", "_thread")  # UserList, partial, threading.local
# of these an equal one is as good; an Enum that is an int or a text is among them
_EQUAL = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Absent:
    """Stands for an attribute that is not there."""


class Beyond(Exception):
    """A value that cannot be compared, with the reason: capture refuses a forward that reads it."""


# ---------------------------------------------------------------- kinds of comparison


@dataclass(frozen=True, slots=True)
class Same:
    """The same object, or an equal plain value."""

    value: Any

    def same(self, now: Any) -> bool:
        value = self.value
        return now is value or (
            type(now) is type(value) and isinstance(now, _EQUAL) and bool(now == value)
        )


@dataclass(frozen=True, slots=True)
class Contents:
    """A container with the entries that it had: the same objects, or equal ones."""

    kind: type
    entries: Any

    def same(self, now: Any) -> bool:
        try:
            return type(now) is self.kind and bool(now == self.entries)
        except Exception:  # a tensor in the place of another: neither equal nor unequal
            return False


@dataclass(frozen=True, slots=True)
class Entries:
    """A list, tuple or dict of objects, each as it was; ``keys`` are those of a dict."""

    kind: type
    keys: tuple[Any, ...]
    kept: tuple[Kept, ...]

    def same(self, now: Any) -> bool:
        held: Any = now  # of a kind that is not known here
        if type(now) is not self.kind or len(held) != len(self.kept):
            return False
        if isinstance(held, dict) and tuple(held) != self.keys:
            return False
        inner: Any = held.values() if isinstance(held, dict) else held
        return all(kept.same(value) for kept, value in zip(self.kept, inner, strict=True))


@dataclass(frozen=True, slots=True)
class Array:
    """An array of numpy's, by its bytes."""

    shape: tuple[int, ...]
    dtype: Any
    bytes: bytes

    def same(self, now: Any) -> bool:
        known = type(now).__module__ == "numpy" and getattr(now, "shape", None) == self.shape
        return known and now.dtype == self.dtype and now.tobytes() == self.bytes


@dataclass(frozen=True, slots=True)
class Fields:
    """An object whose attributes, or entries, of these names are as they were."""

    kind: type
    fields: tuple[tuple[str, Kept], ...]

    def same(self, now: Any) -> bool:
        if type(now) is not self.kind:
            return False
        held = attributes(now)
        return all(kept.same(held.get(name, Absent)) for name, kept in self.fields)


@dataclass(frozen=True, slots=True)
class Variable:
    """A context variable with the value that it has in this context."""

    kept: Kept

    def same(self, now: Any) -> bool:
        return isinstance(now, ContextVar) and self.kept.same(_of_context(now))


def _of_context(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return Absent


@dataclass(frozen=True, slots=True)
class Anything:
    """What cannot be compared any more."""

    def same(self, now: Any) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Never:
    """What may be something else at each look, such as an iterator."""

    def same(self, now: Any) -> bool:
        return False


@dataclass(frozen=True)
class Here:
    """What can only be compared in this process: objects that copies and files do not have."""

    kept: Kept

    def same(self, now: Any) -> bool:
        return self.kept.same(now)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a copy of the model calls the same functions

    def __reduce__(self) -> Any:
        return Anything, ()


@dataclass
class Function:
    """A function, or in a file a digest of its code, as a class is found anew where it is loaded.

    ``defaults``: those of its arguments, where they can be changed in place.
    """

    function: Any
    digest: str
    defaults: Kept | None = None

    def same(self, now: Any) -> bool:
        if self.function is None and digest(now) == self.digest:
            self.function = now
        if now is not self.function:
            return False
        return self.defaults is None or self.defaults.same(_inner(now).__defaults__)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        return _loaded, (self.digest, sys.version_info[:2])


def _loaded(known: str, version: tuple[int, int]) -> Function | Anything:
    return Function(None, known) if version == sys.version_info[:2] else Anything()


def digest(function: Any) -> str:
    """What tells the code of a function from other code, in one version of Python."""
    code = getattr(_inner(function), "__code__", None)
    return "" if code is None else hashlib.sha256(repr(_code(code)).encode()).hexdigest()


def _inner(value: Any) -> Any:
    """The function in a method, a static method or a property."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def function(value: Any, names: frozenset[str]) -> Function:
    """What tells whether a function was replaced. Raises Beyond."""
    defaults = getattr(_inner(value), "__defaults__", None) or ()
    fixed = all(isinstance(v, (*_EQUAL, enum.Enum, type(None), *CALLED)) for v in defaults)
    return Function(value, digest(value), None if fixed else keep(defaults, names))


def _code(code: CodeType) -> tuple[Any, ...]:
    inner = (_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *inner


@dataclass(frozen=True)
class Held(Here):
    """An object that only the code reaches which holds it, such as a variable of a closure."""

    value: Any

    @property
    def now(self) -> Any:
        return self.value

    def same(self, now: Any) -> bool:
        return self.kept.same(self.now)


@dataclass(frozen=True)
class Cell(Held):
    """A variable of a closure, which may be bound to something else."""

    @property
    def now(self) -> Any:
        try:
            return self.value.cell_contents
        except ValueError:  # empty
            return Absent


Kept = (
    Same | Contents | Entries | Array | Fields | Function | Variable | Here | Anything | Never
)  # fmt: skip


# ---------------------------------------------------------------- choosing one


def keep(
    value: Any, names: frozenset[str], within: tuple[int, ...] = (), every: bool = False
) -> Kept:
    """What tells whether ``value`` has changed, as far as code with these ``names`` can see. Raises
    Beyond.

    ``within``: the objects around it. ``every``: all fields of objects, whatever their names.
    """
    if isinstance(value, (*_EQUAL, enum.Enum, type(None), torch.Tensor, nn.Module, *CALLED)):
        return Same(value)
    if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
        raise Beyond("which draws random numbers that no graph would draw")
    if hasattr(type(value), "__next__"):
        raise Beyond("an iterator, which gives something else each time")
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return _array(value)
    if isinstance(value, (array.array, bytearray)):
        return _bytes(value)
    if id(value) in within or len(within) == _DEEP:
        return Same(value)
    within = (*within, id(value))
    if isinstance(value, ContextVar):
        return Variable(keep(_of_context(value), names, within, every))
    every = every or _of_python(type(value))
    if type(value) in CONTAINERS:
        return _container(value, names, within, every)
    held = attributes(value)
    known = [k for k in held if type(k) is str and (every or k in names)]
    if isinstance(value, CONTAINERS):  # of a class of the user's
        return _container(value, names, within, every)
    if not held:
        return Same(value)
    fields = ((k, keep(held[k], names, within, every)) for k in known)
    return Fields(type(value), tuple(fields))


def portable(kept: Kept) -> bool:
    """Whether all that is compared can be saved and found again in another process."""
    if isinstance(kept, Same):
        return isinstance(kept.value, (*_EQUAL, enum.Enum, type(None)))
    if isinstance(kept, Contents):
        return _literal(kept.entries)
    if isinstance(kept, Entries):
        return all(map(portable, kept.kept)) and all(type(k) in PLAIN for k in kept.keys)
    if isinstance(kept, Fields):
        return all(portable(inner) for _, inner in kept.fields)
    if isinstance(kept, Variable):
        return portable(kept.kept)
    return isinstance(kept, (Array, Function))


def _literal(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return all(map(_literal, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (*_EQUAL, enum.Enum, type(None)))


def _array(value: Any) -> Array | Same:
    if value.dtype.hasobject:
        return Same(value)
    if value.nbytes > _BYTES:
        raise Beyond(f"an array of {value.size:,} numbers: too many to compare at each call")
    return Array(value.shape, value.dtype, value.tobytes())


def _bytes(value: Any) -> Contents:
    if memoryview(value).nbytes > _BYTES:
        raise Beyond(f"{len(value):,} numbers: too many to compare at each call")
    return Contents(type(value), value[:])


def _of_python(kind: type) -> bool:
    """Whether what an object holds is read by methods of Python's own, whose names no code of the
    user's tells.
    """
    return kind.__module__ in _HOLDERS and not issubclass(kind, CONTAINERS)


def _container(value: Any, names: frozenset[str], within: tuple[int, ...], every: bool) -> Kept:
    kind = type(value)
    if kind in (tuple, frozenset) and all(type(v) in PLAIN for v in value):
        return Same(value) if len(value) > MOST else Contents(kind, value)
    if (count := _size(value)) > MOST:
        raise Beyond(f"a {kind.__name__} of {count:,} entries: too many to compare at each call")
    if _simple(value) or isinstance(value, (set, frozenset)):
        return Contents(kind, copied(value))
    keys = tuple(value) if isinstance(value, dict) else ()
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return Entries(kind, keys, tuple(keep(v, names, within, every) for v in inner))


def _simple(value: Any) -> bool:
    """Whether ``==`` tells all of a container: no object in it has contents of its own."""
    if isinstance(value, CONTAINERS):
        return all(map(_simple, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (*_EQUAL, enum.Enum, type(None), torch.Tensor, nn.Module, *CALLED))


def attributes(value: Any) -> Mapping[Any, Any]:
    """What an object holds by name: entries of a mapping, ``__dict__``, ``__slots__``."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    held = getattr(value, "__dict__", None)
    slots = _slots(type(value))
    if not slots:
        return {} if held is None else held
    return {**(held or {}), **{k: getattr(value, k) for k in slots if hasattr(value, k)}}


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        found += [own] if isinstance(own, str) else own
    return [name for name in found if not name.startswith("__")]


def copied(value: Any) -> Any:
    """A container with copies of the containers in it; all else is the same object."""
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return set(value)
    if isinstance(value, deque):
        return deque(copied(v) for v in value)
    if isinstance(value, (list, tuple)):
        entries = [copied(v) for v in value]
        return entries if isinstance(value, list) else tuple(entries)
    return value


def untouched(value: Any, before: Any) -> bool:
    """Whether a container holds the very objects that its copy ``before`` holds, or new keys with
    tensors that depend on no input, as a cache does.
    """
    if isinstance(value, dict) and isinstance(before, dict):
        new = [v for k, v in value.items() if k not in before]
        return all(getattr(v, "static", False) for v in new) and all(
            k in value and untouched(value[k], v) for k, v in before.items()
        )
    if isinstance(value, (set, frozenset)):
        return bool(value == before)
    if isinstance(value, (list, tuple, deque)) and isinstance(before, (list, tuple, deque)):
        return len(value) == len(before) and all(map(untouched, value, before))
    return value is before


def _size(value: Any) -> int:
    entries = value.values() if isinstance(value, dict) else value
    inner = (_size(v) if isinstance(v, CONTAINERS) else 1 for v in entries)
    return sum(inner) if len(value) <= MOST else len(value)
