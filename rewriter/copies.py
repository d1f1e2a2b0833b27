"""Shallow copies of a module tree: own module objects and flags, the same tensors.

``state_dict()`` of a copy has the same keys, order and tensors, because every ``_parameters``,
``_buffers`` and ``_modules`` dict is copied entry by entry. Modules that are shared stay shared.
"""

from __future__ import annotations

import collections
import functools
import types
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

_SHARED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)  # cannot be taken apart


def shallow_copy(model: nn.Module) -> nn.Module:
    """A copy of the tree of ``model``; every Parameter and buffer is the same object as before."""
    return _Copier().module(model)


def modules_by_path(root: nn.Module) -> dict[str, nn.Module]:
    """Every module once, under the first path that reaches it, in the order of the tree."""
    return dict(root.named_modules())


def same_random_numbers() -> AbstractContextManager[None]:
    """What runs inside leaves the random number generators of all devices as they were."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if used else [])


class _Copier:
    """One copy; ``done`` maps what was met to what stands for it, so sharing and cycles survive."""

    def __init__(self) -> None:
        self.done: dict[int, Any] = {}

    def module(self, old: nn.Module) -> nn.Module:
        if id(old) in self.done:
            return self.done[id(old)]
        if isinstance(old, _SHARED):
            self.done[id(old)] = old
            return old
        new = old.__class__.__new__(old.__class__)
        self.done[id(old)] = new
        state = {key: self.value(value) for key, value in vars(old).items()}
        new.__dict__.update(state)
        return new

    def value(self, old: Any) -> Any:
        """Containers are copied because ``forward`` may write to them; all else is shared."""
        if isinstance(old, nn.Module):
            return self.module(old)
        if id(old) in self.done:
            return self.done[id(old)]
        if type(old) in (dict, collections.OrderedDict, collections.defaultdict):
            new = type(old)() if type(old) is not collections.defaultdict else old.copy()
            new.clear()
            self.done[id(old)] = new
            for key, value in old.items():
                new[key] = self.value(value)
            return new
        if type(old) is list:
            copied: list[Any] = []
            self.done[id(old)] = copied
            copied.extend(self.value(v) for v in old)
            return copied
        if type(old) in (set, collections.deque):
            return type(old)(self.value(v) for v in old)
        if type(old) is tuple:
            return tuple(self.value(v) for v in old)
        if isinstance(old, types.MethodType) and isinstance(old.__self__, nn.Module):
            return types.MethodType(old.__func__, self.module(old.__self__))
        if type(old) is functools.partial:
            args = (self.value(v) for v in old.args)
            return functools.partial(
                self.value(old.func), *args, **{k: self.value(v) for k, v in old.keywords.items()}
            )
        return old
