"""What ``forward`` leaves behind in the model: either every call does the same, or capture refuses.

An attribute that is set to a traced value becomes a further output of the graph, which each call
stores; so does an entry of a dict that forward writes to and never reads, as
``self.losses["aux"] = loss``. A buffer that is written in place is written by the graph itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recast.rewriter.compiled import code_names
from recast.rewriter.compiled.copies import modules_by_path
from recast.rewriter.compiled.object_contents import ARRAYS, CONTAINERS, PLAIN, copied, untouched
from recast.rewriter.compiled.trees import flatten

from .frames import line_of_write
from .kept_numbers import NUMBERS
from .operands import literal
from .python_reads import PythonReads
from .refused import Refused, refusal
from .values import Value

_SLOTS = {
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks",
    "_backward_hooks", "_backward_pre_hooks",
}  # fmt: skip
_KEPT = {"_parameters": "parameter", "_modules": "submodule"}  # what forward may not replace
_ABSENT = object()

State = dict[str, dict[str, Any]]  # of every module, by path: its attributes


@dataclass(frozen=True)
class _Before:
    """An attribute before forward, and its contents."""

    value: Any
    inside: Any


def state(scratch: nn.Module) -> State:
    """The attributes of all modules, to see what forward changes."""
    kept: State = {}
    for path, module in modules_by_path(scratch).items():
        held = {k: v for k, v in vars(module).items() if k not in _SLOTS}
        kept[path] = {k: _Before(v, copied(_inside(v))) for k, v in held.items()}
        kept[path]["_buffers"] = dict(module._buffers)
        kept[path] |= {slots: dict(getattr(module, slots)) for slots in _KEPT}
    return kept


def _inside(value: Any) -> Any:
    """What is in a container, an array or an object with attributes; None of anything else."""
    if isinstance(value, (*CONTAINERS, *ARRAYS)):
        return value
    held = getattr(value, "__dict__", None)
    opaque = isinstance(value, (torch.Tensor, nn.Module)) or callable(value)
    return None if opaque or not isinstance(held, dict) else held


def attribute_writes(
    scratch: nn.Module,
    reading: PythonReads,
    before: State,
    kept: Callable[[str, str], bool],
    layers: Collection[str],
) -> tuple[dict[str, Any], list[tuple[str, str, Any]], dict[tuple[str, Any], Any]]:
    """Attributes that have a new traced value after forward; those with a plain constant that
    forward wrote without reading the old value; and the entries that it set, by (attribute, key).
    Refuses other lasting changes, and what only the first call makes, unless that is a constant and
    ``kept(path, name)``: later calls leave it; and what is set in ``layers``, which run as they are
    and would read the old value.
    """
    stores: dict[str, Any] = {}
    left: list[tuple[str, str, Any]] = []
    entries: dict[tuple[str, Any], Any] = {}
    for (path, name), value in reading.cached.items():
        if not _constant(value):
            raise _first_call(f"what {name}() keeps", name, reading, path)
    for path, module in modules_by_path(scratch).items():
        old = before.get(path)
        if old is None:
            raise refusal("forward adds a submodule", None, path)
        for slots, kind in _KEPT.items():
            _check_kept(getattr(module, slots), old[slots], kind, reading, path)
        for write in _writes(module, path, old, reading):
            if write.entries is not None and path not in layers:
                at = f"{path}.{write.name}" if path else write.name
                entries.update({(at, key): one for key, one in write.entries.items()})
                continue
            _check_write(write, module, reading, kept, layers)
            if write.traced:
                stores[f"{path}.{write.name}" if path else write.name] = write.value
            elif _blind(reading, write):
                reading.plain.pop((path, write.name), None)
                left.append((path, write.name, write.value))
            elif not _equal(write.value, write.was):
                refused = _kept_number(write, reading)
                if type(write.was) not in NUMBERS or type(write.value) not in NUMBERS:
                    refused.number = ""
                raise refused
    return stores, left, entries


@dataclass(frozen=True)
class _Write:
    """An attribute, or a buffer, that is another object after forward. ``was``: _ABSENT if there
    was none. ``traced``: traced values are in it. ``registered``: it has become a buffer.
    ``entries``: those that forward has set in a dict, which is the same; None of all else.
    """

    path: str
    name: str
    value: Any
    was: Any
    traced: bool
    registered: bool
    entries: dict[Any, Any] | None = None


def _writes(
    module: nn.Module, path: str, old: dict[str, Any], reading: PythonReads
) -> Iterator[_Write]:
    """What forward wrote to a module. Refuses changes inside of what is the same object."""
    now = {k: v for k, v in vars(module).items() if k not in _SLOTS}
    now.update(module._buffers)
    for name, value in now.items():
        was = old.get(name, old["_buffers"].get(name, _ABSENT))
        inside = None
        if isinstance(was, _Before):
            was, inside = was.value, was.inside
        if value is not was:
            leaves: list[Any] = []
            flatten(value, leaves, [])
            registered = name in module._buffers and name not in old["_buffers"]
            yield _Write(path, name, value, was, bool(leaves), registered)
        elif inside is not None and not _untouched(reading, path, name, inside, value):
            entries = _entries_set(reading, path, name, value, inside)
            if entries is not None:
                yield _Write(path, name, value, was, True, False, entries)
                continue
            why = f"forward changes what is in self.{name}, a {type(value).__name__}"
            raise refusal(why, line_of_write(reading.codes, name), path)


def _entries_set(
    reading: PythonReads, path: str, name: str, value: Any, before: Any
) -> dict[Any, Any] | None:
    """The entries that forward has set in the dict ``value``, if it does nothing else with it and
    all are traced: a tensor or a number each.
    """
    if type(value) is not dict or path in reading.listed:
        return None
    if not all(code_names.only_sets_entries(code, name) for code in reading.codes):
        return None
    new = {k: v for k, v in value.items() if k not in before or before[k] is not v}
    gone = before.keys() - value.keys()
    plain = all(isinstance(k, (str, int)) and isinstance(v, Value) for k, v in new.items())
    return new if plain and not gone else None


def _check_write(
    write: _Write,
    module: nn.Module,
    reading: PythonReads,
    kept: Callable[[str, str], bool],
    layers: Collection[str],
) -> None:
    """Refuse what only the first call writes, and a write over a value that is read."""
    path, name, was = write.path, write.name, write.was
    if path in layers and name != "forward":
        why = f"forward sets {path}.{name}, which the layer reads"
        raise refusal(why, line_of_write(reading.codes, name), path.rpartition(".")[0])
    first = write.traced and _asked_first(reading, write, module)
    if write.registered or (first and not (_constant(write.value) and kept(path, name))):
        raise _first_call(f"self.{name}", name, reading, path)
    if not write.traced:
        return
    held = isinstance(was, CONTAINERS) and reading.taken.get((path, name)) is was
    if held and not _constant(write.value):
        why = f"forward reads self.{name}, a {type(was).__name__}, and sets another"
        raise refusal(why, line_of_write(reading.codes, name), path)
    if type(was) in NUMBERS and (path, name) in reading.plain:
        raise _kept_number(write, reading)


def _check_kept(
    now: dict[str, Any], before: dict[str, Any], kind: str, reading: PythonReads, path: str
) -> None:
    """Refuse a forward that puts another module or parameter, or none, in the place of one."""
    for name in {**before, **now}:
        if now.get(name, _ABSENT) is not before.get(name, _ABSENT):
            why = f"forward replaces the {kind} self.{name}"
            raise refusal(why, line_of_write(reading.codes, name), path)


def _asked_first(reading: PythonReads, write: _Write, module: nn.Module) -> bool:
    """Whether forward may have asked for an attribute before it set it, when there was none."""
    if write.was is not _ABSENT and write.was is not None:
        return False
    if (write.path, write.name) in reading.unset or write.path in reading.listed:
        return True
    if not type(module).__module__.startswith("torch.nn"):
        return False
    # What is read from torch's layers is not watched: only which names the code reads is known.
    return any(
        write.name in code_names.looked_for(code)
        or any(write.name == read for _, read in code_names.attributes_in(code))
        for code in reading.codes
    )


def _constant(value: Any) -> bool:
    """Whether all tensors in ``value`` are the same at every call."""
    leaves: list[Any] = []
    flatten(value, leaves, [])
    return all(isinstance(one, Value) and one.constant for one in leaves)


def _first_call(what: str, name: str, reading: PythonReads, path: str) -> Refused:
    """The refusal for what forward makes once: a graph would make it at each call."""
    why = f"forward makes {what} at its first call"
    refused = refusal(why, line_of_write(reading.codes, name), path)
    refused.tries = (
        "model(*example) before optimize(): what the first call makes is then there",
        f"{name} made in __init__",
        *refused.tries[-1:],
    )
    return refused


def _kept_number(write: _Write, reading: PythonReads) -> Refused:
    """The refusal for what forward changes, on the assumption that it is a number."""
    path, name = write.path, write.name
    why = f"forward changes self.{name}, which a graph would not do at each call"
    refused = refusal(why, line_of_write(reading.codes, name), path)
    refused.number = f"{path}.{name}" if path else name
    return refused


def _untouched(reading: PythonReads, path: str, name: str, before: Any, value: Any) -> bool:
    """Whether forward left a container, an array, or attributes of an object that it can name,
    unchanged. An array that forward does not read was written by a function that runs at each call.
    """
    now = _inside(value)
    arrays = (path, name) in reading.taken
    if now is value:
        return untouched(now, before, arrays)
    names = frozenset().union(*map(code_names.names_in, reading.codes))
    now, before = ({k: v for k, v in held.items() if k in names} for held in (now, before))
    return untouched(now, before, arrays)


def _blind(reading: PythonReads, write: _Write) -> bool:
    """Whether every call writes the same value to this attribute, whatever it was before."""
    path, name, value, was = write.path, write.name, write.value, write.was
    if was is _ABSENT:
        read = (path, name) in reading.absent or (path, name) in reading.inherited
        return not read and literal(value)
    read = reading.plain.get((path, name), _ABSENT)
    known = type(value) in PLAIN and type(was) in PLAIN
    if path in reading.listed and _names_dict(reading):
        return False  # it may have been read there
    return known and not _equal(value, was) and (read is _ABSENT or not _equal(read, was))


def _names_dict(reading: PythonReads) -> bool:
    """Whether the user's code names ``__dict__``, as ``cached_property`` does too."""
    codes = (code for code, home in reading.codes.items() if home != functools.__name__)
    return any("__dict__" in code_names.names_in(code) for code in codes)


def _equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False
