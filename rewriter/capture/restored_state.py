"""Capture runs forward, and forward may write to parameters: max-norm, weights clamped or averaged
in place, ``weight.data = normalize(weight.data)``; to its own objects; or to globals: a list of
losses, a counter. Afterwards the model's tensors, its objects and these globals are as before.

A tensor is copied when the first operator that writes to it is about to run, so a model that writes
to none of its tables costs no memory.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recast.rewriter.compiled.baked_values import is_filled
from recast.rewriter.compiled.code_names import codes_of, globals_in
from recast.rewriter.compiled.copies import unregistered
from recast.rewriter.compiled.homes import scope_of
from recast.rewriter.compiled.object_contents import (
    ARRAY_BYTES,
    ARRAYS,
    CALLED,
    CONTAINERS,
    PLAIN,
    Absent,
    array_bytes,
    copied,
)
from recast.rewriter.compiled.trees import flatten
from recast.rewriter.compiled.value_checks import inner_function
from recast.rewriter.compiled.visible_names import MOST

from .constants import Constants
from .frames import LIBRARIES
from .storages import memory, unborn
from .values import Value

_NOT_THE_USERS = frozenset({*vars(nn.Module()), Constants.ATTRIBUTE})


class CopiesBeforeWrites(TorchDispatchMode):
    """Copies the tensors in ``held``, by address, before the first write to each."""

    supports_higher_order_operators = True  # such as torch.cond, which have no schema

    @classmethod
    def is_infra_mode(cls) -> bool:
        """So that ``torch.compile`` inside forward compiles as ever."""
        return True

    def __init__(self, held: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self.held = held
        self.copies: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for k, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(args[k] if k < len(args) else (kwargs or {}).get(argument.name))
        return func(*args, **(kwargs or {}))

    def _keep(self, written: Any) -> None:
        leaves: list[Any] = []
        flatten(written, leaves, [])
        with torch._C.DisableTorchFunction():  # nobody else's business
            for at in (at for tensor in leaves for at in memory(tensor)):
                if at in self.held and at not in self.copies:
                    self.copies[at] = self.held[at].clone()


@contextmanager
def restored_tensors(root: nn.Module) -> Iterator[None]:
    """Restores, at the end, the values and the memory of the parameters of ``root`` and of the
    tensors that its modules keep as plain attributes, in containers and in objects; of modules that
    are kept so too. Not of buffers: they are copied wherever a forward runs.
    """
    kept = [
        value
        for value in (*root.parameters(), *_held(root, deep=3), *_parameters_beside(root))
        if isinstance(value, torch.Tensor) and not unborn(value)
    ]
    data = [(t, t.detach()) for t in kept if type(t) is torch.Tensor or isinstance(t, nn.Parameter)]
    places: dict[int, torch.UntypedStorage] = {}
    for tensor in kept:
        places |= memory(tensor)
    watch = CopiesBeforeWrites(places)
    # Copied at once: batch normalization writes to its statistics, and its schema does not say so.
    hidden = [b for m in unregistered(root).values() for b in m._buffers.values() if b is not None]
    statistics = [(buffer, buffer.detach().clone()) for buffer in hidden]
    try:
        with watch:
            yield
    finally:
        for buffer, values in statistics:
            buffer.detach().copy_(values)
        for at, copy in watch.copies.items():
            places[at].copy_(copy)
        for tensor, before in data:
            if [*memory(tensor)] != [*memory(before)] or tensor.shape != before.shape:
                tensor.data = before


@contextmanager
def restored_objects(root: nn.Module) -> Iterator[None]:
    """Restores, at the end, the attributes of the objects that the modules keep, also in
    containers, and what they hold: arrays; of lists and dicts, which may be caches, what
    :func:`restored_globals` does. Containers of a module itself are copied with it, objects are
    shared. Not restored: iterators, which cannot go back, and objects within objects, which may be
    those of a trainer at work.
    """
    objects = [d for value in _held(root) if (d := _attributes(value)) is not None]
    objects += map(vars, unregistered(root).values())
    inside = {id(value) for attributes in objects for value in attributes.values()}
    held = _held(root, deep=1)
    arrays: list[Any] = [a for a in held if isinstance(a, ARRAYS) and array_bytes(a) <= ARRAY_BYTES]
    before = [dict(attributes) for attributes in objects], [copy.copy(a) for a in arrays]
    restore = _numbers_in([v for v in held if id(v) in inside])
    try:
        yield
    finally:
        for attributes, old in zip(objects, before[0], strict=True):
            for name in [k for k in attributes if k not in old]:
                del attributes[name]
            attributes.update({k: v for k, v in old.items() if attributes.get(k, Absent) is not v})
        for array, values in zip(arrays, before[1], strict=True):
            if copied(array) != copied(values):  # else it may be one that cannot be written to
                array[... if isinstance(array, numpy.ndarray) else slice(None)] = values
        restore()


def _held(root: nn.Module, deep: int = 0) -> list[Any]:
    """What the modules keep, and what is in it: in containers, and in objects, down to as many
    objects within each other as ``deep``.
    """
    found: dict[int, Any] = {}
    left = [
        (v, deep) for m in root.modules() for k, v in vars(m).items() if k not in _NOT_THE_USERS
    ]
    while left and len(found) < MOST:
        value, more = left.pop()
        if id(value) in found or type(value) in PLAIN:
            continue
        found[id(value)] = value
        held: Iterable[Any] = ()
        if isinstance(value, CONTAINERS):
            held = value.values() if isinstance(value, dict) else value
            held = held if len(value) <= MOST else ()
        elif more and (attributes := _attributes(value)) is not None:
            held, more = attributes.values(), more - 1
        left += [(v, more) for v in held]
    return [*found.values()]


def _parameters_beside(root: nn.Module) -> list[nn.Parameter]:
    """The parameters of modules in plain containers."""
    held = (p for m in unregistered(root).values() for p in m._parameters.values())
    return [p for p in held if p is not None]


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that is no tensor, module, function or container."""
    if isinstance(value, (torch.Tensor, nn.Module, *CALLED, *CONTAINERS)):
        return None
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None


