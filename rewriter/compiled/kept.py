"""Checks at each call whether a Python value is still what it was when a graph was made.

Such values are baked into the graph. Numbers, strings and Enum members are compared by value;
lists, dicts and arrays entry by entry; of other objects, the fields that the code which ran can
name are compared, and the objects in them. Anything else has to be the same object. 1, 1.0 and
True, which Python calls equal, count as different, and so do 0.0 and -0.0: torch tells them apart.
"""

from __future__ import annotations

import array
import enum
import functools
import hashlib
import marshal
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
MOST = 65536  # entries of a container that are compared at each call, which takes 0.9 ms
_BYTES = 1 << 23  # of an array, likewise
_DEEP = 8  # objects within objects
CALLED = (FunctionType, BuiltinFunctionType, MethodType, type, ModuleType)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_HOLDERS = ("collections", "functools", "_thread")  # UserList, partial, threading.local
# compared by value; so are an Enum's members that are ints or strings
_EQUAL = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Absent:
    """Stands for a missing attribute."""


class Beyond(Exception):
    """A value cannot be compared, for the given reason: capture refuses a forward that reads it."""


# ---------------------------------------------------------------- kinds of comparison


@dataclass(frozen=True, slots=True)
class Same:
    """The same object, or an equal plain value."""

    value: Any

    def same(self, now: Any) -> bool:
        return now is self.value or equal(now, self.value)


def equal(now: Any, value: Any) -> bool:
    """Whether two values are plain and as good as each other."""
    if type(now) is not type(value):
        return False
    if isinstance(now, (float, complex)):  # which tells signs of zero, and that one is no number
        return repr(now) == repr(value)
    return isinstance(now, _EQUAL) and bool(now == value)


@dataclass(frozen=True, slots=True)
class Contents:
    """A container with the same entries as before: the same objects, or equal ones.

    exact: what tells numbers apart that are equal, and the orders of dicts, by :mod:`marshal`;
    empty where there are neither, None where others stand beside them.
    """

    kind: type
    entries: Any
    exact: bytes | None = b""

    def same(self, now: Any) -> bool:
        try:
            same = type(now) is self.kind and bool(now == self.entries)
        except Exception:  # one tensor in place of another: neither equal nor unequal
            return False
        if not same:
            return False
        if self.exact is None:
            return _same_numbers(now, self.entries)
        return not self.exact or _exact(now) == self.exact


def contents(value: Any, entries: Any) -> Contents:
    """What tells whether a container is ``value`` still; ``entries``: a copy, or itself."""
    return Contents(type(value), entries, _exact(value) if _is_more_than_equal(value) else b"")


def _exact(value: Any) -> bytes | None:
    try:
        return marshal.dumps(value, 2)  # of this version the same for equal objects
    except ValueError:  # objects are among the entries
        return None


def _is_more_than_equal(value: Any) -> bool:
    """Whether containers may differ where ``==`` sees none: numbers, or the order of a dict."""
    if isinstance(value, dict) and len(value) > 1:
        return True
    if isinstance(value, CONTAINERS):
        inner = (*value, *value.values()) if isinstance(value, dict) else value
        return any(map(_is_more_than_equal, inner))
    return isinstance(value, (int, float, complex, array.array))


def alike(now: Any, value: Any) -> bool:
    """Whether plain values, or containers of such, are as good as each other."""
    return type(now) is type(value) and bool(now == value) and _same_numbers(now, value)


def _same_numbers(now: Any, value: Any) -> bool:
    """Of containers that are equal."""
    if isinstance(now, dict):
        return [*now] == [*value] and all(map(_same_numbers, now.items(), value.items()))
    if isinstance(now, (set, frozenset)):
        numbers = ([repr(v) for v in one if isinstance(v, (int, float, complex))]
                   for one in (now, value))  # fmt: skip
        return len({tuple(sorted(one)) for one in numbers}) == 1
    if isinstance(now, (list, tuple, deque)):
        return all(map(_same_numbers, now, value))
    if isinstance(now, array.array):
        return now.typecode == value.typecode and now.tobytes() == value.tobytes()
    return not isinstance(now, (int, float, complex)) or equal(now, value)


