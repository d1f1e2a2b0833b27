"""Checks at each call whether a Python value is still what it was when a graph was made.

Such values are baked into the graph. Numbers, strings and Enum members are compared by value;
lists, dicts and arrays entry by entry; of other objects, the fields that the code which ran can
name are compared, and the objects in them. Anything else has to be the same object. 1, 1.0 and
True, which Python calls equal, count as different, and so do 0.0 and -0.0: torch tells them apart.
"""

from __future__ import annotations

import array
import enum
import hashlib
import marshal
import random
import sys
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from .object_contents import (
    CALLED,
    CONTAINERS,
    METHODS,
    PLAIN,
    Absent,
    attributes,
    copied,
    field,
    inherited,
)

MOST = 65536  # entries of a container that are compared at each call, which takes 0.9 ms
_BYTES = 1 << 23  # of an array, likewise
_DEEP = 8  # objects within objects
_HOLDERS = ("collections", "functools", "_thread")  # UserList, partial, threading.local
# compared by value; so are an Enum's members that are ints or strings
_EQUAL = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class NotComparable(Exception):
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
    checks: tuple[ValueCheck, ...]

    def same(self, now: Any) -> bool:
        held: Any = now  # of a kind that is not known here
        if type(now) is not self.kind or len(held) != len(self.checks):
            return False
        if isinstance(held, dict) and tuple(held) != self.keys:
            return False
        inner: Any = held.values() if isinstance(held, dict) else held
        return all(check.same(value) for check, value in zip(self.checks, inner, strict=True))


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
    fields: tuple[tuple[str, ValueCheck], ...]

    def same(self, now: Any) -> bool:
        if type(now) is not self.kind:
            return False
        held = attributes(now)
        for name, check in self.fields:
            value = held.get(name, Absent)
            if not check.same(field(now, held, name) if value is Absent else value):
                return False
        return True

    def __reduce__(self) -> Any:
        if self.kind is ModuleType:  # which pickle does not find by its name
            return _of_module, (self.fields,)
        return Fields, (self.kind, self.fields)


def _of_module(fields: tuple[tuple[str, ValueCheck], ...]) -> Fields:
    return Fields(ModuleType, fields)


@dataclass(frozen=True, slots=True)
class Variable:
    """A context variable, by its value in the current context."""

    check: ValueCheck

    def same(self, now: Any) -> bool:
        return isinstance(now, ContextVar) and self.check.same(_of_context(now))


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
class ProcessLocal:
    """A value that can be compared only in this process: copies and files lack its objects."""

    check: ValueCheck

    def same(self, now: Any) -> bool:
        return self.check.same(now)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a copy of the model calls the same functions

    def __reduce__(self) -> Any:
        return Anything, ()


@dataclass
class Function:
    """A function; in a file, a digest of its code, since classes are looked up anew when loaded.
    ``defaults``: those of its arguments, if they can be changed in place. ``fields``: attributes
    that were set on it.
    """

    function: Any
    digest: str
    defaults: ValueCheck | None = None
    fields: Fields | None = None

    def same(self, now: Any) -> bool:
        if self.function is None and digest(now) == self.digest:
            self.function = now
        if now is not self.function:
            return False
        if self.fields is not None and not self.fields.same(_inner(now)):
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
    """The check for whether a function was replaced. Raises NotComparable."""
    defaults = getattr(_inner(value), "__defaults__", None) or ()
    fixed = all(isinstance(v, (*_EQUAL, enum.Enum, type(None), *CALLED)) for v in defaults)
    held = getattr(_inner(value), "__dict__", {})
    fields = tuple((k, check_of(held[k], names)) for k in held if k in names and k != "__wrapped__")
    return Function(
        value, digest(value), None if fixed else check_of(defaults, names),
        Fields(FunctionType, fields) if fields else None,
    )  # fmt: skip


def whole_function(check: Function) -> Function:
    """``check`` with all that was set on the function and can be compared, whatever its name."""
    held = getattr(_inner(check.function), "__dict__", {})
    known = frozenset(k for k, v in held.items() if _is_comparable(v, frozenset(held)))
    return function(check.function, known) if known else check


def _is_comparable(value: Any, names: frozenset[str]) -> bool:
    try:
        check_of(value, names)
    except NotComparable:
        return False
    return True


