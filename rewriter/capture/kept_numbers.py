"""Numbers that ``forward`` keeps in the model from call to call, as ``self.steps += 1`` does, and
those that are said to be set between calls.

A graph reads such an attribute anew at each call and stores the next number. A trace meets it as a
:class:`.values.Value` with the numbers that two calls in a row leave: what the first call alone
finds decides nothing, and a question about a counter has to come out the same for both.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from recast.rewriter.compiled.copies import generators_of, same_random_numbers
from recast.rewriter.compiled.external_state import slot
from recast.rewriter.compiled.signature import Signature

from .numpy_calls import StandIn
from .plain_model import live_copy, rehearse
from .refused import refusal
from .values import Value

if TYPE_CHECKING:
    from .trace import Traced
    from .tracer import Tracer

NUMBERS = (int, float)  # not bool: what is told apart by one is the first call
_SMALL = 2  # less than most lengths


def after_calls(
    root: nn.Module, signature: Signature, batches: Iterable[tuple[Any, ...]], training: bool,
    paths: Collection[str],
) -> dict[str, tuple[Any, ...]] | None:  # fmt: skip
    """The numbers at ``paths`` after a call with each of ``batches``, one after the other; None if
    one of them is no number then, or becomes one of another type.
    """
    if not paths:
        return {}
    live = live_copy(root, training)
    found: dict[str, list[Any]] = {path: [] for path in paths}
    with same_random_numbers(*generators_of(root)):
        for batch in batches:
            rehearse(live, signature, batch)
            for path, values in found.items():
                owner, _, name = path.rpartition(".")
                values.append(slot(live.get_submodule(owner), name))
    for values in found.values():
        if type(values[0]) not in NUMBERS or len(set(map(type, values))) > 1:
            return None
    return {path: tuple(values) for path, values in found.items()}


def set_between(
    root: nn.Module, paths: Iterable[str], small: bool = False
) -> dict[str, tuple[Any, Any]]:
    """The numbers at ``paths``, which are set between calls, as the two calls of a trace have them.
    One that could be a size differs between these, so that nothing takes it for a constant: by one,
    or, if ``small``, so that a slice up to the second is shorter, even where the first reaches
    beyond the end.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for path in paths:
        owner, _, name = path.rpartition(".")
        value = slot(root.get_submodule(owner), name)
        other = _SMALL if small and value > _SMALL else value + 1
        found[path] = value, other if type(value) is int else value
    return found


def others(value: float) -> tuple[float, ...]:
    """Numbers that one that varies may be later, on both sides of its value."""
    if type(value) is int:
        return value + 1, min(value - 1, _SMALL)
    return (0.71 * value + 0.13, 1.7 * value + 0.37) if math.isfinite(value) else (0.5, 1.5)


def put(module: nn.Module, numbers: dict[str, Any]) -> None:
    """Set the numbers at these paths."""
    for path, value in numbers.items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, value)


def not_asked(traced: Traced) -> None:
    """Refuse where such a number decides the control flow."""
    asked = () if traced.asks is None else traced.asks.nodes
    for node in asked:
        if node.op == "get_attr" and node.target in traced.numbers:
            owner, _, name = str(node.target).rpartition(".")
            how = "which forward changes" if node.target in traced.stores else "which varies"
            why = f"control flow depends on self.{name}, {how}"
            raise refusal(why, traced.guards[0].where, owner)


# ---------------------------------------------------------------- Python's functions of numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, Value) and value.number


def _recorded(tracer: Tracer, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of numbers, one call of the graph where one of them is a Value."""

    def call(*args: Any, **kwargs: Any) -> Any:
        numbers = all(_is_number(v) or type(v) in NUMBERS for v in args)
        if kwargs or not numbers or not any(map(_is_number, args)):
            return function(*args, **kwargs)
        return tracer.record("call_function", function, args, {})

    return call


def own_builtins(tracer: Tracer) -> dict[str, Any]:
    """``min`` and ``max``, which else ask which number is the smaller one."""
    return {name: _recorded(tracer, getattr(builtins, name)) for name in ("min", "max")}


def stand_in(tracer: Tracer, value: Any) -> Any:
    """What stands for a global of the user's: None for all but :mod:`math` and its functions."""
    if value is math:
        held = vars(math).items()
        return StandIn(math, {name: _recorded(tracer, f) for name, f in held if callable(f)})
    own = callable(value) and getattr(value, "__module__", None) == math.__name__
    return _recorded(tracer, value) if own else None