@dataclass(frozen=True, slots=True)
class Entries:
    """A list, tuple or dict of objects, each of them unchanged; ``keys`` are those of a dict."""

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
    """A numpy array, by its bytes."""

    shape: tuple[int, ...]
    dtype: Any
    bytes: bytes

    def same(self, now: Any) -> bool:
        known = type(now).__module__ == "numpy" and getattr(now, "shape", None) == self.shape
        return known and now.dtype == self.dtype and now.tobytes() == self.bytes


@dataclass(frozen=True, slots=True)
class Fields:
    """An object whose attributes, or entries, with these names are unchanged."""

    kind: type
    fields: tuple[tuple[str, Kept], ...]

    def same(self, now: Any) -> bool:
        if type(now) is not self.kind:
            return False
        held = attributes(now)
        return all(kept.same(held.get(name, Absent)) for name, kept in self.fields)


@dataclass(frozen=True, slots=True)
class Variable:
    """A context variable, by its value in the current context."""

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
    """A value that can no longer be compared."""

    def same(self, now: Any) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Never:
    """A value that may differ each time it is read, such as an iterator."""

    def same(self, now: Any) -> bool:
        return False


@dataclass(frozen=True)
class Here:
    """A value that can be compared only in this process: copies and files lack its objects."""

    kept: Kept

    def same(self, now: Any) -> bool:
        return self.kept.same(now)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a copy of the model calls the same functions

    def __reduce__(self) -> Any:
        return Anything, ()


@dataclass
class Function:
    """A function; in a file, a digest of its code, since classes are looked up anew when loaded.
    ``defaults``: those of its arguments, if they can be changed in place.
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
    """A digest that identifies the code of a function, within one version of Python."""
    code = getattr(_inner(function), "__code__", None)
    return "" if code is None else hashlib.sha256(repr(_code(code)).encode()).hexdigest()


def _inner(value: Any) -> Any:
    """The function inside a method, a static method or a property."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def function(value: Any, names: frozenset[str]) -> Function:
    """The check for whether a function was replaced. Raises Beyond."""
    defaults = getattr(_inner(value), "__defaults__", None) or ()
    fixed = all(isinstance(v, (*_EQUAL, enum.Enum, type(None), *CALLED)) for v in defaults)
    return Function(value, digest(value), None if fixed else keep(defaults, names))


def _code(code: CodeType) -> tuple[Any, ...]:
    inner = (_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *inner


@dataclass(frozen=True)
class Held(Here):
    """An object that only the code which holds it can reach, such as a variable of a closure."""

    value: Any

    @property
    def now(self) -> Any:
        return self.value

    def same(self, now: Any) -> bool:
        return self.kept.same(self.now)


@dataclass(frozen=True)
class Cell(Held):
    """A variable of a closure, which may be rebound."""

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
    """The check for whether ``value`` has changed, as far as code with these ``names`` can see.
    Raises Beyond.

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
    """Whether everything that is compared can be saved, and found again in another process."""
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
    return Contents(type(value), value[:], None)


def _of_python(kind: type) -> bool:
    """Whether the contents of an object are read by Python's own methods, whose names do not appear
    in the user's code.
    """
    return kind.__module__ in _HOLDERS and not issubclass(kind, CONTAINERS)


def _container(value: Any, names: frozenset[str], within: tuple[int, ...], every: bool) -> Kept:
    kind = type(value)
    if kind in (tuple, frozenset) and all(type(v) in PLAIN for v in value):
        return Same(value) if len(value) > MOST else contents(value, value)
    if (count := _size(value)) > MOST:
        raise Beyond(f"a {kind.__name__} of {count:,} entries: too many to compare at each call")
    if _simple(value) or isinstance(value, (set, frozenset)):
        return contents(value, copied(value))
    keys = tuple(value) if isinstance(value, dict) else ()
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return Entries(kind, keys, tuple(keep(v, names, within, every) for v in inner))


def _simple(value: Any) -> bool:
    """Whether ``==`` is enough for a container: no object in it has contents of its own."""
    if isinstance(value, CONTAINERS):
        return all(map(_simple, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (*_EQUAL, enum.Enum, type(None), torch.Tensor, nn.Module, *CALLED))


def attributes(value: Any) -> Mapping[Any, Any]:
    """The contents of an object by name: entries of a mapping, ``__dict__``, ``__slots__``."""
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
    """A copy of a container and of the containers in it; everything else is the same object."""
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