def _code(code: CodeType) -> tuple[Any, ...]:
    inner = (_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *inner


@dataclass(frozen=True)
class Held(ProcessLocal):
    """An object that only the code which holds it can reach, such as a variable of a closure."""

    value: Any

    @property
    def now(self) -> Any:
        return self.value

    def same(self, now: Any) -> bool:
        return self.check.same(self.now)


@dataclass(frozen=True)
class Cell(Held):
    """A variable of a closure, which may be rebound."""

    @property
    def now(self) -> Any:
        try:
            return self.value.cell_contents
        except ValueError:  # empty
            return Absent


ValueCheck = (
    Same | Contents | Entries | Array | Fields | Function | Variable | ProcessLocal | Anything
    | Never
)  # fmt: skip


# ---------------------------------------------------------------- choosing one


def check_of(
    value: Any, names: frozenset[str], within: tuple[int, ...] = (), every: bool = False
) -> ValueCheck:
    """The check for whether ``value`` has changed, as far as code with these ``names`` can see.
    Raises NotComparable.

    ``within``: the objects around it. ``every``: all fields of objects, whatever their names.
    """
    if isinstance(value, (*_EQUAL, enum.Enum, type(None), torch.Tensor, nn.Module, *CALLED)):
        return Same(value)
    if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
        raise NotComparable("which draws random numbers that no graph would draw")
    if hasattr(type(value), "__next__"):
        raise NotComparable("an iterator, which gives something else each time")
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return _array(value)
    if isinstance(value, (array.array, bytearray)):
        return _bytes(value)
    if id(value) in within or len(within) == _DEEP:
        return Same(value)
    within = (*within, id(value))
    if isinstance(value, ContextVar):
        return Variable(check_of(_of_context(value), names, within, every))
    every = every or _of_python(type(value))
    if type(value) in CONTAINERS:
        return _container(value, names, within, every)
    held = attributes(value)
    known = [k for k in held if type(k) is str and (every or k in names)]
    known += [k for k in inherited(type(value)) if k in names and k not in held]
    if isinstance(value, CONTAINERS):  # of a class of the user's
        return _container(value, names, within, every)
    if not held and not known:
        return Same(value)
    fields = []
    for name in known:
        one = field(value, held, name)
        method = name not in held and isinstance(one, METHODS)
        check = function(one, names) if method else check_of(one, names, within, every)
        fields.append((name, check))
    return Fields(type(value), tuple(fields))


def portable(check: ValueCheck) -> bool:
    """Whether everything that is compared can be saved, and found again in another process."""
    if isinstance(check, Same):
        return isinstance(check.value, (*_EQUAL, enum.Enum, type(None)))
    if isinstance(check, Contents):
        return _literal(check.entries)
    if isinstance(check, Entries):
        return all(map(portable, check.checks)) and all(type(k) in PLAIN for k in check.keys)
    if isinstance(check, Fields):
        return all(portable(inner) for _, inner in check.fields)
    if isinstance(check, Variable):
        return portable(check.check)
    return isinstance(check, (Array, Function))


def _literal(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return all(map(_literal, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (*_EQUAL, enum.Enum, type(None)))


def _array(value: Any) -> Array | Same:
    if value.dtype.hasobject:
        return Same(value)
    if value.nbytes > _BYTES:
        raise NotComparable(f"an array of {value.size:,} numbers: too many to compare at each call")
    return Array(value.shape, value.dtype, value.tobytes())


def _bytes(value: Any) -> Contents:
    if memoryview(value).nbytes > _BYTES:
        raise NotComparable(f"{len(value):,} numbers: too many to compare at each call")
    return Contents(type(value), value[:], None)


def _of_python(kind: type) -> bool:
    """Whether the contents of an object are read by Python's own methods, whose names do not appear
    in the user's code.
    """
    return kind.__module__ in _HOLDERS and not issubclass(kind, CONTAINERS)


def _container(
    value: Any, names: frozenset[str], within: tuple[int, ...], every: bool
) -> ValueCheck:
    kind = type(value)
    if kind in (tuple, frozenset) and all(type(v) in PLAIN for v in value):
        return Same(value) if len(value) > MOST else contents(value, value)
    if (count := _size(value)) > MOST:
        raise NotComparable(
            f"a {kind.__name__} of {count:,} entries: too many to compare at each call"
        )
    if _simple(value) or isinstance(value, (set, frozenset)):
        return contents(value, copied(value))
    keys = tuple(value) if isinstance(value, dict) else ()
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
    return Entries(kind, keys, tuple(check_of(v, names, within, every) for v in inner))


def _simple(value: Any) -> bool:
    """Whether ``==`` is enough for a container: no object in it has contents of its own."""
    if isinstance(value, CONTAINERS):
        return all(map(_simple, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (*_EQUAL, enum.Enum, type(None), torch.Tensor, nn.Module, *CALLED))


def _size(value: Any) -> int:
    entries = value.values() if isinstance(value, dict) else value
    inner = (_size(v) if isinstance(v, CONTAINERS) else 1 for v in entries)
    return sum(inner) if len(value) <= MOST else len(value)
