"""What some code can see, and so how the values that it reaches are compared at each call.

Of an object only the fields that the code names are compared, and what it finds in them; so for the
classes, functions and Python modules of the user's that it reaches. Kinds of comparison:
:mod:`.value_checks`.
"""

from __future__ import annotations

import array
import dataclasses
import enum
import random
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import attrgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ReferenceType

import torch
from torch import nn

from recast.rewriter.capture.frames import LIBRARIES

from .code_names import any_field, attributes_in, looked_for, names_in
from .homes import scope_of
from .object_contents import (
    CALLED,
    CONTAINERS,
    METHODS,
    PLAIN,
    Absent,
    attributes,
    copied,
    field,
    hidden,
    inherited,
)
from .value_checks import (
    EQUAL,
    Array,
    Contents,
    Entries,
    Every,
    Fields,
    Function,
    Lacks,
    Layers,
    Method,
    NotComparable,
    ProcessLocal,
    Referent,
    Same,
    ValueCheck,
    Variable,
    contents,
    defaults_of,
    digest,
    inner_function,
    inside_of,
    of_context,
    portable,
)

MOST = 65536  # entries of a container that are compared at each call, which takes 0.9 ms
_BYTES = 1 << 23  # of an array, likewise
_DEEP = 8  # objects within objects
_DEEP_BY_NAME = 4  # classes and modules within others
_HOLDERS = ("collections", "functools", "_thread")  # UserList, partial, threading.local
Within = tuple[int, ...]  # the objects around a value


class _One(NamedTuple):
    entry: int


_NAMED_ENTRY = type(vars(_One)["entry"])  # what reads an entry of a named tuple


