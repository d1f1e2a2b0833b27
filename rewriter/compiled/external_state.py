"""What ``forward`` takes from Python besides its arguments and its tensors.

A graph has it baked: settings in lists, dicts and configuration objects, functions that hang on a
module, constants of a class, global names, whether gradients are recorded. It is written down when
a model is traced, and compared at each call, so that a change is never silent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from recast.rewriter.capture.layers import torch_layer

from .homes import named, scope_of
from .object_contents import PLAIN, Absent, attributes, field
from .value_checks import Every, Fields, Held, Method, ProcessLocal, Same, ValueCheck, contents


@dataclass(frozen=True, slots=True)
class BakedValue:
    """One thing that a graph took from its surroundings. ``kind``: "attribute" of a module,
    "answer" of its ``__getattr__``, "class" for an attribute of its class, "base" for one of a
    class above that, "global", "closure", "environment" for an environment variable, or for the
    names of all, "flag" of torch, "setting" of a library's Python module, "grad", "shape" or
    "dtype" of a tensor, "number" for the type of an attribute, "slot" for an attribute, parameter,
    buffer or module that may be missing, "members" for the names of all parts of a module, "import"
    for a Python module that a function imports.
    """

    kind: str
    owner: str  # path of a module, or name of a Python module; of a flag, the argument
    name: str
    check: ValueCheck

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The key by which several traces share one check."""
        one_of_many = id(self.check.value) if isinstance(self.check, Held) else 0
        return self.kind, self.owner, self.name, one_of_many


# ---------------------------------------------------------------- asking again


def checks(taken: Iterable[BakedValue], modules: Mapping[str, nn.Module]) -> tuple[Check, ...]:
    """The checks for all these things."""
    return tuple(c for t in taken if (c := _check(t, modules)) is not None)


# ask, of, the former value of ask(*of), its name
Check = tuple[Callable[..., Any], tuple[Any, ...], ValueCheck, str]


def _check(taken: BakedValue, modules: Mapping[str, nn.Module]) -> Check | None:
    if taken.kind in _OF_MODULES:
        module = modules.get(taken.owner)
        return None if module is None else _of_module(taken, module)
    name, label = taken.name, ".".join(p for p in (taken.owner, taken.name) if p)
    if taken.kind == "flag":
        of = tuple(filter(None, (taken.owner,)))
        return answer, (name, *of), taken.check, f"torch.{name}({', '.join(map(repr, of))})"
    if taken.kind == "global":
        scope, label = scope_of(taken.owner), f"{named(taken.owner)}.{name}"
        return None if scope is None else (scope.get, (name, Absent), taken.check, label)
    if taken.kind == "setting":
        home = sys.modules.get(taken.owner)
        return None if home is None else (getattr, (home, name, Absent), taken.check, label)
    if taken.kind == "import":
        return sys.modules.get, (name, Absent), taken.check, label
    if taken.kind == "environment" and not name:
        return tuple, (os.environ,), taken.check, label
    if taken.kind == "environment":
        return os.environ.get, (name, Absent), taken.check, label
    return _nothing, (), taken.check, label


_OF_MODULES = frozenset({
    "attribute", "answer", "class", "base", "grad", "shape", "dtype", "number", "slot", "members",
})  # fmt: skip


def _of_module(taken: BakedValue, module: nn.Module) -> Check:
    name, label = taken.name, ".".join(p for p in (taken.owner, taken.name) if p)
    if taken.kind == "grad":
        return _records, (module._parameters, name), taken.check, f"{label}.requires_grad"
    if taken.kind in ("shape", "dtype"):
        return _fact, (module, name, taken.kind), taken.check, f"{label}.{taken.kind}"
    if taken.kind == "number":
        return _type, (vars(module), name), taken.check, f"the type of {label}"
    if taken.kind == "slot":
        return slot, (module, name), taken.check, label
    if taken.kind == "members":
        return members, (module,), taken.check, label
    if taken.kind == "answer":
        return getattr, (module, name, Absent), taken.check, label
    if taken.kind == "attribute":
        return vars(module).get, (name, Absent), taken.check, label
    kind = type(module)
    if taken.kind == "base":
        home, _, name = name.rpartition(".")
        base = next((k for k in kind.__mro__ if k.__name__ == home), kind)
        return vars(base).get, (name, Absent), taken.check, taken.name
    base = next((k for k in kind.__mro__ if name in vars(k)), kind)
    label = f"{base.__name__}.{name}"
    if getattr(kind, name, Absent) is vars(base).get(name):  # what a class below may take over
        return getattr, (kind, name, Absent), taken.check, label
    return vars(base).get, (name, Absent), taken.check, label


def _nothing() -> None:
    """For what is held directly, nothing has to be asked."""


def answer(question: str, *of: str) -> Any:
    """What a function of torch, such as "distributed.get_rank", answers; Absent if it cannot."""
    ask = attrgetter(question)(torch)
    try:
        return ask(*of)
    except (RuntimeError, ValueError):  # no group of processes
        return Absent


def _fact(module: nn.Module, name: str, fact: str) -> Any:
    """The shape or dtype of a tensor; None if there is no such tensor, which graphs find out."""
    return getattr(slot(module, name), fact, None)


def _type(held: dict[str, Any], name: str) -> type:
    return type(held.get(name, Absent))


