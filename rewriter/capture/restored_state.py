"""Capture runs forward, and forward may write to parameters: max-norm, weights clamped or averaged
in place, ``weight.data = normalize(weight.data)``; or to globals: a list of losses, a counter.
Afterwards the model's tensors and these globals are as before.

A tensor is copied when the first operator that writes to it is about to run, so a model that writes
to none of its tables costs no memory.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recast.rewriter.compiled.code_names import codes_of, globals_in
from recast.rewriter.compiled.object_contents import CONTAINERS
from recast.rewriter.compiled.trees import flatten
from recast.rewriter.compiled.visible_names import MOST

from .storages import memory, unborn
from .values import Value


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
    """Restores, at the end, the values of the parameters of ``root`` and of the tensors that its
    modules keep as plain attributes, and the memory of the parameters. Not of buffers: they are
    copied wherever a forward runs.
    """
    kept = [
        value
        for module in root.modules()
        for name, value in (*vars(module).items(), *module._parameters.items())
        if isinstance(value, torch.Tensor) and not unborn(value)
    ]
    listed: list[Any] = []
    for module in root.modules():
        flatten([v for v in vars(module).values() if type(v) in (list, tuple, dict)], listed, [])
    data = [(p, p.detach()) for p in root.parameters() if not unborn(p)]
    places: dict[int, torch.UntypedStorage] = {}
    for tensor in (*kept, *listed):
        places |= memory(tensor)
    watch = CopiesBeforeWrites(places)
    try:
        with watch:
            yield
    finally:
        for at, copy in watch.copies.items():
            places[at].copy_(copy)
        for parameter, before in data:
            if [*memory(parameter)] != [*memory(before)] or parameter.shape != before.shape:
                parameter.data = before


@contextmanager
def restored_globals(root: nn.Module) -> Iterator[None]:
    """Restores, at the end, the numbers in containers and objects that the methods of ``root`` read
    by a global name, such as counters, and takes traced values out of them. What else forward puts
    there may be a cache, which a graph relies on.
    """
    found: dict[int, Any] = {}
    for code, home in codes_of(root).items():
        scope = getattr(sys.modules.get(home), "__dict__", {})
        found |= {id(v): v for name in globals_in(code) if (v := scope.get(name)) is not None}
    kinds = (torch.Tensor, nn.Module, ModuleType, *CONTAINERS)
    objects = (v for v in found.values() if not isinstance(v, kinds))
    held: list[Any] = [d for v in objects if type(d := getattr(v, "__dict__", None)) is dict]
    held += [v for v in found.values() if isinstance(v, (dict, list, deque)) and len(v) <= MOST]
    before: list[Any] = [dict(v) if isinstance(v, dict) else list(v) for v in held]
    try:
        yield
    finally:
        for now, old in zip(held, before, strict=True):
            if isinstance(now, dict):
                for key in [k for k, v in now.items() if v is not old.get(k) and _passes(v)]:
                    if key in old:
                        now[key] = old[key]
                    else:
                        del now[key]
            elif any(map(_passes, list(now)[len(old) :])):
                now.clear()
                now.extend(old)


def _passes(value: Any) -> bool:
    """Whether a value is of one call: a number, or a tensor of a trace."""
    return type(value) in (int, float) or isinstance(value, Value)