@dataclass(frozen=True)
class VisibleNames:
    """What some code can see: the names in it, and in the code that it calls. ``every``: all fields
    of objects, because it uses ``vars`` or a computed name. ``after``: the names that it reads of
    what has a name, so ``b`` for ``a`` and ``c`` for ``b`` where it says ``a.b.c``. ``looked_for``:
    names that it may ask ``getattr`` or ``hasattr`` for. ``codes``: of the functions that ran.
    ``ours``: the modules of the model, by identity, which are checked as such.
    """

    names: frozenset[str]
    every: bool = False
    after: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    looked_for: frozenset[str] = frozenset()
    codes: frozenset[CodeType] = frozenset()
    ours: frozenset[int] = frozenset()

    def check_of(self, value: Any, label: str) -> ValueCheck:
        """The check for whether ``value`` has changed. Raises NotComparable, with its name."""
        try:
            return self.check(value)
        except NotComparable as error:
            raise NotComparable(f"{label}, {error}") from None

    def reached(self, value: Any, label: str, within: Within = ()) -> ValueCheck | None:
        """:meth:`check_of` for what is reached by name; None if there is nothing to compare."""
        if isinstance(value, (FunctionType, staticmethod, classmethod, property)):
            return self._labelled(value, label, within)
        if isinstance(value, (type, ModuleType)):
            return self._fields(value, label, self.names, within)
        if isinstance(value, (torch.Tensor, *CALLED)) and not isinstance(value, MethodType):
            return ProcessLocal(Same(value))
        if isinstance(value, nn.Module) and id(value) in self.ours:
            return ProcessLocal(Same(value))
        if type(value).__module__.partition(".")[0] == "torch" and not isinstance(value, nn.Module):
            return None
        check = self._labelled(value, label, within)
        if isinstance(check, Fields) and not check.fields:
            return None
        return check if portable(check) else ProcessLocal(check)

    def _labelled(self, value: Any, label: str, within: Within) -> ValueCheck:
        try:
            method = isinstance(value, METHODS)
            return self.function(value, within) if method else self.check(value, within)
        except NotComparable as error:
            raise NotComparable(f"{label}, {error}") from None

    def within(
        self, value: Any, name: str, label: str, deep: int = 1, within: Within = ()
    ) -> ValueCheck | None:
        """What the code reads of a class or a Python module that it reaches by ``name``."""
        names = self.after.get(name, frozenset()) if deep < _DEEP_BY_NAME else frozenset()
        return self._fields(value, label, names, within, deep)

    def _fields(
        self, value: Any, label: str, names: frozenset[str], within: Within = (), deep: int = 0
    ) -> Fields | None:
        """What the code names in a class or a Python module of the user."""
        home = value.__name__ if isinstance(value, ModuleType) else value.__module__
        if home.partition(".")[0] in LIBRARIES or id(value) in within:
            return None
        within = (*within, id(value))
        held = {**inherited(value), **vars(value)} if isinstance(value, type) else vars(value)
        known = {k: held[k] for k in names & held.keys() if not hidden(k, held[k])}
        found = (
            (k, self.within(v, k, f"{label}.{k}", deep + 1, within))
            if isinstance(v, (type, ModuleType))
            else (k, self.reached(v, f"{label}.{k}", within))
            for k, v in known.items()
        )
        fields = tuple((k, check) for k, check in found if check is not None)
        return Fields(type(value), fields) if fields else None

    # ------------------------------------------------------------ of a value

    def check(self, value: Any, within: Within = ()) -> ValueCheck:
        """The check for whether ``value`` has changed. Raises NotComparable."""
        if isinstance(value, (*EQUAL, type(None), torch.Tensor)):
            return Same(value)
        if type(value) is _NAMED_ENTRY:  # loaded from a file, it is another one
            return ProcessLocal(Same(value))
        if isinstance(value, (enum.Enum, nn.Module, ReferenceType, ContextVar, *CALLED)):
            return self._of_special(value, within)
        if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
            raise NotComparable("which draws random numbers that no graph would draw")
        if hasattr(type(value), "__next__"):
            raise NotComparable("an iterator, which gives something else each time")
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return _array(value)
        if isinstance(value, (array.array, bytearray)):
            return _bytes(value)
        if id(value) in within or len(within) >= _DEEP:
            return Same(value)
        within = (*within, id(value))
        seen = replace(self, every=True) if _of_python(type(value)) else self
        if not isinstance(value, CONTAINERS):
            return seen._of_object(value, attributes(value), within)
        entries = seen._of_container(value, within)
        if type(value) in CONTAINERS:
            return entries
        fields = seen._of_object(value, getattr(value, "__dict__", {}), within)
        return entries if isinstance(fields, Same) else Every((entries, fields))

    def _of_special(self, value: Any, within: Within) -> ValueCheck:
        """The check for what has contents of a kind of its own, or is called."""
        if id(value) in within or len(within) >= _DEEP or id(value) in self.ours:
            return Same(value)
        inside = (*within, id(value))
        if isinstance(value, ReferenceType):
            return Referent(self.check(value(), inside))
        if isinstance(value, ContextVar):
            return Variable(self.check(of_context(value), inside))
        if _is_users_function(value):
            return self.function(value, within)
        if isinstance(value, MethodType):
            return Method(self.check(value.__func__, inside), self.check(value.__self__, inside))
        more: ValueCheck | None = None
        if isinstance(value, enum.Enum) and not isinstance(value.value, (*EQUAL, type(None))):
            more = Fields(type(value), (("_value_", self.check(value.value, inside)),))
        elif isinstance(value, (type, ModuleType)):
            more = self._fields(value, value.__name__, self.names, within)
        elif isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            more = Layers(*inside_of(value))
            if _is_users(type(value)):
                more = Every((more, self._of_object(value, vars(value), inside)))
        return Same(value) if more is None else Every((Same(value), more))

    def _of_object(self, value: Any, held: Mapping[Any, Any], within: Within) -> ValueCheck:
        """The check for the fields of an object, which are ``held`` or of its class, and for
        lacking those that it may be asked for.
        """
        known = [k for k in held if type(k) is str and (self.every or k in self.names)]
        known += [k for k in inherited(type(value)) if k in self.names and k not in held]
        fields = []
        for name in known:
            one = field(value, held, name)
            method = name not in held and isinstance(one, METHODS)
            check = self.function(one, within) if method else self.check(one, within)
            fields.append((name, check))
        lacked = frozenset(k for k in self.looked_for if field(value, held, k) is Absent)
        if not fields and not held and not lacked:
            return Same(value)
        found = Fields(type(value), tuple(fields))
        return Every((found, Lacks(lacked))) if lacked else found

    def _of_container(self, value: Any, within: Within) -> ValueCheck:
        kind = type(value)
        if kind in (tuple, frozenset) and all(type(v) in PLAIN for v in value):
            return Same(value) if len(value) > MOST else contents(value, value)
        if (count := _size(value)) > MOST:
            raise NotComparable(
                f"a {kind.__name__} of {count:,} entries: too many to compare at each call"
            )
        if self._is_simple(value, within) or isinstance(value, (set, frozenset)):
            return contents(value, copied(value))
        keys = tuple(value) if isinstance(value, dict) else ()
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return Entries(kind, keys, tuple(self.check(v, within) for v in inner))

    def _is_simple(self, value: Any, within: Within) -> bool:
        """Whether ``==`` is enough for a container: no object in it has contents of its own."""
        if isinstance(value, CONTAINERS):
            inner = value.values() if isinstance(value, dict) else value
            return type(value) in CONTAINERS and all(self._is_simple(v, within) for v in inner)
        if isinstance(value, (*EQUAL, type(None), torch.Tensor)):
            return True
        special = isinstance(value, (enum.Enum, nn.Module, *CALLED))
        # A method leads to its object, which may hold it: what is around ``value`` ends the search.
        return special and isinstance(self._of_special(value, within), Same)

    # ------------------------------------------------------------ of a function

    def function(self, value: Any, within: Within = ()) -> ValueCheck:
        """The check for whether a function was replaced, or given other code, defaults or
        attributes. Raises NotComparable.
        """
        inner = inner_function(value)
        if inner is None or id(inner) in within:
            return Function(value, digest(value))
        within = (*within, id(inner))
        given, by_name = defaults_of(inner)
        fixed = by_name is None and all(
            isinstance(self.check(v, within), Same) for v in given or ()
        )  # fmt: skip
        held = inner.__dict__
        known = [k for k in held if k in self.names and k != "__wrapped__"]
        fields = tuple((k, self.check(held[k], within)) for k in known)
        return Function(
            value, digest(value), None if fixed else self.check((given, by_name), within),
            Fields(FunctionType, fields) if fields else None,
        )  # fmt: skip

    def whole_function(self, check: Function) -> ValueCheck:
        """``check`` with all that was set on the function and can be compared, whatever its
        name.
        """
        held = getattr(inner_function(check.function), "__dict__", {})
        seen = VisibleNames(frozenset(held))
        known = frozenset(k for k, v in held.items() if seen._is_comparable(v))
        return VisibleNames(known).function(check.function) if known else check

    def _is_comparable(self, value: Any) -> bool:
        try:
            self.check(value)
        except NotComparable:
            return False
        return True


