"""Which objects the checks of Python values have found, so that a call need not look into them.

A configuration of a hundred objects takes a quarter of a millisecond to compare. Most of it is
settled if the very same objects hang together as before: entries of dicts and lists, attributes of
classes, code and defaults of functions. That takes a tenth of the time. Whatever changes, the
checks themselves decide.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any

import torch

from .entries import Entries as Places
from .external_state import Check, changed, slot, slots
from .object_contents import PLAIN, Absent, slots_of
from .value_checks import (
    EQUAL,
    Anything,
    Contents,
    Entries,
    Every,
    Fields,
    Function,
    Lacks,
    Method,
    ProcessLocal,
    Same,
    ValueCheck,
    defaults_of,
)

_DICTS = (dict, OrderedDict)
_SETTLED = (Same, Anything)  # by what holds the value: a check looks no further
_MOST_LACKED = 256  # names times classes
_NOTHING: dict[str, Any] = {}  # the attributes of an object without any of its own


class Settled:
    """The same answers as ``changed(checks)``, mostly without asking the checks."""

    def __init__(self, checks: Iterable[Check]) -> None:
        checks = tuple(checks)
        self._checks = tuple(c for c in checks if _holders(c))
        self._others = tuple(c for c in checks if not _holders(c))
        self._known: Snapshot | None = None
        self._failures = self._successes = 0

    def changed(self) -> str | None:
        """The first thing that has changed, in words, or None."""
        known = self._known  # another thread may take another one
        if known is not None and known.stands():
            self._successes += 1
        elif self._checks:
            why = changed(self._checks)
            if why is not None:
                return why
            self._take()
        return changed(self._others)

    def _take(self) -> None:
        """Take a snapshot, unless those before fell soon: it takes as long as some checks."""
        self._failures = 1 if self._successes > 16 else self._failures + 1
        self._successes, self._known = 0, None
        if self._failures & (self._failures - 1):
            return
        known = Snapshot(self._checks)
        if changed(self._checks) is None:  # nor while it was taken
            self._known = known


def _holders(check: Check) -> tuple[tuple[Any, str], ...]:
    """The dicts, or that of a class, in which a check looks for its value, and the name there; none
    if it does something else.
    """
    ask, of = check[:2]
    if ask is slot:
        module, name = of
        held = slots(module)
        if not all(type(one) in _DICTS for one in held):  # TorchScript's are no dicts
            return ()
        places = ("_parameters", "_buffers", "_modules")  # which may be replaced themselves
        return (*((one, name) for one in held), *((held[0], one) for one in places))
    home: Any = getattr(ask, "__self__", None)
    if type(home) not in (dict, MappingProxyType) or ask != home.get:
        return ()
    return ((home, of[0]),)


class Snapshot:
    """Everything that must be as it is for ``checks`` to give the answers that they give now."""

    def __init__(self, checks: Iterable[Check]) -> None:
        self._seen: dict[tuple[int, int], Any] = {}
        self._places: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._classes: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        self._objects: dict[int, Any] = {}
        self._orders: dict[type, tuple[type, ...]] = {}
        self._owners: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._rows: dict[int, list[tuple[Collection[Any], tuple[Any, ...]]]] = {}
        self._functions: dict[int, tuple[Any, Any, Any, Any]] = {}
        self._asked: list[tuple[ValueCheck, Any]] = []
        for one in checks:
            ask, of, check, _ = one
            value = ask(*of)
            for held, name in _holders(one):
                if isinstance(held, dict):
                    self._places[id(held), name] = held, name
                else:
                    self._classes[id(held), name] = held, name, value
            self._walk(check, value)
        self._known = Places(self._places.values())
        self._types = [*map(type, self._objects.values())]
        self._known.stand()

    def stands(self) -> bool:
        """Whether all that is as it was."""
        return (
            self._known.stand()
            and [*map(type, self._objects.values())] == self._types
            and all([one.__dict__ is held for one, held in self._owners.values()])
            and all([kind.__mro__ is bases for kind, bases in self._orders.items()])
            and all([of.get(name, Absent) is v for of, name, v in self._classes.values()])
            and all(
                [len(now) == len(known) and all(map(is_, now, known))
                 for rows in self._rows.values() for now, known in rows]
            )
            and all(
                [f.__code__ is code and f.__defaults__ is given and f.__kwdefaults__ is named
                 for f, code, given, named in self._functions.values()]
            )
            and all([check.same(value) for check, value in self._asked])
        )  # fmt: skip

    # ------------------------------------------------------------ taking one

    def _walk(self, check: ValueCheck, value: Any) -> None:
        """Note what ``check.same(value)`` depends on, beside the identity of ``value``."""
        if type(check) is ProcessLocal:
            return self._walk(check.check, value)
        if type(check) in _SETTLED or (id(check), id(value)) in self._seen:
            return None
        self._seen[id(check), id(value)] = check, value  # both stay alive, and so do their ids
        if not self._noted(check, value):
            self._asked.append((check, value))
        return None

    def _noted(self, check: ValueCheck, value: Any) -> bool:
        """Whether that can be noted; else the check is asked each time."""
        if isinstance(check, Entries):
            return self._entries(check, value)
        if isinstance(check, Contents):
            return self._contents(value)
        if isinstance(check, Fields):
            return self._fields(check, value)
        if isinstance(check, Lacks):
            return self._lacks(check, value)
        if isinstance(check, Every):
            for one in check.checks:
                self._walk(one, value)
            return True
        if isinstance(check, Method):
            self._walk(check.function, value.__func__)
            self._walk(check.owner, value.__self__)
            return True
        return isinstance(check, Function) and self._function(check)

    def _entries(self, check: Entries, value: Any) -> bool:
        if not self._row(value):
            return False
        inner = value.values() if isinstance(value, dict) else value
        # Not strict: another thread may write to it, which the checks then tell.
        for one, held in zip(check.checks, inner, strict=False):
            self._walk(one, held)
        return True

    def _row(self, value: Any) -> bool:
        """Note which objects are in a container; False if that cannot be told by looking."""
        if type(value) is list:
            self._rows[id(value)] = [(value, tuple(value))]
        elif type(value) in _DICTS:
            values = value.values()
            self._rows[id(value)] = [(value, tuple(value)), (values, tuple(values))]
        return type(value) in (list, *_DICTS) or isinstance(value, tuple)

    def _contents(self, value: Any) -> bool:
        """Note a container of plain values, and the containers in it."""
        if isinstance(value, (*PLAIN, *EQUAL, torch.Tensor)):
            return True
        if type(value) is frozenset:
            return all(map(self._contents, value))
        if not self._row(value):
            return False
        inner = (*value, *value.values()) if isinstance(value, dict) else value
        return all([self._contents(one) for one in inner])

    def _fields(self, check: Fields, value: Any) -> bool:
        held = self._held(value)
        if held is None:
            return False
        for name, inner in check.fields:
            found = self._under(held, name, value)
            for base in self._bases(value):
                if found is not Absent:
                    break
                found = self._under(base.__dict__, name, base)
            self._walk(inner, found)
        return True

    def _lacks(self, check: Lacks, value: Any) -> bool:
        bases = self._bases(type(value))
        held = self._held(value) if len(check.names) * len(bases) <= _MOST_LACKED else None
        if held is None:
            return False
        for name in check.names:
            self._under(held, name, value)
            for base in bases:
                self._under(base.__dict__, name, base)
        return True

    def _bases(self, value: Any) -> tuple[type, ...]:
        """A class, or that of an object, and those above it: noted."""
        kind = value if isinstance(value, type) else type(value)
        return self._orders.setdefault(kind, kind.__mro__)

    def _under(self, held: Mapping[Any, Any], name: str, owner: Any) -> Any:
        """What is under a name of ``owner``, or that nothing is: noted."""
        found = held.get(name, Absent)
        if type(held) is MappingProxyType:  # another one each time it is asked for
            self._classes[id(owner), name] = held, name, found
        elif held is not _NOTHING:
            self._places[id(held), name] = held, name  # type: ignore[assignment]
        return found

    def _held(self, value: Any) -> Mapping[Any, Any] | None:
        """The attributes of an object, where they lie in one dict for good; else None."""
        if isinstance(value, Mapping):
            return value if getattr(type(value), "get", None) is dict.get else None
        if isinstance(value, functools.partial) or slots_of(type(value)):
            return None
        self._objects[id(value)] = value
        held = getattr(value, "__dict__", _NOTHING)
        if isinstance(value, type) or held is _NOTHING:
            return held
        if type(held) is not dict or value.__dict__ is not held:
            return None
        self._owners[id(value)] = value, held
        return held

    def _function(self, check: Function) -> bool:
        inner: Any = check.inner
        if inner is None:
            return True
        given, named = defaults_of(inner)
        self._functions[id(inner)] = inner, inner.__code__, given, named
        if check.contents is not None:
            self._walk(check.contents, (given, named))
        if check.fields is not None:
            self._walk(check.fields, inner)
        return True
