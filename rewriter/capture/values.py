"""What ``forward`` sees while it is traced: tensors that remember the graph node they stand for.

A :class:`Value` is a real ``torch.Tensor`` (so ``isinstance`` and torch's argument parsers accept
it) that carries the values for two example batches of different size. Numbers that depend on the
batch, such as ``x.size(0)``, are 0-dim Values: torch takes them wherever it takes an int. If Python
control flow asks a Value, it gets an answer when both examples agree, and the question is recorded
as a guard that is asked again at each call.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx
from torch.overrides import handle_torch_function

from .frames import by_torch
from .shown import asked_by_model, may_show, shows
from .step_loops import Steps, counts_steps
from .storages import memory

if TYPE_CHECKING:
    from .tracer import Tracer

_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
    "lshift", "rshift",
)  # fmt: skip
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("neg", "pos", "abs", "invert")


class Value(torch.Tensor):
    """A tensor or a number of the traced program.

    ``pair`` holds its value in both examples. ``static`` says that it depends on no input and no
    parameter. ``path`` is set for what the model holds (its node is made at first use).
    """

    tracer: Tracer
    pair: tuple[Any, Any]
    static: bool
    path: str | None
    made: fx.Node | None

    @property
    def node(self) -> fx.Node:
        """Its node; for a parameter, buffer or attribute it is made on first use."""
        if self.made is None:
            assert self.path is not None
            self.made = self.tracer.held_node(self)
        return self.made

    def known(self, convert: Callable[[Any], Any], what: str) -> Any:
        """``convert(value)``, if it is the same in both examples; else capture refuses."""
        with self.tracer.quiet():
            first, second = (convert(v) for v in self.pair)
        if not self.constant and may_show() and shows():
            return first
        if first != second:
            self.tracer.refuse_value(self, what, first, second)
        if not self.constant:
            self.tracer.guard(self, convert, first)
        return first

    @property
    def constant(self) -> bool:
        """Whether it is the same at every call: static, and nothing else was written to it."""
        if not self.static or self.number or not self.tracer.mixed:
            return self.static
        with self.tracer.quiet():
            return not memory(self.pair[0]).keys() & self.tracer.mixed

    @property
    def number(self) -> bool:
        """Whether it stands for a Python number rather than a tensor."""
        return not isinstance(self.pair[0], torch.Tensor)

    @property
    def count(self) -> bool:
        """Whether it stands for a tensor of one whole number."""
        first = self.pair[0]
        if not isinstance(first, torch.Tensor):
            return False
        return first.dim() == 0 and first.dtype in (torch.int32, torch.int64)

    def __bool__(self) -> bool:
        return bool(self.known(bool, "bool()"))

    def __int__(self) -> int:
        return int(self.known(int, "int()"))

    def __float__(self) -> float:
        return float(self.known(float, "float()"))

    def __index__(self) -> int:
        return int(self.known(operator.index, "an index or range()"))

    def __len__(self) -> int:
        with self.tracer.quiet():
            first, second = (len(v) for v in self.pair)
        if may_show() and shows():
            return first
        if first != second:
            self.tracer.refuse_value(self, "len() or a loop", first, second)
        self.tracer.asks_of_own((self,), "shape")
        self.tracer.bake(self.node, (first,))
        return first

    def __iter__(self) -> Iterator[Any]:
        if counts_steps(self.node):
            return Steps(self, sys._getframe(1))
        return iter([self[k] for k in range(len(self))])

    def __contains__(self, item: Any) -> bool:
        return bool((self == item).any())

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other) if self.number else NotImplemented

    def __round__(self, digits: int | None = None) -> Any:
        return self._rounded(round, *(() if digits is None else (digits,)))

    def __floor__(self) -> Any:
        return self._rounded(math.floor)

    def __ceil__(self) -> Any:
        return self._rounded(math.ceil)

    def __trunc__(self) -> Any:
        return self._rounded(math.trunc)

    def _rounded(self, function: Callable[..., Any], *digits: int) -> Any:
        """A number of the graph for one that depends on the batch: ``math.floor(n * 0.8)``."""
        if self.number:
            return self.tracer.record("call_function", function, (self, *digits), {})
        return function(float(self), *digits)

    def __hash__(self) -> int:
        if self.number:  # libraries that cache by shape then take their uncached way
            raise TypeError("a size that depends on the batch is not hashable")
        return id(self)

    def __getitem__(self, key: Any) -> Any:
        return handle_torch_function(operator.getitem, (self,), self, _key(self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        write: Callable[..., Any] = operator.setitem
        handle_torch_function(write, (self,), self, _key(self, key), value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return self._text(repr)

    def __str__(self) -> str:
        return self._text(str)

    def __format__(self, spec: str) -> str:
        return self._text(lambda value: format(value, spec))

    def _text(self, made: Callable[[Any], str]) -> str:
        """The text of the first example, where it is only shown, or of a constant."""
        if self.tracer.running or by_torch():
            return self._name()
        if self.constant or shows():
            with self.tracer.quiet():
                return made(self.pair[0])
        if self.number or asked_by_model():
            kind = "number" if self.number else "tensor"
            self.tracer.refuse(f"puts a {kind} that depends on the batch into a text")
        return self._name()

    def _name(self) -> str:
        return f"<traced {self.made or self.path}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a traced value cannot be pickled")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} met a value of a trace that has ended: forward"
            " keeps a tensor outside the model, or another thread works on it"
        )


class Span:
    """``range(n)`` of a number that depends on the batch.

    As an index of a tensor it is ``torch.arange(n)``. All else that Python does with a range takes
    real numbers, so capture refuses.
    """

    __slots__ = ("ends",)

    def __init__(self, *ends: Any) -> None:
        self.ends = ends

    def __getattr__(self, name: str) -> Any:
        if not hasattr(range, name):  # torch asks in C++, which cannot pass a refusal on
            raise AttributeError(name)
        return getattr(range(*self.ends), name)

    def __len__(self) -> int:
        return len(range(*self.ends))

    def __iter__(self) -> Iterator[int]:
        return iter(range(*self.ends))

    def __getitem__(self, key: Any) -> Any:
        return range(*self.ends)[key]

    def __contains__(self, item: Any) -> bool:
        return item in range(*self.ends)

    def __eq__(self, other: object) -> bool:
        return range(*self.ends) == other

    def __hash__(self) -> int:
        return hash(range(*self.ends))


class Repeated:
    """``[entry] * times``, of a number and a size that depends on the batch.

    ``torch.tensor`` makes ``torch.full`` of it (:mod:`.numpy_calls`). All else that Python does
    with a list takes real entries, so capture refuses.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, entry: Any, times: Value) -> None:
        self.entry = entry
        self.times = times

    @staticmethod
    def of(entries: Any, times: Value) -> Repeated | None:
        """The list times a size; None if one of the two is another thing."""
        if type(entries) is not list or len(entries) != 1 or not times.number:
            return None
        whole = type(entries[0]) in (int, float, bool) and type(times.pair[0]) is int
        return Repeated(entries[0], times) if whole else None

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance(x, list) asks
        return list

    def _refuse(self, *_: Any) -> NoReturn:
        first, second = self.times.pair
        self.times.tracer.refuse(
            f"repeats a list {first} times for one example batch and {second} times for the other",
            size="numpy", tries=("torch.full((n,), value) in place of torch.tensor([value] * n)",),
        )  # fmt: skip

    __len__ = __iter__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = _refuse
    __eq__ = __repr__ = _refuse
    __add__ = __radd__ = __iadd__ = __mul__ = __rmul__ = __imul__ = _refuse
    append = extend = insert = pop = count = index = copy = sort = reverse = _refuse


