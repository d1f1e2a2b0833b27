"""``len(x)``, ``int(x.shape[0])``, ``x[range(len(x))]`` in forward, of what depends on the batch.

Python insists on real numbers there, so a tensor subclass cannot intercept them; nor is ``type(x)``
a class of torch. A trace that was refused for this reason is tried again with copies of the model's
methods, and of the functions next to them, in which that builtin is replaced by the one defined
here. The user's own functions and modules are not changed. In the same way functions that leave
torch (:mod:`.opaque_calls`) become calls that are recorded, and numpy is replaced
(:mod:`.numpy_calls`), and ``min`` and ``max`` where the examples differ in which number is the
smaller one; where forward keeps numbers, so is :mod:`math` (:mod:`.kept_numbers`).
"""

from __future__ import annotations

import builtins
import copy
import math
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recast.rewriter.compiled.code_names import COPY_OF
from recast.rewriter.compiled.homes import copied, home_of, named
from recast.rewriter.compiled.object_contents import Absent

from . import kept_numbers, numpy_calls
from .frames import LIBRARIES
from .intercept import size
from .opaque_calls import applied, wrapper
from .values import Span, Value

if TYPE_CHECKING:
    from .tracer import Tracer


class ReplacedBuiltins:
    """The copies of one trace; ``sizes``: which of ``len``, ``int``, ``float``, ``range``,
    ``type`` are ours, and whether ``numpy`` is, ``min`` with ``max``, or what asks for the kind of
    a number: ``isinstance``, ``hasattr``, ``type`` and ``torch.is_tensor``.
    """

    def __init__(self, tracer: Tracer, sizes: frozenset[str], outside: frozenset[CodeType]) -> None:
        self.tracer = tracer
        self.outside = outside
        self.scopes: dict[int, dict[str, Any]] = {}
        self.filled: list[tuple[dict[str, Any], dict[str, Any]]] = []  # each with what it held
        self.copies: dict[int, tuple[FunctionType, FunctionType]] = {}

        def length(value: Any) -> Any:
            if _tensor(value):
                return size(tracer, value, 0)
            own = getattr(type(value), "__len__", None)  # of a batch: len(self.ids)
            if type(own) is FunctionType and _package(own.__module__) not in LIBRARIES:
                told = self.function(own, _package(own.__module__))(value)
                if isinstance(told, Value) and told.number:
                    return told
            return len(value)

        own = {"len": length, "int": _Int, "float": _Float, "range": _Range, "type": _Type}
        self.numpy = "numpy" in sizes
        self.math = "float" in sizes or bool(tracer.numbers)  # math.sqrt(x.size(0))
        self.kinds = "isinstance" in sizes or bool(tracer.numbers)
        named = sizes - {"numpy", "isinstance", "min"} | ({"type"} if self.kinds else set())
        if "range" in named:  # the same question to Python: it may have been a len() of an object
            named |= {"len"}
        self.builtins = {**vars(builtins), **{name: own[name] for name in named}}
        if self.kinds:
            self.builtins |= {"isinstance": _isinstance, "hasattr": _hasattr}
        if tracer.numbers or "min" in sizes:
            self.builtins |= kept_numbers.own_builtins(tracer)
        self.builtins["super"] = self.above

    def methods(self, kind: type) -> dict[str, Any]:
        """The methods that a subclass of ``kind`` has to define."""
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

    def above(self, *args: Any) -> Any:
        """``super``, which finds copies of methods, too."""
        if not args:
            caller = sys._getframe(1)
            names = caller.f_locals
            args = names["__class__"], names[caller.f_code.co_varnames[0]]
        return _Super(super(*args), self.function)

    def twin(self, value: Any) -> Any:
        """A copy of a user's object with a method that leaves torch, else None."""
        kind = type(value)
        if not self.outside or isinstance(value, (torch.Tensor, nn.Module)):
            return None
        made = applied(self.tracer, value, self.outside)
        if made is not None or isinstance(value, type):
            return made
        if type(value) is FunctionType:  # such as torch.vmap gives
            return wrapper(self.tracer, value) if value.__code__ in self.outside else None
        methods = (v for base in kind.__mro__ for v in vars(base).values())
        if not any(getattr(m, "__code__", None) in self.outside for m in methods):
            return None
        made = copy.copy(value)
        made.__class__ = type(kind.__name__, (kind,), self.methods(kind))
        return made

    def function(self, old: FunctionType, package: str) -> Any:
        """A copy of ``old`` that sees our definitions, or a function that records its call."""
        if old.__code__ in self.outside:
            return wrapper(self.tracer, old)
        if id(old) not in self.copies:
            scope, cells = self._scope(old.__globals__, package), old.__closure__ or ()
            # Those that hold functions, as a decorator's do, are filled below: one may be its own.
            own = [CellType() if _holds_function(cell, package) else cell for cell in cells]
            closure = tuple(own) if cells else None
            new = FunctionType(old.__code__, scope, old.__name__, old.__defaults__, closure)
            new.__kwdefaults__, new.__qualname__ = old.__kwdefaults__, old.__qualname__
            self.copies[id(old)] = old, new
            for cell, made in zip(cells, own, strict=True):
                if made is not cell:
                    made.cell_contents = self.function(cell.cell_contents, package)
                    setattr(made.cell_contents, COPY_OF, cell.cell_contents)
        return self.copies[id(old)][1]

    def _scope(self, names: dict[str, Any], package: str) -> dict[str, Any]:
        """A copy of the global names of a module of the same package."""
        if id(names) in self.scopes:
            return self.scopes[id(names)]
        scope = self.scopes[id(names)] = copied(names)
        scope["__builtins__"] = self.builtins
        for name, value in names.items():
            if type(value) is FunctionType and _package(value.__module__) == package:
                scope[name] = self.function(value, package)
            elif self.outside and name != "__builtins__":
                scope[name] = applied(self.tracer, value, self.outside) or value
            if self.math:
                scope[name] = kept_numbers.stand_in(self.tracer, value) or scope[name]
            if self.kinds and value is torch:
                scope[name] = numpy_calls.StandIn(torch, {"is_tensor": _is_tensor})
            if self.numpy:
                scope[name] = numpy_calls.stand_in(value) or scope[name]
        self.filled.append((scope, dict(scope)))
        return scope

    def rebound(self) -> Iterator[tuple[str, str]]:
        """The globals that forward set, in a copy: the name of each, and its module."""
        for scope, before in self.filled:
            for name in scope.keys() | before.keys():
                if scope.get(name, Absent) is not before.get(name, Absent):
                    yield name, named(home_of(scope))


