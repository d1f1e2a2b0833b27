"""``len(x)`` and ``int(x.shape[0])`` in forward, where the answer depends on the batch.

Python insists that both return a real int, so neither can be followed from inside a tensor. A trace
that was refused for that is tried again with copies of the methods of the model, and of the
functions beside them, to which ``len`` and ``int`` mean what is defined here. The user's own
functions and modules are not touched.
"""

from __future__ import annotations

import builtins
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .values import Value

if TYPE_CHECKING:
    from .tracer import Tracer


class Sizes:
    """The copies of one trace."""

    def __init__(self, tracer: Tracer) -> None:
        self.scopes: dict[int, dict[str, Any]] = {}
        self.copies: dict[int, tuple[FunctionType, FunctionType]] = {}

        def length(value: Any) -> Any:
            return tracer._size(value, 0) if _tensor(value) else len(value)

        self.builtins = {**vars(builtins), "len": length, "int": _Int}

    def methods(self, kind: type) -> dict[str, Any]:
        """What a subclass of ``kind`` has to define."""
        found: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            if base.__module__.startswith("torch."):
                continue
            own = {k: v for k, v in vars(base).items() if type(v) is FunctionType}
            found.update({k: self.function(v, _package(base.__module__)) for k, v in own.items()})
        return found

    def function(self, old: FunctionType, package: str) -> FunctionType:
        """A copy of ``old`` that sees our ``len`` and ``int``."""
        if id(old) not in self.copies:
            scope = self._scope(old.__globals__, package)
            new = FunctionType(old.__code__, scope, old.__name__, old.__defaults__, old.__closure__)
            new.__kwdefaults__, new.__qualname__ = old.__kwdefaults__, old.__qualname__
            self.copies[id(old)] = old, new
        return self.copies[id(old)][1]

    def _scope(self, names: dict[str, Any], package: str) -> dict[str, Any]:
        """A copy of the global names of a module of the same package."""
        if id(names) in self.scopes:
            return self.scopes[id(names)]
        scope = self.scopes[id(names)] = dict(names)
        scope["__builtins__"] = self.builtins
        for name, value in names.items():
            if type(value) is FunctionType and _package(value.__module__) == package:
                scope[name] = self.function(value, package)
        return scope


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _tensor(value: Any) -> bool:
    return isinstance(value, Value) and not value.number and value.dim() > 0


class _IntKind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, int)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, int)


class _Int(int, metaclass=_IntKind):
    """``int`` that leaves a size that depends on the batch as it is."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else None
        if isinstance(value, Value) and value.number and type(value.pair[0]) is int:
            return value
        return int(*args, **kwargs)
