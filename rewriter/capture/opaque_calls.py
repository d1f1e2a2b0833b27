"""Functions that leave torch, kept whole: one node that calls the user's own code.

A trace that was refused inside a function of the user (numpy, ``.tolist()``, a loop over the batch)
is tried again with that function as one call, from tensors to tensors. It runs at each call of the
graph, on that call's tensors, so nothing about it is taken for granted: it may draw random numbers,
write to its arguments, and read what the model holds at the time. Only functions that use no
parameters and layers of the model qualify, since nothing inside them could be rewritten.

A ``torch.autograd.Function`` of the user is kept in the same way, since it has its own backward.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from keyword import iskeyword
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from recast.errors import CaptureError
from recast.rewriter.compiled.trees import flatten
from recast.rewriter.ir import note

from . import frames
from .code_watcher import CodeWatcher
from .refused import Refused, refusal

ATTEMPTS = 6  # how many functions are tried in one trace


@dataclass(frozen=True)
class OpaqueCall:
    """The target of such a node. ``owner``: the path of its ``self`` in the model, None without.
    ``keeps``: it returns a tensor of the shape of the first tensor that it is given, as it did on
    both examples; each call is held to it, but for the number of rows, which is asked, unless
    ``rows`` is set too.
    """

    function: Callable[..., Any]
    owner: str | None
    keeps: bool = False
    rows: bool = False

    def over(self, root: nn.Module) -> Callable[..., Any]:
        """The function that the graphs of ``root`` call."""
        called = self.function if self.owner is None else self._bound(root)
        return partial(_keeping, called, self.rows) if self.keeps else called

    def _bound(self, root: nn.Module) -> Callable[..., Any]:
        held: Any = root
        for part in self.owner.split(".") if self.owner else ():
            held = getattr(held, part)
        bound: Callable[..., Any] = self.function.__get__(held)
        return bound

    @property
    def custom(self) -> type | None:
        """The ``torch.autograd.Function`` if this is its ``apply``, else None."""
        kind = getattr(self.function, "__self__", None)
        return kind if _custom(kind) else None

    @property
    def __name__(self) -> str:
        if self.custom is not None:
            return self.custom.__name__
        name = getattr(self.function, "__name__", "").strip("_")
        return name if name.isidentifier() and not iskeyword(name) else "function"  # of a lambda

    def __reduce__(self) -> tuple[Any, ...]:
        named = _name_of(self.function)
        if named is None:
            return OpaqueCall, (self.function, self.owner, self.keeps, self.rows)
        return _of_name, (*named, self.owner, self.keeps, self.rows)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Only :meth:`over` knows what to call; graph nodes want a callable target."""
        raise TypeError(f"{self.__name__} is called through over(root)")


def _name_of(function: Any) -> tuple[str, str] | None:
    """Where a function is found that has the name of another: ``mapped = torch.vmap(plain)``. None
    where pickle finds it itself, or nobody does.
    """
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if home is None or getattr(home, getattr(function, "__qualname__", ""), None) is function:
        return None
    name = next((name for name, value in vars(home).items() if value is function), None)
    return None if name is None else (home.__name__, name)


def _of_name(module: str, name: str, *fields: Any) -> OpaqueCall:
    return OpaqueCall(getattr(importlib.import_module(module), name), *fields)


class Reshaped(CaptureError):
    """A function that keeps the shape no longer: the graph is not the model."""


