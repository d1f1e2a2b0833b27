"""Shallow copies of a module tree: own module objects and flags, the same tensors.

``state_dict()`` of a copy has the same keys, order and tensors, because every ``_parameters``,
``_buffers`` and ``_modules`` dict is copied entry by entry. Shared modules stay shared. A linked
copy uses the same dicts of parameters and buffers: what is replaced in one, for example by
``load_state_dict(assign=True)`` or ``.double()``, is replaced in the other.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_SHARED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)  # cannot be taken apart
_TENSORS = ("_parameters", "_buffers", "_non_persistent_buffers_set")
# Most values in modules have one of these types, which are shared; checked first, for speed.
_ATOMS = frozenset({type(None), bool, int, float, str, torch.Tensor, nn.Parameter})
_DICTS = frozenset({dict, collections.OrderedDict})


def shallow_copy(model: nn.Module, *, linked: bool = False) -> nn.Module:
    """A copy of the tree of ``model`` with the same Parameter and buffer objects. ``linked``: they
    stay the same, even when they are replaced in either of the two.
    """
    return _Copier(_TENSORS if linked else ()).module(model)


def modules_by_path(root: nn.Module) -> dict[str, nn.Module]:
    """Every module once, under the first path that reaches it, in the order of the tree."""
    return dict(root.named_modules())


def unregistered(root: nn.Module) -> dict[str, nn.Module]:
    """The modules that are no submodules of ``root``, but kept in plain lists, tuples and dicts: as
    a teacher may be. By the path of what holds them, with a number.
    """
    known = {id(module) for module in root.modules()}
    found: dict[str, nn.Module] = {}
    for path, module in modules_by_path(root).items():
        for name, value in vars(module).items():
            if name in _OWN or type(value) not in (list, tuple, dict):
                continue
            left = [value]
            for held in left:
                if type(held) in (list, tuple, dict) and len(held) <= _MOST:
                    left += held.values() if type(held) is dict else held
                for inner in held.modules() if isinstance(held, nn.Module) else ():
                    if id(inner) not in known:
                        known.add(id(inner))
                        label = f"{path}.{name}" if path else name
                        found[f"{label}, {len(found)}"] = inner
    return found


_OWN = frozenset(vars(nn.Module()))
_MOST = 1024  # entries of a container that are looked at


@contextmanager
def same_random_numbers(*generators: Any) -> Iterator[None]:
    """Restores, at the end, the random number generators of all devices, of Python and of numpy,
    and ``generators``.
    """
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    back = beside_torch(generators)
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if used else []):
            yield
    finally:
        for restore in back:
            restore()


def beside_torch(generators: Iterable[Any]) -> list[Callable[[], object]]:
    """A function that restores the generators of Python and numpy, and ``generators``, to their
    present state.
    """
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    back: list[Callable[[], object]] = [functools.partial(random.setstate, random.getstate())]
    if numpy is not None:
        back.append(functools.partial(numpy.set_state, numpy.get_state()))
    return back + [restore for g in generators if (restore := _restorer(g)) is not None]


def seed_all(number: int) -> None:
    """``torch.manual_seed`` for the generators in use. Without a GPU, torch's own notes the stack
    for each kind of GPU that might be started later, which is slow.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def generators_of(root: nn.Module) -> list[Any]:
    """The random number generators of Python, numpy and torch that modules hold: copies share
    them.
    """
    others = _ATOMS | _DICTS
    values = (v for module in root.modules() for v in vars(module).values())
    return [v for v in values if type(v) not in others and _restorer(v) is not None]


def _restorer(generator: Any) -> Callable[[], object] | None:
    """A function that restores a generator to its present state; None for anything else."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if not type(generator).__module__.startswith("numpy.random"):
        return None
    owner = getattr(generator, "bit_generator", None) or getattr(generator, "_bit_generator", None)
    if owner is None:
        return None
    return functools.partial(setattr, owner, "state", copy.deepcopy(owner.state))


class _Copier:
    """One copy; ``done`` maps what was met to its copy, so that sharing and cycles survive."""

    def __init__(self, kept: tuple[str, ...]) -> None:
        self.done: dict[int, Any] = {}
        self.kept = kept  # attributes of modules that are not copied

    def module(self, old: nn.Module) -> nn.Module:
        if id(old) in self.done:
            return self.done[id(old)]
        if isinstance(old, _SHARED):
            self.done[id(old)] = old
            return old
        new = object.__new__(old.__class__)  # a GraphModule's own makes a class of it
        self.done[id(old)] = new
        new.__dict__.update({
            key: value if type(value) in _ATOMS or key in self.kept else self.value(value)
            for key, value in vars(old).items()
        })  # fmt: skip
        return new

    def value(self, old: Any) -> Any:
        """Containers are copied, because ``forward`` may write to them; all else is shared."""
        kind = type(old)
        if kind in _ATOMS:
            return old
        if id(old) in self.done:
            return self.done[id(old)]
        if kind in _DICTS or kind is collections.defaultdict:
            new = kind() if kind in _DICTS else kind(old.default_factory)
            self.done[id(old)] = new
            for key, value in old.items():
                new[key] = value if type(value) in _ATOMS else self.value(value)
            return new
        if isinstance(old, nn.Module):
            return self.module(old)
        if kind is list:
            copied: list[Any] = []
            self.done[id(old)] = copied
            copied.extend(self.value(v) for v in old)
            return copied
        if kind is set:
            return {self.value(v) for v in old}
        if kind is collections.deque:
            return collections.deque(map(self.value, old), old.maxlen)
        if kind is tuple:
            return tuple(self.value(v) for v in old)
        if isinstance(old, types.MethodType) and isinstance(old.__self__, nn.Module):
            return types.MethodType(old.__func__, self.module(old.__self__))
        if kind is functools.partial:
            args = (self.value(v) for v in old.args)
            return functools.partial(
                self.value(old.func), *args, **{k: self.value(v) for k, v in old.keywords.items()}
            )
        return old
