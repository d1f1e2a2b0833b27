"""Loops of Python over the steps of packed sequences: ``for n in batch_sizes``.

A trace unrolls the loop, as often as the longest sequence of the example has steps. A pass may make
one call of all steps again, and then their number does not matter: if Python could not tell the
steps apart. So a loop is remembered if each step but the first found all that Python could see as
the step before had found it, but for traced values of the same form that the loop itself made, and
asked no value. Then all further steps do the same.
"""

from __future__ import annotations

import dis
import inspect
import sys
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from recast.rewriter.ir import note
from recast.rewriter.order import draws

from .dynamic_sizes import dynamic_sizes

if TYPE_CHECKING:
    from .values import Value

_OTHER_FRAMES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_COMPREHENSIONS = frozenset({"LIST_APPEND", "SET_ADD", "MAP_ADD"})  # hold what they make themselves
_GLOBALS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, torch.Size)
_FIXED = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, BuiltinFunctionType, ModuleType,
    type, type(Ellipsis),
)  # fmt: skip


def counts_steps(node: fx.Node) -> bool:
    """Whether ``node`` is the ``batch_sizes`` of packed sequences."""
    made = node.args[0] if len(node.args) == 2 and node.args[1] == 1 else None
    return isinstance(made, fx.Node) and made.target is torch._VF._pack_padded_sequence


class Steps:
    """Iterates over ``value``, and remembers the loop when it has ended. ``frame``: whose it is."""

    def __init__(self, value: Value, frame: FrameType) -> None:
        self.tracer, self.node = value.tracer, value.node
        self.before = set(self.tracer.graph.nodes)
        self.tracer.iterated = self
        try:
            count = len(value)
        finally:
            self.tracer.iterated = None
        self.left = [value[k] for k in reversed(range(count))]
        self.frame = frame if _operation(frame) == "GET_ITER" and _plain_loop(frame) else None
        self.asked = len(self.tracer.guards)
        self.begun = False
        self.seen: dict[str, Any] | None = None  # by the last step

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Value:
        frame = self.frame
        if frame is not None and self.begun:
            self._compare(frame)
        if self.left:
            self.begun = True
            return self.left.pop()
        if self.frame is not None and self.seen is not None and self._asks_nothing():
            new = [n for n in self.tracer.graph.nodes if n not in self.before]
            lines = {note(n).where for n in new if n.op != "get_attr"}
            if None not in lines and not any(draws(n, self.tracer.root) for n in new):
                self.tracer.step_loops[self] = frozenset(line for line in lines if line)
        self.frame, self.seen = None, None
        raise StopIteration

    def _compare(self, frame: FrameType) -> None:
        """Give up the loop if the last step left anything else behind than the step before."""
        if sys._getframe(2) is not frame or _operation(frame) != "FOR_ITER":
            self.frame = None
            return
        try:
            with self.tracer.quiet():
                held = {k: self._state(v) for k, v in frame.f_locals.items()}
        except _Unknown:
            self.frame = None
            return
        if self.seen is not None and held != self.seen:
            self.frame = None
        self.seen = held

    def _asks_nothing(self) -> bool:
        stores = any(
            i.opname in _GLOBALS for c in self.tracer.reading.codes for i in dis.get_instructions(c)
        )
        return not stores and len(self.tracer.guards) == self.asked

    def _state(self, value: Any, depth: int = 0) -> Any:
        """What Python could tell ``value`` by, to compare; raises for objects of other classes."""
        from .values import Value

        kind = type(value)
        if isinstance(value, Value):
            if value.path is not None:
                return kind, value.path
            if value.static and isinstance(value.pair[0], torch.Tensor):
                return _Same(value), value.pair[0]._version  # written in place as it is traced
            new = value.node not in self.before
            return kind, None if new else value.node, self._form(value)
        if kind in _PLAIN:
            return kind, value
        if depth > _DEEP:
            raise _Unknown
        if isinstance(value, torch.Tensor):
            return _Same(value), value._version, tuple(value.shape)
        if isinstance(value, _FIXED) or (isinstance(value, nn.Module) and depth):
            return _Same(value)
        if isinstance(value, nn.Module):
            return [_Same(value), *(self._attributes(m, depth) for m in value.modules())]
        if isinstance(value, FunctionType):
            inner = [value.__defaults__, value.__kwdefaults__, value.__dict__]
            inner += inspect.getclosurevars(value).nonlocals.values()
            return [value.__code__, *(self._state(v, depth + 1) for v in inner)]
        if isinstance(value, MethodType):
            return [self._state(v, depth) for v in (value.__self__, value.__func__)]
        if kind is slice:
            inner = [value.start, value.stop, value.step]
        elif kind is dict:
            inner = [*value.keys(), *value.values()]
        elif kind in (list, set, frozenset) or isinstance(value, tuple):
            inner = list(value)
        else:
            raise _Unknown
        own = None if isinstance(value, (tuple, slice)) else _Same(value)
        return [kind, own, *(self._state(v, depth + 1) for v in inner)]

    def _attributes(self, module: nn.Module, depth: int) -> Any:
        """What a module holds; capture refuses changes within what it holds."""
        found = []
        for name, value in object.__getattribute__(module, "__dict__").items():
            if not isinstance(value, (*_PLAIN, list, tuple, dict, set)):
                found.append((name, _Same(value)))
                continue
            try:
                found.append((name, self._state(value, depth + 1)))
            except _Unknown:
                found.append((name, _Same(value)))
        return found

    def _form(self, value: Value) -> Any:
        """All of a traced value that Python sees without asking: of sizes those that stand fast."""
        first, second = value.pair
        if not isinstance(first, torch.Tensor):
            return type(first), len(first) if isinstance(first, (tuple, list)) else None
        moving = dynamic_sizes(self.tracer, value.node).sizes
        pairs = zip(first.shape, second.shape, strict=False)
        shape = [p if p[0] == p[1] and p not in moving else None for p in pairs]
        told = first.dtype, first.device, first.requires_grad, first.is_contiguous()
        return first.dim(), shape, told


_DEEP = 4  # containers in containers


class _Unknown(Exception):
    """Nothing is known of a class: its objects may count."""


class _Same:
    """Equal if it is of the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _operation(frame: FrameType) -> str:
    """What ``frame`` is about to do, in the words of Python's bytecode."""
    known = dis.get_instructions(frame.f_code)
    return next((i.opname for i in known if i.offset == frame.f_lasti), "")


def _plain_loop(frame: FrameType) -> bool:
    """Whether a loop of ``frame`` keeps all that it makes in variables."""
    code: CodeType = frame.f_code
    if code.co_flags & _OTHER_FRAMES or code.co_name.startswith("<"):
        return False
    return not any(i.opname in _COMPREHENSIONS for i in dis.get_instructions(code))


__all__ = ["Steps", "counts_steps"]