def _key(value: Value, key: Any) -> Any:
    """``key`` with a tensor for each :class:`Span`."""
    if isinstance(key, tuple):
        return tuple(_key(value, one) for one in key)
    if not isinstance(key, Span) or len(key.ends) > 2:
        return key
    start, stop = key.ends if len(key.ends) == 2 else (0, *key.ends)
    return counted(start, stop, value.device)


def counted(start: Any, stop: Any, device: torch.device | None = None) -> Any:
    """The tensor of the numbers of ``range(start, stop)``, which may be empty."""
    return torch.arange(start, torch.sym_max(start, stop), device=device)


def _operators() -> None:
    """Give Value Python's operators, recorded as ``operator.add`` and so on."""

    def plain(target: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Value, *others: Any) -> Any:
            if target is operator.mul and (repeated := Repeated.of(others[0], self)) is not None:
                return repeated
            return handle_torch_function(target, (self,), self, *others)

        return method

    def swapped(target: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Value, other: Any) -> Any:
            if target is operator.mul and (repeated := Repeated.of(other, self)) is not None:
                return repeated
            return handle_torch_function(target, (self,), other, self)

        return method

    def compared(target: Callable[..., Any], absent: bool) -> Callable[..., Any]:
        def method(self: Value, other: Any) -> Any:
            if other is None or isinstance(other, str):
                return absent
            return handle_torch_function(target, (self,), self, other)

        return method

    for name in _BINARY:
        target = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        setattr(Value, f"__{name}__", plain(target))
        setattr(Value, f"__r{name}__", swapped(target))
        if hasattr(torch.Tensor, f"__i{name}__"):  # x @= w is x = x @ w to torch
            setattr(Value, f"__i{name}__", plain(getattr(operator, f"i{name}")))
    for name in _UNARY:
        setattr(Value, f"__{name}__", plain(getattr(operator, name)))
    for name in _COMPARE:
        setattr(Value, f"__{name}__", compared(getattr(operator, name), name == "ne"))


