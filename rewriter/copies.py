"""Shallow copies of a module tree: own module objects and flags, the same tensors.

``state_dict()`` of a copy has the same keys, order and tensors, because every ``_parameters``,
``_buffers`` and ``_modules`` dict is copied entry by entry. Modules that are shared stay shared.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def same_random_numbers(*generators: Any) -> Iterator[None]:
    """What runs inside leaves the random number generators of all devices as they were, those of
    Python and numpy too, and ``generators`` of theirs.
    """
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    python, numpy = random.getstate(), getattr(sys.modules.get("numpy"), "random", None)
    theirs = None if numpy is None else numpy.get_state()
    held = [(g, _state(g)) for g in generators]
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if used else []):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(theirs)
        for generator, (owner, state) in held:
            if isinstance(generator, random.Random):
                generator.setstate(state)
            elif owner is not None:
                owner.state = state


def generators_of(root: nn.Module) -> list[Any]:
    """The random number generators of Python and numpy that modules hold: copies share them."""
    values = (v for module in root.modules() for v in vars(module).values())
    return [v for v in values if isinstance(v, random.Random) or _state(v)[0] is not None]


def _state(generator: Any) -> tuple[Any, Any]:
    """The object that has the state of a generator, and a copy of it; none of anything else."""
    if isinstance(generator, random.Random):
        return None, generator.getstate()
    if not type(generator).__module__.startswith("numpy.random"):
        return None, None
    owner = getattr(generator, "bit_generator", None) or getattr(generator, "_bit_generator", None)
    return owner, None if owner is None else copy.deepcopy(owner.state)


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