def slots(module: nn.Module) -> tuple[Mapping[str, Any], ...]:
    """Where a module keeps what it has, in the order in which it is looked for."""
    return vars(module), module._parameters, module._buffers, module._modules


def slot(module: nn.Module, name: str) -> Any:
    """What a module has under a name; None if that is empty, Absent if there is nothing."""
    for held in slots(module):
        if name in held:
            return held[name]
    return Absent


def members(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters, buffers and modules that a module has."""
    slots: tuple[Mapping[str, Any], ...] = (module._parameters, module._buffers, module._modules)
    return tuple(name for held in slots for name, value in held.items() if value is not None)


def _records(parameters: dict[str, nn.Parameter | None], name: str) -> bool | None:
    parameter = parameters.get(name)
    return None if parameter is None else parameter.requires_grad


def changed(asked: tuple[Check, ...]) -> str | None:
    """The first thing that has changed, in words, or None."""
    for ask, of, check, label in asked:
        now = ask(*of)
        if not check.same(now):
            return _change(label, check, now)
    return None


def _change(label: str, check: ValueCheck, now: Any) -> str:
    """What was changed, with the old and new value if they are short."""
    if isinstance(check, ProcessLocal):
        return _change(label, check.check, check.now if isinstance(check, Held) else now)
    if isinstance(check, Every):
        return _change(label, next(c for c in check.checks if not c.same(now)), now)
    if (
        isinstance(check, Method)
        and isinstance(now, MethodType)
        and check.function.same(now.__func__)
    ):
        return _change(label, check.owner, now.__self__)
    if isinstance(check, Fields) and type(now) is check.kind:
        held = attributes(now)
        fields = ((name, was, field(now, held, name)) for name, was in check.fields)
        name, was, value = next(f for f in fields if not f[1].same(f[2]))
        return _change(f"{label}.{name}", was, value)
    if isinstance(check, Same) and type(check.value) in PLAIN and type(now) in PLAIN:
        return f"{label} was {check.value!r} and is now {now!r}"
    return f"{label} was changed"


_SETTINGS = ("max_norm", "norm_type", "scale_grad_by_freq", "mode", "include_last_offset")
# of layers: what the shapes of their parameters determine, and what does not affect the numbers
_UNREAD = frozenset({
    "training", "in_features", "out_features", "num_features", "normalized_shape",
    "affine", "elementwise_affine", "in_channels", "out_channels", "embed_dim", "kdim", "vdim",
    "head_dim", "input_size", "hidden_size", "num_parameters", "eps", "momentum", "p",
})  # fmt: skip
_FUNCTIONS = (FunctionType, BuiltinFunctionType)  # as an activation
_ITERATED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# torch's layers that passes open, and the methods by which they run what is in them
OPENED: dict[type, tuple[str, ...]] = {
    nn.TransformerEncoder: (),
    nn.TransformerEncoderLayer: ("_sa_block", "_ff_block"),
}
_LISTED = (nn.ParameterList, nn.ParameterDict)


def ours(held: dict[str, Any]) -> bool:
    """Whether the forward of a module is ours, because it runs the graph of a captured part."""
    return hasattr(getattr(held.get("forward"), "__self__", None), "_runner")


def of_module(path: str, module: nn.Module) -> Iterator[Check]:
    """What a graph takes for granted about a module that it passes through."""
    if isinstance(module, _ITERATED):
        if isinstance(module, nn.ModuleDict):
            kept = contents(order := (*module._modules,), order)
            yield tuple, (module._modules,), kept, f"the keys of {path or 'the model'}"
        else:
            yield len, (module._modules,), Same(len(module._modules)), f"len({path or 'the model'})"
    elif torch_layer(type(module)):
        for name in OPENED.get(type(module), ()):
            yield vars(module).get, (name, Absent), Same(Absent), f"{path}.{name}"
        for slots in (module._parameters, module._buffers):
            for name in (name for name, value in slots.items() if value is None):
                yield slots.get, (name,), Same(None), f"{path}.{name}"
    elif isinstance(module, _LISTED):
        yield len, (module,), Same(len(module)), f"len({path})"
        named = isinstance(module, nn.ParameterDict)
        keys: Iterable[Any] = list(module) if named else range(len(module))
        for key in map(str, keys):
            if not isinstance(value := slot(module, key), torch.Tensor):
                yield slot, (module, key), Same(value), f"{path}[{key}]"


def settings(
    path: str, module: nn.Module, read: Container[str]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], str]]:
    """What a graph has baked in from a layer of torch: names in its ``vars``. ``read``: paths of
    attributes that the graphs read at run time.
    """
    held = vars(module)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        unread = "norm_type" if held.get("max_norm") is None else ""
        names = tuple(name for name in _SETTINGS if name in held and name != unread)
        fixed = "padding_idx" in held and f"{path}.padding_idx" not in read
        names += ("padding_idx",) if fixed else ()
    elif torch_layer(type(module)):
        names = tuple(
            name
            for name, value in held.items()
            if isinstance(value, (int, float, str, tuple, type(None), *_FUNCTIONS))
            and not name.startswith("_") and name not in _UNREAD and f"{path}.{name}" not in read
        )  # fmt: skip
    else:
        return
    if names:
        yield names, held, path
