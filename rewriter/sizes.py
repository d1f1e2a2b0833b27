"""``len(x)`` and ``int(x.shape[0])`` in forward, where the answer depends on the batch.

Python insists that both return a real int, so neither can be followed from inside a tensor. A trace
that was refused for that is tried again with copies of the methods of the model, and of the
functions beside them, to which ``len`` and ``int`` mean what is defined here. The user's own
functions and modules are not touched. In the same way functions that leave torch (:mod:`.outside`)
become calls that are recorded.
"""

from __future__ import annotations

import builtins
import copy
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .outside import wrapper
from .values import Value

if TYPE_CHECKING:
    from .tracer import Tracer


class Sizes:
    """The copies of one trace; ``sizes``: whether ``len`` and ``int`` are ours in them."""

    def __init__(self, tracer: Tracer, sizes: bool, outside: frozenset[CodeType]) -> None:
        self.tracer = tracer
        self.outside = outside
        self.scopes: dict[int, dict[str, Any]] = {}
        self.copies: dict[int, tuple[FunctionType, FunctionType]] = {}

        def length(value: Any) -> Any:
            return tracer._size(value, 0) if _tensor(value) else len(value)

        own = {"len": length, "int": _Int} if sizes else {}
        self.builtins = {**vars(builtins), **own}

    def methods(self, kind: type) -> dict[str, Any]:
        """What a subclass of ``kind`` has to define."""
        found: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            if base.__module__.startswith("torch."):
                continue
            for name, value in vars(base).items():
                if type(value) is FunctionType:
                    found[name] = self.function(value, _package(base.__module__))
                elif type(value) is staticmethod and type(value.__func__) is FunctionType:
                    plain = self.function(value.__func__, _package(base.__module__))
                    found[name] = staticmethod(plain)
        return found

    def twin(self, value: Any) -> Any:
        """A copy of an object of the user's with a method that leaves torch, else None."""
        kind = type(value)
        if not self.outside or isinstance(value, (torch.Tensor, nn.Module, type)):
            return None
        methods = (v for base in kind.__mro__ for v in vars(base).values())
        if not any(getattr(m, "__code__", None) in self.outside for m in methods):
            return None
        made = copy.copy(value)
        made.__class__ = type(kind.__name__, (kind,), self.methods(kind))
        return made

    def function(self, old: FunctionType, package: str) -> Any:
        """A copy of ``old`` that sees our ``len`` and ``int``, or a call of it that is recorded."""
        if old.__code__ in self.outside:
            return wrapper(self.tracer, old)
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
