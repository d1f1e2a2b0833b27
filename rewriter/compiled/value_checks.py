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
import sys
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn

from .object_contents import CONTAINERS, PLAIN, Absent, attributes, field

# compared by value; so are an Enum's members that are ints or strings
EQUAL = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class NotComparable(Exception):
    """A value cannot be compared, for the given reason: capture refuses a forward that reads it."""


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
    return isinstance(now, EQUAL) and bool(now == value)


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
        return isinstance(now, ContextVar) and self.check.same(of_context(now))


def of_context(variable: ContextVar[Any]) -> Any:
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


@dataclass(slots=True)
class Function:
    """A function, with its code and the defaults of its arguments; in a file, a digest of its code,
    since classes are looked up anew when loaded. ``contents``: of defaults that can be changed in
    place, as :func:`defaults_of` gives them. ``fields``: attributes that were set on it.
    """

    function: Any
    digest: str
    contents: ValueCheck | None = None
    fields: Fields | None = None
    _inner: Any = None
    _code: Any = None
    _defaults: Any = None
    _keywords: Any = None

    def __post_init__(self) -> None:
        inner = inner_function(self.function)
        if inner is not None:
            self._inner, self._code = inner, inner.__code__
            self._defaults, self._keywords = defaults_of(inner)

    @property
    def inner(self) -> FunctionType | None:
        """The function inside a method, as :func:`inner_function` finds it."""
        inner: FunctionType | None = self._inner
        return inner

    @property
    def is_plain(self) -> bool:
        """Whether nothing else of it is compared than the objects that :attr:`parts` lists."""
        found = self._inner is not None
        return found and self.contents is None and self.fields is None

    @property
    def parts(self) -> tuple[Any, ...]:
        """The function, the one inside it, that one's code, defaults and keyword defaults."""
        return self.function, self._inner, self._code, self._defaults, self._keywords

    def same(self, now: Any) -> bool:
        if self.function is None and digest(now) == self.digest:
            self.function = now
            self.__post_init__()
        if now is not self.function:
            return False
        inner = self._inner
        if inner is None:
            return True
        if inner.__code__ is not self._code or inner.__defaults__ is not self._defaults:
            return False
        if inner.__kwdefaults__ is not self._keywords:
            return False
        if self.contents is not None and not self.contents.same(defaults_of(inner)):
            return False
        return self.fields is None or self.fields.same(inner)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        return _loaded, (self.digest, sys.version_info[:2])


def defaults_of(inner: FunctionType) -> tuple[Any, ...]:
    """The defaults of a function's arguments, and those of its keyword arguments."""
    return inner.__defaults__, inner.__kwdefaults__


def _loaded(known: str, version: tuple[int, int]) -> Function | Anything:
    return Function(None, known) if version == sys.version_info[:2] else Anything()


def digest(function: Any) -> str:
    """A digest that identifies the code of a function, within one version of Python."""
    inner = inner_function(function)
    return "" if inner is None else hashlib.sha256(repr(_code(inner.__code__)).encode()).hexdigest()


def inner_function(value: Any) -> FunctionType | None:
    """The function inside a method, a static method or a property; None if there is none."""
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    return inner if isinstance(inner, FunctionType) else None


def _code(code: CodeType) -> tuple[Any, ...]:
    inner = (_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *inner


@dataclass(frozen=True, slots=True)
class Method:
    """A method of an object, both unchanged."""

    function: ValueCheck
    owner: ValueCheck

    def same(self, now: Any) -> bool:
        if not isinstance(now, MethodType):
            return False
        return self.function.same(now.__func__) and self.owner.same(now.__self__)


@dataclass(frozen=True, slots=True)
class Referent:
    """What a weak reference refers to."""

    check: ValueCheck

    def same(self, now: Any) -> bool:
        return isinstance(now, ReferenceType) and self.check.same(now())


@dataclass(frozen=True, slots=True)
class Every:
    """Several checks of one value."""

    checks: tuple[ValueCheck, ...]

    def same(self, now: Any) -> bool:
        return all(check.same(now) for check in self.checks)


@dataclass(frozen=True, slots=True)
class Lacks:
    """An object that has no attributes of these names."""

    names: frozenset[str]

    def same(self, now: Any) -> bool:
        known = (attributes(now), *(base.__dict__ for base in type(now).__mro__))
        return all(held.keys().isdisjoint(self.names) for held in known)


@dataclass(frozen=True, slots=True)
class Layers:
    """A module that is no part of the model, and those in it: their classes, plain attributes,
    tensors and hooks.
    """

    plain: list[Any]
    held: list[Any]

    def same(self, now: Any) -> bool:
        plain, held = inside_of(now)
        return alike(plain, self.plain) and _are_same(held, self.held)


def _are_same(now: list[Any], known: list[Any]) -> bool:
    return len(now) == len(known) and all(map(is_, now, known))


def inside_of(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """What :class:`Layers` compares by value, and what by identity."""
    plain: list[Any] = []
    held: list[Any] = []
    for inner in module.modules():
        of = vars(inner)
        plain += [type(inner), {k: v for k, v in of.items() if _is_setting(v)}]
        slots = [of["_parameters"], of["_buffers"]]
        slots += [value for name, value in of.items() if name.endswith("_hooks")]
        for one in slots:
            plain.append(tuple(one))
            held += one.values()
    return plain, held


def _is_setting(value: Any) -> bool:
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(_is_setting, value)))


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
    Same | Contents | Entries | Array | Fields | Function | Method | Referent | Every | Lacks
    | Layers | Variable | ProcessLocal | Anything | Never
)  # fmt: skip


def portable(check: ValueCheck) -> bool:
    """Whether everything that is compared can be saved, and found again in another process."""
    if isinstance(check, Same):
        return isinstance(check.value, (*EQUAL, enum.Enum, type(None)))
    if isinstance(check, Contents):
        return _literal(check.entries)
    if isinstance(check, Entries):
        return all(map(portable, check.checks)) and all(type(k) in PLAIN for k in check.keys)
    if isinstance(check, Fields):
        return all(portable(inner) for _, inner in check.fields)
    if isinstance(check, Variable):
        return portable(check.check)
    if isinstance(check, Every):
        return all(map(portable, check.checks))
    return isinstance(check, (Array, Function, Lacks))


def _literal(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return all(map(_literal, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (*EQUAL, enum.Enum, type(None)))