def visible_names(
    codes: Iterable[CodeType], modules: Mapping[str, nn.Module] | None = None
) -> VisibleNames:
    """What ``codes`` can see together; ``modules``: those of the model. ``codes`` may be a dict,
    with the name of the Python module of each.
    """
    homes = set(codes.values()) if isinstance(codes, Mapping) else set()
    codes = frozenset(codes)
    after: dict[str, frozenset[str]] = {}
    for name, read in (pair for code in codes for pair in attributes_in(code)):
        after[name] = after.get(name, frozenset()) | {read}
    # What a class defines for Python to call, as __getitem__, has a name where it ran.
    names = frozenset({code.co_name for code in codes}).union(*map(names_in, codes))
    scopes = [scope for home in homes if (scope := scope_of(home)) is not None]
    scopes += map(vars, (modules or {}).values())
    return VisibleNames(
        names.union(*(_of_getters(scope, names) for scope in scopes)),
        any(map(any_field, codes)), after,
        frozenset(text for code in codes for text in looked_for(code)), codes,
        frozenset(map(id, (modules or {}).values())),
    )  # fmt: skip


def _of_getters(scope: Mapping[str, Any], names: frozenset[str]) -> set[str]:
    """The names that an ``operator.attrgetter`` asks for that has one of ``names`` in ``scope``."""
    getters = (v for name in names & scope.keys() if type(v := scope[name]) is attrgetter)
    return {
        part for getter in getters for path in getter.__reduce__()[1] for part in path.split(".")
    }


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in LIBRARIES


def _is_users_function(value: Any) -> bool:
    home = str(getattr(value, "__module__", "")).partition(".")[0]
    return isinstance(value, FunctionType) and home not in LIBRARIES


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


def _size(value: Any) -> int:
    entries = value.values() if isinstance(value, dict) else value
    inner = (_size(v) if isinstance(v, CONTAINERS) else 1 for v in entries)
    return sum(inner) if len(value) <= MOST else len(value)
