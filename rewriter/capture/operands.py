"""The arguments of a traced call: in the form for a graph node, and as values in each example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from recast.rewriter.compiled.copies import generators_of

from .scratch import lifted
from .values import Flag, Value

if TYPE_CHECKING:
    from .tracer import Tracer

_LITERALS = (
    int,
    float,
    bool,
    str,
    complex,
    type(None),
    torch.dtype,
    torch.layout,
    torch.memory_format,
)


def argument(tracer: Tracer, value: Any) -> Any:
    """``value`` as a node holds it."""
    if isinstance(value, Value):
        return value.node if not (value.static and value.number) else value.pair[0]
    if isinstance(value, Flag):
        path = f"{value.path}.training" if value.path else "training"
        return tracer.node("get_attr", path, (), {}, (None, None), origin=value.path)
    if isinstance(value, torch.device):
        known = tracer.devices.get(id(value))
        return known[1] if known and known[0] is value else value
    if isinstance(value, torch.Tensor):
        return lifted(tracer, value).node
    if isinstance(value, slice):
        return slice(*(argument(tracer, v) for v in (value.start, value.stop, value.step)))
    if isinstance(value, PackedSequence):  # checks its fields as it is made: so it is a call
        fields = tuple(argument(tracer, v) for v in value)
        return tracer.node("call_function", PackedSequence, fields, {}, (None, None))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(argument(tracer, v) for v in value))
    if isinstance(value, tuple):
        return tuple(argument(tracer, v) for v in value)
    if isinstance(value, list):
        return [argument(tracer, v) for v in value]
    if isinstance(value, dict):
        return {_key(tracer, k): argument(tracer, v) for k, v in value.items()}
    if type(value).__module__ == "numpy":
        return argument(tracer, value.tolist())
    if isinstance(value, torch.Generator) and _made_here(tracer, value):
        tracer.refuse("draws from a generator that forward itself makes, so alike at each call")
    return value


def _made_here(tracer: Tracer, generator: torch.Generator) -> bool:
    """Whether forward has made ``generator``: neither drawn from nor seeded (which is refused), and
    not held by a module. No profile function is told of a class that is called.
    """
    if generator is torch.default_generator:
        return False
    if any(generator is held for held in generators_of(tracer.root)):
        return False
    new = torch.Generator(generator.device)
    return torch.equal(generator.get_state(), new.get_state())


def _key(tracer: Tracer, key: Any) -> Any:
    if isinstance(key, Value):
        tracer.refuse("uses a traced value as the key of a dict")
    return key


def example(tracer: Tracer, value: Any, k: int) -> Any:
    """``value`` as it is in example ``k``."""
    if isinstance(value, Value):
        return value.pair[k]
    if isinstance(value, Flag):
        return False
    if isinstance(value, slice):
        return slice(*(example(tracer, v, k) for v in (value.start, value.stop, value.step)))
    if isinstance(value, torch.Tensor):
        return lifted(tracer, value).pair[k]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(example(tracer, v, k) for v in value))
    if isinstance(value, (tuple, list)):
        items = [example(tracer, v, k) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: example(tracer, v, k) for key, v in value.items()}
    return value


def static(tracer: Tracer, value: Any) -> bool:
    """Whether ``value`` depends on no input, parameter or training flag."""
    if isinstance(value, Value):
        return value.constant
    if isinstance(value, torch.device):
        return id(value) not in tracer.devices
    if isinstance(value, torch.Tensor):
        return lifted(tracer, value).static
    if isinstance(value, Flag):
        return False
    if isinstance(value, slice):
        return all(static(tracer, v) for v in (value.start, value.stop, value.step))
    if isinstance(value, (tuple, list)):
        return all(static(tracer, v) for v in value)
    if isinstance(value, dict):
        return all(static(tracer, v) for v in value.values())
    return True


def literal(value: Any) -> bool:
    """Whether a value is plain, or a tuple or list of plain ones."""
    if isinstance(value, (tuple, list)):
        return all(literal(v) for v in value)
    return isinstance(value, _LITERALS)


def same(pair: Sequence[Any]) -> bool:
    """Whether a plain value, or a device, is the same in both examples."""
    if not literal(pair[0]) and not isinstance(pair[0], (torch.device, torch.Size)):
        return False
    return type(pair[0]) is type(pair[1]) and bool(pair[0] == pair[1])