@contextmanager
def restored_globals(root: nn.Module) -> Iterator[None]:
    """Restores, at the end, the numbers in containers and objects that the methods of ``root``, and
    functions that they name, read by a global name or hold as variables around them, such as
    counters, and takes traced values out of them. What else forward puts there may be a cache,
    which a graph relies on.
    """
    found = _named(root)
    kinds = (torch.Tensor, nn.Module, ModuleType, *CONTAINERS)
    objects = (v for v in found.values() if not isinstance(v, kinds))
    held: list[Any] = [d for v in objects if type(d := getattr(v, "__dict__", None)) is dict]
    restore = _numbers_in([*held, *found.values()])
    try:
        yield
    finally:
        restore()


def _named(root: nn.Module) -> dict[int, Any]:
    """By id, what the methods of ``root`` read by a global name; and of the user's functions among
    that, and of those that modules keep, what these read so, or hold as variables around them.
    """
    found: dict[int, Any] = {}
    left: list[Any] = [
        scope.get(name)
        for code, home in codes_of(root).items()
        if (scope := scope_of(home)) is not None
        for name in globals_in(code)
    ]
    left += [v for m in root.modules() for v in vars(m).values() if isinstance(v, FunctionType)]
    while left and len(found) < MOST:
        value = left.pop()
        if value is None or id(value) in found:
            continue
        found[id(value)] = value
        inner = inner_function(value) if isinstance(value, CALLED) else None
        if inner is not None and str(inner.__module__).partition(".")[0] not in LIBRARIES:
            left += [inner.__globals__.get(name) for name in globals_in(inner.__code__)]
            left += [c.cell_contents for c in inner.__closure__ or () if is_filled(c)]
    return found


def _numbers_in(values: Iterable[Any]) -> Callable[[], None]:
    """A function that restores the numbers in those of ``values`` that are lists and dicts, and
    takes traced values out of them.
    """
    held = [v for v in values if isinstance(v, (dict, list, deque)) and len(v) <= MOST]
    before: list[Any] = [dict(v) if isinstance(v, dict) else list(v) for v in held]

    def restore() -> None:
        for now, old in zip(held, before, strict=True):
            if isinstance(now, dict):
                for key in [k for k, v in now.items() if v is not old.get(k) and _passes(v)]:
                    if key in old:
                        now[key] = old[key]
                    else:
                        del now[key]
            elif any(_passes(v) for k, v in enumerate(now) if k >= len(old) or v is not old[k]):
                now.clear()
                now.extend(old)

    return restore


def _passes(value: Any) -> bool:
    """Whether a value is of one call: a number, or a tensor of a trace."""
    return type(value) in (int, float) or isinstance(value, Value)
