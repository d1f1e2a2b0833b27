"""Inputs and outputs as a flat list of tensors and a key that tells their structure.

Containers are tuples, lists, named tuples, mappings, and any other object that keeps tensors in its
``__dict__`` or ``__slots__`` (a dataclass, a batch class of some library): such an object is taken
apart by its attributes and put together again as a shallow copy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from .object_contents import attributes
from .value_checks import Never, NotComparable, Same, ValueCheck
from .visible_names import VisibleNames

Key = list[Any]  # structure and constants, in order of traversal


class Hole:
    """Stands for a tensor in the template of an output."""


_LEAF = (torch.Tensor, Hole)
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_NONE = type(None)
_NONES = {_NONE}
_CONSTANTS = {bool, int, float, str}
_ATOMS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)


def flatten(value: Any, leaves: list[Any], key: Key) -> None:
    """Append the tensors of ``value`` to ``leaves``, and everything else that identifies it to
    ``key``.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        key.append(torch.Tensor)
    elif kind is tuple or kind is list:
        key.append(kind)
        key.append(len(value))
        for item in value:
            flatten(item, leaves, key)
    elif kind in _ATOMS:
        key.append(kind)
        key.append(math.nan if kind is float and value != value else value)  # one equals itself
    elif isinstance(value, Mapping):
        key.append(kind)
        key.append(tuple(value))
        for item in value.values():
            flatten(item, leaves, key)
    elif isinstance(value, (tuple, list)):
        key.append(kind)
        key.append(len(value))
        for item in value:
            flatten(item, leaves, key)
    elif _opens(value):
        key.append(kind)
        held = _held(value)
        key.append(tuple(held))
        for item in held.values():
            flatten(item, leaves, key)
    else:
        key.append(kind)
        key.append(_Constant(value))


def signs(key: Key) -> list[tuple[int, str]]:
    """The positions of zeros in a key, with their signs, since keys with zeros of either sign are
    equal.
    """
    return [
        (k, repr(one)) for k, one in enumerate(key) if type(one) in (float, complex) and not one
    ]


# The form of arguments that are tensors, None or numbers and text that are as in the example, lists
# and tuples of only tensors or only None, and dicts of tensors. It has one entry per argument: None
# for a tensor, else the kind of the container and its length or keys, or of the constant and
# itself; NoneType instead of a kind if there is no tensor. False for other arguments.
Outline = list[tuple[Any, Any] | None] | Literal[False]


def outline(key: Key) -> Outline:
    """The outline of arguments whose key is ``key``."""
    found: list[tuple[Any, Any] | None] = []
    k = 0
    while k < len(key):
        kind = key[k]
        if kind is torch.Tensor:
            found.append(None)
            k += 1
            continue
        form = key[k + 1]
        if kind is _NONE:
            found.append((kind, None))
            k += 2
            continue
        if kind in _CONSTANTS and (kind is not float or form not in (0.0, math.nan)):
            found.append((kind, form))
            k += 2
            continue
        if kind not in (tuple, list, dict):
            return False
        items = form if kind is not dict else len(form)
        rest = key[k + 2 : k + 2 + 2 * items]
        if rest[:items] == [torch.Tensor] * items:
            found.append((kind, form))
            k += 2 + items
        elif kind is not dict and rest == [_NONE, None] * items:
            found.append((_NONE, (kind, form)))
            k += 2 + 2 * items
        else:
            return False
    return found


def outlined(form: Outline, values: tuple[Any, ...]) -> list[Any] | None:
    """What :func:`flatten` finds in ``values`` if they have this ``form``, in a third of the time.
    None if they do not, or if a tensor is of a subclass.
    """
    if form is False or len(form) != len(values):
        return None
    if not any(form):  # tensors alone
        return [*values] if _PLAIN.issuperset(map(type, values)) else None
    leaves: list[Any] = []
    for value, one in zip(values, form, strict=True):
        if one is None:
            leaves.append(value)
        elif one[0] is _NONE:
            if not _is_nothing(value, one[1]):
                return None
        elif type(value) is not one[0]:
            return None
        elif one[0] in _CONSTANTS:
            if value != one[1]:
                return None
        elif isinstance(value, dict):
            if tuple(value) != one[1]:
                return None
            leaves += value.values()
        elif len(value) != one[1]:
            return None
        else:
            leaves += value
    return leaves if _PLAIN.issuperset(map(type, leaves)) else None


def _is_nothing(value: Any, form: tuple[Any, int] | None) -> bool:
    """Whether ``value`` is None, or a container of Nones as ``form`` says."""
    if form is None:
        return value is None
    same = type(value) is form[0] and len(value) == form[1]
    return same and _NONES.issuperset(map(type, value))


