"""What forward never reads of a batch: the id of a request, a time, names for a log, other keys.

A graph takes all constants and keys of its example for granted, and others in their place leave the
call to the plain forward. So the plain forward runs once more in either mode, on a batch that
notes what is read of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recast.rewriter.compiled.signature import Signature
from recast.rewriter.compiled.trees import members, rebuild
from recast.rewriter.compiled.unread import Unread

from .plain_model import live_copy

_ATOMS = (int, float, bool, str, bytes, complex, type(None))
_EVERY = None  # read: all there is


def unread(
    root: nn.Module, signature: Signature, batch: tuple[Any, ...], runs: tuple[Any, ...]
) -> tuple[Unread, ...]:
    """What ``root`` reads in neither mode of the dicts and objects among the ordered arguments of
    ``batch``. It runs on ``runs``, a batch like it.
    """
    constants = {k: _constants(value) for k, value in enumerate(batch)}
    held = {k for k, found in constants.items() if found or type(batch[k]) is dict}
    if not held:
        return ()
    seen: dict[int, set[Any]] = {k: set() for k in held}
    for training in (False, True):
        live = live_copy(root, training)
        given = [*rebuild(runs, lambda t: t.detach().clone())]
        try:
            for k in held:
                given[k] = _watched(given[k], seen[k].add)
            args, kwargs = signature.unbind(tuple(given))
            with torch.enable_grad():
                live.forward(*args, **kwargs)
        except Exception:  # or the class takes no watch: anything may be read
            return ()
    found = (_of(k, batch[k], constants[k], names) for k, names in seen.items())
    return tuple(one for one in found if one is not None)


def _of(position: int, value: Any, constants: dict[str, Any], names: set[Any]) -> Unread | None:
    """What of ``value`` is never read, if ``names`` are."""
    if _EVERY in names:
        return None
    left = {name: one for name, one in constants.items() if name not in names}
    if type(value) is dict:
        return Unread(position, left, tuple(value), frozenset(names - value.keys()))
    return Unread(position, left) if left else None


def _constants(value: Any) -> dict[str, Any]:
    """The entries of a dict, or attributes of an object that holds tensors, that are constants."""
    if type(value) is dict:
        held = value if all(type(k) is str for k in value) else {}
    elif isinstance(value, (tuple, list, dict)) or members(value) is None:
        held = {}
    else:
        held = {name.removeprefix("."): one for name, one in (members(value) or {}).items()}
    return {name: one for name, one in held.items() if _is_constant(one)}


def _is_constant(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_constant, value))
    return type(value) in _ATOMS


def _watched(value: Any, read: Callable[[Any], object]) -> Any:
    """A copy of ``value`` that calls ``read`` with each name that is read, or with _EVERY."""
    if type(value) is dict:
        return _WatchedDict(value, read)
    kind: Any = type(value)

    def __getattribute__(self: Any, name: str) -> Any:
        read(_EVERY if name == "__dict__" else name)
        return kind.__getattribute__(self, name)

    made = copy.copy(value)
    names = {"__slots__": (), "__getattribute__": __getattribute__, "__module__": kind.__module__}
    object.__setattr__(made, "__class__", type(kind.__name__, (kind,), names))
    return made


class _WatchedDict(dict[str, Any]):
    """Tells which keys are asked for; for whatever asks for more, all are."""

    def __init__(self, held: dict[str, Any], read: Callable[[Any], object]) -> None:
        super().__init__(held)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._read(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:  # without it, ** would read the entries unseen
        self._read(_EVERY)
        return super().__iter__()


def _reads_all(name: str) -> Any:
    method = getattr(dict, name)

    def reads(self: _WatchedDict, *args: Any, **kwargs: Any) -> Any:
        self._read(_EVERY)
        return method(self, *args, **kwargs)

    return reads


for _name in (
    "__delitem__", "__eq__", "__ior__", "__len__", "__ne__", "__or__", "__repr__", "__reversed__",
    "__ror__", "__setitem__", "clear", "copy", "items", "keys", "pop", "popitem", "setdefault",
    "update", "values",
):  # fmt: skip
    setattr(_WatchedDict, _name, _reads_all(_name))
