"""What Python and libraries ask of a class rather than of an object: the parameters of ``forward``
(``inspect.signature``, by which trainers choose the columns of a batch), ``len(model)``,
``model[0]``, a ``__call__`` of the user's own, and what the user's class has instead of methods of
``nn.Module``: a ``train`` that keeps some layers frozen, a ``compile`` that takes an optimizer.

So the result of ``optimize`` is of a subclass made for the user's class. Its ``forward`` is the
very code of the base: a call costs nothing more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from recast.rewriter.compiled.signature import class_forward

_PROTOCOL = (
    "__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__",
    "__contains__", "__bool__",
)  # fmt: skip
# Methods of nn.Module, which the result has too, and which the user may have overridden.
INHERITED = frozenset(
    name for name, value in vars(nn.Module).items()
    if isinstance(value, FunctionType) and not name.startswith("_") and name != "forward"
)  # fmt: skip
_MOVES = frozenset({
    "bfloat16", "cpu", "cuda", "double", "float", "half", "ipu", "mtia", "share_memory", "to",
    "to_empty", "type", "xpu",
})  # fmt: skip
_MADE: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def result_class(base: type, root: nn.Module) -> type:
    """The subclass of ``base`` for the class of ``root``; one of its own where ``forward`` was set
    on the object.
    """
    kind = type(root)
    own = vars(root).get("forward")
    if isinstance(getattr(own, "__self__", None), base):
        own = None  # ours, which took over
    if own is not None:
        return _made(base, kind, own)
    if kind not in _MADE:
        _MADE[kind] = _made(base, kind, class_forward(root))
    return _MADE[kind]


def _made(base: type, kind: type, forward: Callable[..., Any]) -> type:
    names: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
    shown = _shown(vars(base)["forward"], forward)
    if shown is not None:
        names["forward"] = shown
    names |= {name: _delegate(name) for name in _PROTOCOL if hasattr(kind, name)}
    for name in sorted(INHERITED):
        if name not in vars(base) and getattr(kind, name) is not vars(nn.Module)[name]:
            names[name] = _overridden(name)
    if _calls_itself(kind):
        names["__call__"] = _call
    return type(base.__name__, (base,), names)


def _shown(plain: FunctionType, forward: Callable[..., Any]) -> Any:
    """The function ``plain``, which says that it takes what the user's ``forward`` does."""
    try:
        taken = inspect.signature(forward)
    except (TypeError, ValueError):  # of no Python function
        return None
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    named = [itself, *taken.parameters.values()]
    if any(p.name == "self" for p in named[1:]):
        return None
    made = FunctionType(plain.__code__, plain.__globals__, plain.__name__, None, plain.__closure__)
    made.__qualname__, made.__module__ = plain.__qualname__, plain.__module__
    made.__doc__ = getattr(forward, "__doc__", None)
    vars(made)["__signature__"] = taken.replace(parameters=named)
    return made


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(type(self._root), name)(self._root, *args)

    method.__name__ = name
    return method


def _overridden(name: str) -> Callable[..., Any]:
    """The method ``name`` of the user's class, on the user's module; one that returns the module
    itself returns the result. What it moves is moved by ours, which knows what graphs read.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        root = self._root
        if name not in _MOVES or "_apply" in vars(root):  # set by another of these methods
            found = getattr(root, name)(*args, **kwargs)
            return self if found is root else found
        vars(root)["_apply"] = self._apply
        try:
            found = getattr(root, name)(*args, **kwargs)
        finally:
            del vars(root)["_apply"]
        return self if found is root else found

    method.__name__ = name
    return method


def _calls_itself(kind: type) -> bool:
    """Whether the user's class has a ``__call__`` of its own."""
    owner = next(k for k in kind.__mro__ if "__call__" in vars(k))
    return owner is not nn.Module and not vars(owner)["__call__"].__module__.startswith("torch.")


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The user's own ``__call__``, which finds our forward where its own was."""
    if "forward" not in vars(self._root):
        self.take_over()
    return type(self._root).__call__(self._root, *args, **kwargs)
