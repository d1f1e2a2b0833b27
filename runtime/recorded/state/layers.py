"""What torch's layers have besides parameters: a dropout rate, an epsilon, a replaced forward.

A recording bakes them in, and so does a graph that calls the layers. Layers that a graph has fused,
and tables, are checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import is_
from typing import Any

from torch import nn
from torch.nn.modules import module as _module

from recast.runtime.recorded.batches.batch import key_of
from recast.runtime.recorded.state.same import same_values, values_of

_ASKED_APART = {"_modules", "_parameters", "_buffers", "training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_FIXED = (bool, int, float, str, tuple, type(None))
_OF_ALL = frozenset(vars(nn.Module()))  # what every module has


def layers_of(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The ``vars`` of torch's own layers among ``modules``, except tables."""
    found = [
        m for m in modules
        if type(m).__module__.startswith("torch.nn.modules.") and type(m) not in _TABLES
    ]  # fmt: skip
    return list(map(vars, found))


class LayerSettings:
    """The values of fixed types in ``layers``, the ``vars`` of modules, when this is made; of those
    in ``also``, all values: tensors and objects by identity, lists and dicts by their entries.
    """

    __slots__ = ("_found",)

    def __init__(
        self, layers: Iterable[dict[str, Any]], also: Iterable[dict[str, Any]] = ()
    ) -> None:
        self._found = [
            x for held in layers for k, v in held.items()
            if (k not in _ASKED_APART and type(v) in _FIXED) or k == "forward" for x in (k, v)
        ]  # fmt: skip
        self._found += [
            x for held in also for k, v in held.items() if k not in _OF_ALL for x in (k, _key(v))
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerSettings) or len(self._found) != len(other._found):
            return False
        pairs = zip(self._found, other._found, strict=True)
        return all(map(is_, self._found, other._found)) or all(
            a is b or (type(a) is type(b) and a == b) for a, b in pairs
        )

    def __hash__(self) -> int:
        try:
            return hash((*self._found,))
        except TypeError:  # a tuple that contains a list
            return len(self._found)


def _key(value: Any) -> Hashable:
    inner = _inside(value)
    return key_of(value) if inner is None else (type(value), *map(key_of, inner))


def _inside(value: Any) -> list[Any] | None:
    """The entries of a container, which may be written to; None of anything else."""
    if type(value) in (list, tuple):
        return [*value]
    return [*value, *value.values()] if type(value) is dict else None


class CachedLayerSettings:
    """The settings of modules, checked at every call: the same object as long as each setting is
    the same object.

    also: returns modules of the user's own that are to be treated like torch's layers.
    """

    def __init__(self, also: Callable[[], Iterable[nn.Module]] | None = None) -> None:
        self._also = also
        self._modules: Sequence[nn.Module] | None = None
        self._vars: list[dict[str, Any]] = []
        self._inside: list[tuple[Any, list[Any]]] = []  # containers in them, and their entries
        self._known: list[object] = []
        self._settings = LayerSettings(())

    def of(self, modules: Sequence[nn.Module]) -> LayerSettings:
        """The settings of ``modules``, a list that must not be changed."""
        if modules is not self._modules or not self._unchanged():
            also = [] if self._also is None else list(map(vars, self._also()))
            layers = layers_of(modules)
            self._modules, self._vars = modules, [*layers, *also]
            self._known, self._settings = values_of(self._vars), LayerSettings(layers, also)
            own = [v for held in also for k, v in held.items() if k not in _OF_ALL]
            self._inside = [(v, inner) for v in own if (inner := _inside(v)) is not None]
        return self._settings

    @property
    def dicts(self) -> list[dict[str, Any]]:
        """Those that hold the settings."""
        return self._vars

    def holds_inside(self) -> bool:
        """Whether containers among the settings have the same entries: the rest of the check when
        :attr:`dicts` were not written to.
        """
        return not self._inside or all(
            len(now := _inside(v) or []) == len(known) and all(map(is_, now, known))
            for v, known in self._inside
        )

    def _unchanged(self) -> bool:
        return same_values(self._vars, self._known) and self.holds_inside()


def hooks_of(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """The dicts that hold the hooks of ``modules``, and the global module hooks."""
    found = [held for m in modules for name in _HOOKS if (held := vars(m).get(name)) is not None]
    own = [getattr(_module, f"_global{name}", None) for name in _HOOKS]
    return [held for held in (*found, *own) if isinstance(held, dict)]


def why_not_hooked(hooks: list[dict[int, Any]], whose: str = "a module") -> str | None:
    """Why nothing is recorded with these ``hooks``, or None; those with which torch computes
    weights are allowed.
    """
    for hook in values_of(hooks):
        kind = type(hook) if getattr(hook, "__module__", None) is None else hook
        if not str(kind.__module__).startswith("torch."):
            return f"{whose} has hooks, which a replay would not call"
    return None