class _Super:
    """What ``super()`` returns, with ``copied`` of the user's methods in their place."""

    def __init__(self, found: Any, copied: Callable[[FunctionType, str], Any]) -> None:
        object.__setattr__(self, "held", (found, copied))

    def __getattribute__(self, name: str) -> Any:  # every name: __setattr__ is above us, too
        found, copied = object.__getattribute__(self, "held")
        held = getattr(found, name)
        method = held.__func__ if type(held) is MethodType else held
        if type(method) is not FunctionType or _package(method.__module__) == "torch":
            return held
        made = copied(method, _package(method.__module__))
        return made if method is held else MethodType(made, held.__self__)


def _holds_function(cell: CellType, package: str) -> bool:
    """Whether ``cell`` holds a function of ``package``."""
    try:
        held = cell.cell_contents
    except ValueError:  # it is empty
        return False
    return type(held) is FunctionType and _package(held.__module__) == package


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _tensor(value: Any) -> bool:
    return isinstance(value, Value) and not value.number and value.dim() > 0


def _meant(value: Any) -> Any:
    """What a traced value is to forward: the number that it stands for, if it is one."""
    return value.pair[0] if isinstance(value, Value) and value.number else value


def _isinstance(value: Any, kinds: Any) -> bool:
    return isinstance(_meant(value), kinds)


def _hasattr(value: Any, name: str) -> bool:
    return hasattr(_meant(value), name)


def _is_tensor(value: Any) -> bool:
    return isinstance(_meant(value), torch.Tensor)


def _is_size(args: tuple[Any, ...]) -> bool:
    value = args[0] if len(args) == 1 else None
    return isinstance(value, Value) and value.number and type(value.pair[0]) is int


def _moves(value: Value) -> bool:
    """Whether it is a tensor of one whole number, which the example batches do not share, or of
    which at the same line another was not shared.
    """
    if not value.count or value.constant:
        return False
    with value.tracer.quiet():
        first, second = (int(v) for v in value.pair)
    return first != second or value.tracer.where() in value.tracer.int_lines


class _Kind(type):
    """The type of a stand-in for the class that it derives from, to ``isinstance`` as well."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__mro__[1])

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.__mro__[1])


class _Int(int, metaclass=_Kind):
    """An ``int`` that returns a batch-dependent size unchanged, and records ``int(counts[0])`` and
    ``int(n * 0.8)``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if len(args) == 1 else None
        if isinstance(value, Value) and _moves(value):
            return value.item()
        if isinstance(value, Value) and value.number and type(value.pair[0]) is float:
            return math.trunc(value)
        return value if _is_size(args) else int(*args, **kwargs)


class _Float(float, metaclass=_Kind):
    """A ``float`` that turns such a size into a number of the graph."""

    def __new__(cls, *args: Any) -> Any:
        value = args[0] if len(args) == 1 else None
        if isinstance(value, Value) and value.number and type(value.pair[0]) is float:
            return value
        return args[0] * 1.0 if _is_size(args) else float(*args)


class _OfRange(type):
    """The type of :class:`_Range`, for ``range`` has no subclasses."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, (range, Span))

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, (range, Span))


class _Range(metaclass=_OfRange):
    """A ``range`` that may be an index where such a size is among its ends."""

    def __new__(cls, *args: Any) -> Any:
        return Span(*args) if any(_is_size((one,)) for one in args) else range(*args)


class _Type(type, metaclass=_Kind):
    """A ``type`` that returns the class that a traced value stands for."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(value, Value):
            return type(*args, **kwargs)
        return type(value.pair[0])
