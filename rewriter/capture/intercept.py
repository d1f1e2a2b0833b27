"""Intercepts the torch calls of a traced forward: answers sizes, attributes; records the rest."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_packed_sequence
from torch.overrides import TorchFunctionMode

from . import frames
from .calls import GETTERS, METHODS, OPERATORS, SETTERS, SWAPPED
from .frames import by_torch
from .operands import argument
from .scratch import lifted
from .shapes import Shape
from .values import Value, make

if TYPE_CHECKING:
    from .tracer import Tracer

_PYTHON = ("__bool__", "__int__", "__float__", "__index__", "__len__", "__iter__")
_PADS = pad_packed_sequence.__code__
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_APPLY = torch.nn.Module._apply.__code__
_MADE_BEFORE = (
    "the layer in __init__",
    "model(*example) before optimize(): what the first call makes is then there",
)
_HISTORY = frozenset({"grad_fn", "is_leaf", "retains_grad", "_version", "output_nr"})


class Recorder(TorchFunctionMode):
    """Passes every torch call of this thread to a tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.tracer.running:
            return func(*args, **(kwargs or {}))
        return _call(self.tracer, func, tuple(args), dict(kwargs or {}))


def _call(
    tracer: Tracer, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if func is torch._C._set_grad_enabled or isinstance(func, type):
        return func(*args, **kwargs)
    if isinstance(func, _OPERATORS) and str(func).startswith("profiler."):  # a timeline's label
        return func(*args, **kwargs)
    if func is torch._C._nn._parse_to and args and isinstance(args[0], torch.device):
        # ``nn.BCELoss().to(x.device)``: the very device, which :mod:`.operands` knows as that of x
        return args[0], *func(*args, **kwargs)[1:]
    getter = GETTERS.get(func) if _wrapper(func) else None
    if getter is not None:
        return _attribute(tracer, args[0], getter)
    setter = SETTERS.get(func) if _wrapper(func) else None
    if setter is not None:
        if sys._getframe(2).f_code is _APPLY:
            tracer.refuse("makes a layer and moves it, as at its first call", tries=_MADE_BEFORE)
        tracer.refuse(f"assigns to .{setter} of a tensor")
    name = METHODS.get(id(func))
    if name is None:
        return tracer.record("call_function", func, args, kwargs)
    if name in OPERATORS:
        return tracer.record("call_function", OPERATORS[name], args, kwargs)
    if name in SWAPPED:
        return tracer.record("call_function", SWAPPED[name], (args[1], args[0]), kwargs)
    if name in _PYTHON:  # of a tensor that is not a Value: one from outside, never changing
        with torch._C.DisableTorchFunction():
            return getattr(torch.Tensor, name)(*args)
    if name == "size":
        return size(tracer, *args, **kwargs)
    if name == "new" and _are_sizes(args[1:]):  # to torch, traced ones are numbers to hold
        name = "new_empty"
    return tracer.record("call_method", name, args, kwargs)


def _are_sizes(args: tuple[Any, ...]) -> bool:
    """Whether ``x.new(*args)`` makes a tensor of that size, rather than of those numbers."""
    if len(args) == 1 and isinstance(args[0], torch.Size):
        return True
    return bool(args) and all(
        type(one) is int or (isinstance(one, Value) and one.number) for one in args
    )


def _wrapper(func: Any) -> bool:
    return type(func).__name__ == "method-wrapper"


def _attribute(tracer: Tracer, owner: Any, name: str) -> Any:
    """``owner.name``."""
    if not isinstance(owner, Value):
        owner = lifted(tracer, owner)
    if name == "shape":
        return size(tracer, owner)
    if name == "requires_grad" and owner.path is None:
        tracer.refuse("asks whether an inner tensor requires grad")
    if name in _HISTORY and owner.path is None and not by_torch():
        tracer.refuse(f"asks for .{name} of an inner tensor, which depends on its gradients")
    if name == "grad" and not owner.static and not by_torch():
        tracer.refuse("reads the gradient of a tensor")
    if name == "requires_grad":
        tracer.reading.grads[str(owner.path)] = bool(owner.pair[0].requires_grad)
    if name == "dtype":
        tracer.bake_dtypes([owner.node])
    if name == "ndim":
        tracer.ranks.add(owner.node)
    if name in ("dtype", "ndim"):
        tracer.asks_of_own((owner,), "dtype" if name == "dtype" else "shape")
    first = getattr(owner.pair[0], name)
    if isinstance(first, torch.device):
        node = tracer.node("call_function", getattr, (owner.node, name), {}, owner.pair)
        tracer.devices[id(first)] = (first, node)
        return first
    if isinstance(first, torch.Tensor):
        return tracer.record("call_function", getattr, (owner, name), {})
    second = getattr(owner.pair[1], name)
    if first is not second and first != second:
        tracer.refuse(f"reads .{name}, which differs between the example batches")
    return first


def size(tracer: Tracer, tensor: Any, dim: int | None = None) -> Any:
    """``tensor.shape`` or ``tensor.size(dim)``; sizes that depend on the batch are Values."""
    if not isinstance(tensor, Value):
        tensor = lifted(tracer, tensor)
    with tracer.quiet():  # a method of :mod:`.replaced_builtins` asks from outside the mode
        first, second = (v.size() for v in tensor.pair)
    if len(first) != len(second):
        tracer.refuse("the number of dimensions differs between the example batches")
    tracer.asks_of_own((tensor,), "shape")
    if dim is None:
        tracer.ranks.add(tensor.node)
    if tensor.path is None and not tensor.static:
        sizes = first if dim is None else (first[dim],)
        tracer.bake(tensor.node, sizes, most=_told_length())
    if first == second:
        return first if dim is None else first[dim]
    if dim is not None:
        if first[dim] == second[dim]:
            return first[dim]
        return _number(tracer, "call_method", "size", (tensor, dim), (first[dim], second[dim]))
    shape = tracer.node("call_function", getattr, (tensor.node, "shape"), {}, (None, None))
    return Shape(
        a if a == b else _number(tracer, "call_function", operator.getitem, (shape, k), (a, b))
        for k, (a, b) in enumerate(zip(first, second, strict=True))
    )


def _told_length() -> int | None:
    """The length to pad to, if ``pad_packed_sequence`` was told one: what it asks for, it compares
    with that alone.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frames.ours(frame):
        frame = frame.f_back
    told = frame.f_locals.get("total_length") if frame.f_code is _PADS else None
    return told if type(told) is int else None


def _number(tracer: Tracer, kind: str, target: Any, args: Any, pair: tuple[Any, Any]) -> Value:
    """The Value of a size, with its node."""
    node = tracer.node(kind, target, argument(tracer, args), {}, pair)
    return make(tracer, pair, static=False, node=node)