def _keeping(function: Callable[..., Any], rows: bool, *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    first = next(t for t in args if isinstance(t, torch.Tensor))
    held = 0 if rows else 1
    if result.shape[held:] != first.shape[held:]:
        raise Reshaped(
            f"{OpaqueCall(function, None).__name__} does not keep the shape of what it is given",
            why=f"{tuple(first.shape)} became {tuple(result.shape)}; in both examples it was kept",
            tries=("an example in which it is not",),
        )
    return result


def keeping(
    target: OpaqueCall, given: list[tuple[Any, ...]], results: tuple[Any, ...], shapes: bool
) -> OpaqueCall:
    """``target``, of which calls with ``given`` gave ``results``: one that keeps shapes if it is a
    ``torch.autograd.Function`` that did, or with ``shapes`` any function that did.
    """
    if target.custom is None and not shapes:
        return target
    for args, result in zip(given, results, strict=True):
        first = next((t for t in args if isinstance(t, torch.Tensor)), None)
        if first is None or getattr(result, "shape", None) != first.shape:
            return target
    return replace(target, keeps=True)


def candidates(frame: FrameType | None) -> list[CodeType]:
    """The user's functions that are running, innermost first, down to the forward of the module
    that is traced, which is not among them. A ``torch.autograd.Function`` that is about to run
    comes first, by its forward.
    """
    found: list[FrameType] = []
    applied: list[CodeType] = []
    while frame is not None:
        if found and frames.ours(frame):
            break
        if frame.f_code is _CALLS and not found:
            kind: Any = getattr(frame.f_locals["arg"], "__self__", None)
            code = getattr(kind.forward, "__code__", None) if _custom(kind) else None
            applied += [code] if code is not None else []
        if frames.users(frame):
            found.append(frame)
        frame = frame.f_back
    if not found:
        return applied
    package = _package(found[-1])
    codes = [f.f_code for f in found[:-1] if _package(f) == package]
    return applied + [code for code in codes if not code.co_name.startswith("<")]


def transformed(frame: FrameType | None, path: str) -> Refused | None:
    """The refusal of a transform of ``torch.func`` that runs in ``frame``; None without one.

    Its values are torch's own, of one sample or with gradients, and no tensor of a trace is among
    them. So the function that it made, where that has a name, is kept whole, or who calls it.
    """
    if frame is None:
        return None
    caller = frame.f_back
    while caller is not None and not frames.users(caller):
        caller = caller.f_back
    where = None if caller is None else frames.line(caller.f_code, caller.f_lineno)
    why = f"{frames.transform_name(frame)} in forward, inside which no trace can look"
    error = refusal(why, where, path)
    error.tries = (
        "a function of tensors around that call, beside the model or a method of it without"
        " parameters: it is then kept whole, as one call",
        *error.tries[-1:],
    )
    error.inside, error.transform = (frame.f_code, *candidates(caller)), True
    return error


def _custom(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.autograd.Function)


# what is told of every builtin that is called, so of `apply`
_CALLS = CodeWatcher.__call__.__code__


def applied(tracer: Any, value: Any, outside: frozenset[CodeType]) -> Any:
    """What stands for a ``torch.autograd.Function`` that is kept whole, or for its ``apply``,
    while it is traced; None for all else.
    """
    # from torch 2.14 on `apply` is a builtin
    bound = isinstance(value, (MethodType, BuiltinMethodType))
    kind: Any = value.__self__ if bound else value
    if not _custom(kind) or getattr(kind.forward, "__code__", None) not in outside:
        return None
    call = _recorded(tracer, OpaqueCall(kind.apply, None))
    if value is not kind:
        return call if value == kind.apply else None
    return type(kind)(kind.__name__, (kind,), {"apply": staticmethod(call)})


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


class _Watch(TorchFunctionMode):
    """Notices whether a tensor of ``known`` takes part in a torch call."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        self.met = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves: list[Any] = []
        flatten((args, kwargs or {}), leaves, [])
        self.met = self.met or any(id(t) in self.known for t in leaves)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(target: OpaqueCall, live: nn.Module, given: Any) -> Iterator[list[str]]:
    """Yields a list that gets, at the end, the reasons why what ran inside may not be one node."""
    why: list[str] = []
    known = {id(p) for p in live.parameters()}
    tensors: list[Any] = []
    flatten(given, tensors, [])
    if target.custom is not None:  # its arguments are in the graph, even parameters
        known -= {id(t) for t in tensors}
    held, contents = _attributes(live), _contents(given)
    with _Watch(known) as watch:
        yield why
    if watch.met or any(id(t) in known for t in tensors):
        why.append("it uses a parameter of the model")
    if _attributes(live) != held:
        why.append("it changes what a module holds")
    if _contents(given) != contents:
        why.append("it changes a list or dict that it is given")


def _attributes(live: nn.Module) -> list[tuple[str, int]]:
    """What every module holds, by identity; buffers with their version."""
    held = []
    for path, module in live.named_modules():
        held += [(f"{path}.{k}", id(v)) for k, v in vars(module).items()]
        held += [(f"{path}.{k}", b._version) for k, b in module._buffers.items() if b is not None]
    return held


def _contents(value: Any) -> list[Any]:
    """What every container in ``value`` holds, by identity."""
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if not isinstance(value, (list, tuple)):
        return []
    return [[id(v) for v in value], *(_contents(v) for v in value)]


def why_not_recorded(graphs: Iterable[fx.Graph]) -> str | None:
    """Why replays may not stand for ``graphs``: they would call no such function. Or None."""
    for graph in graphs:
        for node in graph.nodes:
            if isinstance(node.target, OpaqueCall):
                where = note(node).where
                at = f" ({where})" if where else ""
                return f"{node.target.__name__}(){at} leaves torch, and a replay would not call it"
    return None


def opaque(value: Any, owners: Mapping[int, str]) -> bool:
    """Whether an argument is more than tensors and constants in lists, tuples and dicts: a module
    of the model, or an object that keeps tensors, which a graph would not hand on.
    """
    if isinstance(value, (torch.Tensor, str)):
        return False
    if isinstance(value, dict):
        return any(opaque(v, owners) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(opaque(v, owners) for v in value)
    leaves: list[Any] = []
    flatten(value, leaves, [])
    return bool(leaves) or id(value) in owners or isinstance(value, nn.Module)


def wrapper(tracer: Any, old: FunctionType) -> Callable[..., Any]:
    """The function that replaces ``old`` while it is traced."""

    def call(*args: Any, **kwargs: Any) -> Any:
        owner = tracer.owner_of(args[0]) if args else None
        given = args if owner is None else args[1:]
        return _recorded(tracer, OpaqueCall(old, owner))(*given, **kwargs)

    call.__name__ = old.__name__
    return call


def _recorded(tracer: Any, target: OpaqueCall) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if opaque((args, kwargs), tracer.owners):
            why = f"{target.__name__}() leaves torch, and it is given a part of the model"
            tracer.refuse(why, outside=target.function)
        return tracer.record("call_function", target, args, kwargs)

    return call


def versions(value: Any) -> list[int]:
    """How often each tensor in ``value`` was written to."""
    leaves: list[Any] = []
    flatten(value, leaves, [])
    return [t._version for t in leaves if isinstance(t, torch.Tensor)]
