"""What layers of torch have besides parameters: a rate of dropout, an epsilon, another forward.

A recording repeats what they were, and so does a graph that calls them; what a graph has in their
place is asked about elsewhere, as are tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

from torch import nn
from torch.nn.modules import module as _module

from recast.runtime.recorded.state.same import values, values_of

_ASKED_APART = {"_modules", "_parameters", "_buffers", "training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_FIXED = (bool, int, float, str, tuple, type(None))


def layers_of(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The ``vars`` of torch's own layers among ``modules``, but for tables."""
    return [
        vars(m) for m in modules
        if type(m).__module__.startswith("torch.nn.modules.") and type(m) not in _TABLES
    ]  # fmt: skip


class LayerSettings:
    """Of ``modules``, as they are when this is made. One that is written to is as it is."""

    __slots__ = ("_found",)

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._found = [
            x for held in layers_of(modules) for k, v in held.items()
            if (k not in _ASKED_APART and type(v) in _FIXED) or k == "forward" for x in (k, v)
        ]  # fmt: skip

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerSettings) or len(self._found) != len(other._found):
            return False
        pairs = zip(self._found, other._found, strict=True)
        return all(map(is_, self._found, other._found)) or all(
            a is b or (type(a) is type(b) and a == b) for a, b in pairs
        )

    def __hash__(self) -> int:
        return len(self._found)


class Layers:
    """The settings of modules, asked again at every call: the very same while each setting is the
    object that it was.
    """

    def __init__(self) -> None:
        self._modules: Sequence[nn.Module] | None = None
        self._vars: list[dict[str, Any]] = []
        self._known: list[object] = []
        self._settings = LayerSettings(())

    def of(self, modules: Sequence[nn.Module]) -> LayerSettings:
        """Those of ``modules``, a list that nobody changes."""
        if modules is not self._modules or not values(self._vars, self._known):
            self._modules, self._vars = modules, layers_of(modules)
            self._known, self._settings = values_of(self._vars), LayerSettings(modules)
        return self._settings


def hooks_of(modules: Sequence[nn.Module]) -> list[dict[int, Any]]:
    """Where hooks of all but the first of ``modules`` are kept; those of the first are called
    around what is recorded.
    """
    found = [
        held for m in modules[1:] for name in _HOOKS if (held := vars(m).get(name)) is not None
    ]
    own = [getattr(_module, f"_global{name}", None) for name in _HOOKS]
    return [held for held in (*found, *own) if isinstance(held, dict)]


def why_not_hooked(hooks: list[dict[int, Any]]) -> str | None:
    """Why nothing is recorded under ``hooks``, or None: those that torch uses to compute weights
    may be.
    """
    for hook in values_of(hooks):
        kind = type(hook) if getattr(hook, "__module__", None) is None else hook
        if not str(kind.__module__).startswith("torch."):
            return "a module has hooks, which a replay would not call"
    return None