def rebuild(value: Any, fn: Callable[[Any], Any], atom: Callable[[Any], Any] | None = None) -> Any:
    """``value`` with every tensor replaced by ``fn`` of it, in the order of :func:`flatten`."""
    again = lambda v: rebuild(v, fn, atom)  # noqa: E731
    kind = type(value)
    if isinstance(value, _LEAF):
        return fn(value)
    if kind in _ATOMS:
        return atom(value) if atom else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(kind, [again(v) for v in value])  # without checks of its contents
    if kind in (tuple, list):
        return kind(again(v) for v in value)
    if isinstance(value, tuple):  # torch.return_types and their like
        return kind([again(v) for v in value])
    if isinstance(value, dict) and kind in (dict,):
        return {k: again(v) for k, v in value.items()}
    if isinstance(value, (MutableMapping, list)):
        made = copy.copy(value)
        for k in list(value) if isinstance(value, MutableMapping) else range(len(value)):
            made[k] = again(value[k])
        return made
    if isinstance(value, Mapping):  # a property without a setter
        held: Any = {k: again(value[k]) for k in value}
        return kind(held)
    if _opens(value):
        made = copy.copy(value)
        for k, v in list(_held(value).items()):
            object.__setattr__(made, k, again(v))
        return made
    return value.copy() if kind.__module__ == "numpy" and hasattr(value, "copy") else value


def mapped(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor replaced by ``fn`` of it, in the containers that torch's own
    trees know and in objects that hold tensors. Those are copied, and arrays of numpy, since a
    batch may keep what one model computed from it or wrote to it, and would differ for the next.
    """

    return pytree.tree_map(lambda one: rebuild(one, fn), value)


def atoms(key: Key) -> list[int]:
    """The positions of the plain constants in a key, in the order in which :func:`rebuild` meets
    them.
    """
    places, at = [], 0
    while at < len(key):
        if key[at] in _ATOMS:
            places.append(at + 1)
        at += 1 if key[at] is torch.Tensor else 2
    return places


def members(value: Any) -> dict[str, Any] | None:
    """The contents of an object that torch's own trees treat as a leaf, by the text that reads
    them.

    ``{".ids": ...}`` of a batch class, ``{"['ids']": ...}`` of a mapping; None of a tensor, of a
    constant, and of an object without tensors.
    """
    if isinstance(value, _LEAF) or type(value) in _ATOMS:
        return None
    if isinstance(value, Mapping):
        return {f"[{k!r}]": v for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return {f"[{k}]": v for k, v in enumerate(value)}
    return {f".{k}": v for k, v in _held(value).items()} if _opens(value) else None


def alike(a: Any, b: Any) -> bool:
    """Whether two leaves without tensors have the same contents, whatever their ``==`` says."""
    if type(a) is not type(b):
        return False
    if type(a) in _ATOMS:
        return bool(a == b or (a != a and b != b))
    constant = _Constant(b)
    constant.freeze()
    return constant == _Constant(a)


def _held(value: Any) -> Mapping[str, Any]:
    """The attributes of an object, by name."""
    held = getattr(value, "__dict__", None)  # torch.compile can trace this, but not the other way
    if held is None and hasattr(type(value), "__slots__"):
        held = attributes(value)
    return held or {}


def _opens(value: Any) -> bool:
    """Whether an object of unknown class holds tensors in its attributes."""
    if callable(value) or isinstance(value, type):
        return False
    held = _held(value)
    return bool(held) and _holds(held, 0)


def _holds(value: Any, depth: int) -> bool:
    if isinstance(value, _LEAF):
        return True
    if depth > 4:
        return False
    if isinstance(value, Mapping):
        return any(_holds(v, depth + 1) for v in value.values())
    if isinstance(value, (tuple, list)):
        return any(_holds(v, depth + 1) for v in value)
    return False


class _Constant:
    """An input that is neither a tensor nor plain. Those of the example are frozen: the input of
    another call is the same if its contents are what that one's were then, even if that very object
    has changed since.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.check: ValueCheck | None = None  # once frozen

    def freeze(self) -> None:
        try:
            self.check = VisibleNames(frozenset(), every=True).check(self.value)
        except NotComparable:
            self.check = Never()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return NotImplemented
        frozen, now = (self, other.value) if other.check is None else (other, self.value)
        if frozen.check is None:
            return frozen.value is now or _says_equal(frozen.value, now)
        if frozen.check.same(now):
            return True
        bare = (
            isinstance(frozen.check, Same) and frozen.value is not now
        )  # nothing in it to compare
        if isinstance(now, (float, complex)):  # of numpy: its zeros of two signs are equal
            return False
        return bare and _says_equal(frozen.value, now)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.value)


def _says_equal(a: Any, b: Any) -> bool:
    """Whether two objects of one class, or two arrays of one shape, are equal by their ``==``."""
    if type(a) is not type(b) or getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    try:
        same: Any = a == b
        return bool(same.all() if hasattr(same, "all") else same)  # of an array: every entry
    except Exception:  # a class that cannot compare: treat as different
        return False


def freeze(key: Key) -> None:
    """Record the present contents of the objects in the key of an example."""
    for one in key:
        if isinstance(one, _Constant):
            one.freeze()