_operators()


def make(
    tracer: Tracer,
    pair: tuple[Any, Any],
    *,
    static: bool,
    node: fx.Node | None = None,
    path: str | None = None,
) -> Value:
    """Make a Value; the underlying tensor has the shape and dtype of the first example."""
    first = pair[0]
    base = first.detach() if isinstance(first, torch.Tensor) else torch.tensor(first)
    value: Value = torch.Tensor._make_subclass(Value, base)
    value.tracer, value.pair, value.static = tracer, pair, static
    value.made, value.path = node, path
    if isinstance(first, torch.nn.Parameter):
        value._is_param = True  # what isinstance(v, nn.Parameter) asks
    return value


class Flag:
    """``module.training`` while it is traced: a ``get_attr`` node for torch, a branch for Python.

    As an argument it stays symbolic. When Python tests it (``if self.training``), it answers for
    the mode of this trace, and each mode then gets a graph of its own.
    """

    __slots__ = ("path", "tracer")

    def __init__(self, tracer: Tracer, path: str) -> None:
        self.tracer = tracer
        self.path = path

    def __bool__(self) -> bool:
        self.tracer.forks.add(self.path)
        return self.tracer.training

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __int__(self) -> int:
        return int(bool(self))

    def __float__(self) -> float:
        return float(bool(self))

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __mul__(self, other: Any) -> Any:
        return bool(self) * other

    def __add__(self, other: Any) -> Any:
        return bool(self) + other

    def __sub__(self, other: Any) -> Any:
        return bool(self) - other

    def __rsub__(self, other: Any) -> Any:
        return other - bool(self)

    __rand__, __ror__, __rmul__, __radd__ = __and__, __or__, __mul__, __add__
    __index__ = __int__

    def __repr__(self) -> str:
        if self.tracer.running or by_torch() or not asked_by_model():
            return f"<{self.path}.training>"
        return repr(self.tracer.training if shows() else bool(self))
