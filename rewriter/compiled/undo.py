"""What a graph does, undone: until its last function that leaves torch is held to its shape.

Whether one keeps the shape of what it is given is known once it has run, and the plain forward can
take its place only if nothing was done before: no random number drawn, no statistics written. So
graphs with such calls keep aside what they are about to change; so do those that store numbers, to
their end, since the plain forward may have counted before it raises. No others do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from recast.rewriter import order
from recast.rewriter.capture.opaque_calls import OpaqueCall
from recast.rewriter.ir import Graph, Node
from recast.rewriter.rule import resolve

from .copies import beside_torch, generators_of

_DRAWING = ("random", "numpy")
# Of all at once. Torch 2.11 has none; nor may a subclass of Tensor.
_CLONE = getattr(torch, "_foreach_clone", None)


@dataclass(frozen=True)
class Undo:
    """``draws``: whether random numbers are drawn by torch or by ``generators`` of the model;
    ``python``: whether by Python or numpy. ``buffers``: what is written, as the dicts that hold it,
    with the names; ``read``: paths of what is not, as far as is known, where a function that leaves
    torch may write to it; None: there is no such function.
    """

    draws: bool
    python: bool
    buffers: tuple[tuple[dict[str, Any], str], ...]
    read: tuple[str, ...] | None
    generators: tuple[Any, ...]

    def snapshot(self, root: nn.Module, leaves: Sequence[Any]) -> Snapshot:
        """Save what is needed to restore ``root``, before a call with the inputs ``leaves``. Of
        batch norm's statistics it takes 1 us each, and three times that by path.
        """
        restore: list[Callable[[], object]] = []
        if self.draws:
            restore = [partial(set_state, state()) for state, set_state in _generators()]
        if self.python or self.generators:  # 80 us
            restore += beside_torch(self.generators)
        held = [one for slots, name in self.buffers if (one := slots.get(name)) is not None]
        if held:
            restore.append(partial(_copy, held, _cloned(held)))
        if self.read is None:
            return Snapshot(restore, [])
        read = [*leaves, *(resolve(root, path) for path in self.read)]
        versions = [
            (t, t._version) for t in read if isinstance(t, torch.Tensor) and not t.is_inference()
        ]
        return Snapshot(restore, versions)


@dataclass(frozen=True)
class Snapshot:
    """The functions that restore everything, and the versions of tensors that are not restored."""

    restore: list[Callable[[], object]]
    versions: list[tuple[torch.Tensor, int]]

    def restore_all(self) -> bool:
        """Restore everything; False, and nothing done, if a function that is held to its shape
        wrote to an argument or a parameter.
        """
        if any(tensor._version != version for tensor, version in self.versions):
            return False
        for restore in self.restore:
            restore()
        return True


def _cloned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if _CLONE is not None and {*map(type, tensors)} == {torch.Tensor}:
        return list(_CLONE(tensors))
    return [one.detach().clone() for one in tensors]


def _copy(tensors: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
    for tensor, before in zip(tensors, saved, strict=True):
        tensor.detach().copy_(before.detach())


def _generators() -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = [(torch.get_rng_state, torch.set_rng_state)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    return found


def undo_of(graph: Graph, root: nn.Module, whole: bool = False) -> Undo | None:
    """How to undo a call of ``graph``; None if no call in it is held to a shape, or if it does
    something that cannot be undone. ``whole``: to its end, whatever it calls.
    """
    nodes = list(graph.nodes)
    held = [k for k, n in enumerate(nodes) if isinstance(n.target, OpaqueCall) and n.target.keeps]
    held = [len(nodes) - 2] if whole else held
    if not held:
        return None
    draws, python, leaves_torch = False, False, False
    buffers, read = dict[str, None](), dict[str, None]()
    for node in nodes[: held[-1] + 1]:
        if node.op == "get_attr":
            read[str(node.target)] = None
        if node.op in ("placeholder", "get_attr") or order.droppable(node, root):
            continue
        draws = True
        if isinstance(node.target, OpaqueCall) and (node.target.custom or node.target.keeps):
            python, leaves_torch = python or _may_draw(node.target), True
            continue  # it may draw; whether it writes is known once it has run
        written = _buffers(node, root)
        if written is None:
            return None
        buffers.update(dict.fromkeys(written))
    others = tuple(path for path in read if path not in buffers)
    slots = tuple((resolve(root, owner)._buffers if owner else root._buffers, name)
                  for owner, _, name in (path.rpartition(".") for path in buffers))  # fmt: skip
    generators = tuple(generators_of(root)) if draws else ()
    return Undo(draws, python, slots, others if leaves_torch else None, generators)


def _may_draw(call: OpaqueCall) -> bool:
    """Whether ``call`` may draw from Python's or numpy's random numbers. Of a method that is not
    known: it calls others through ``self``.
    """
    custom: Any = call.custom
    return custom is None or _names_random(custom.forward, set())


def _names_random(function: Any, seen: set[int]) -> bool:
    """Whether ``function``, or a function of its module that it names, names ``random`` or numpy,
    or a function of theirs.
    """
    if not isinstance(function, FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        drawing = getattr(value, "__self__", value)  # random.random is a method of a Random
        home = value.__name__ if isinstance(value, ModuleType) else type(drawing).__module__
        if name in _DRAWING or home.partition(".")[0] in _DRAWING or _names_random(value, seen):
            return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _buffers(node: Node, root: nn.Module) -> list[str] | None:
    """The buffers that ``node`` may write to; None if it may write to anything else."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if order.foreign(module) or order.writes(node, root):
            return None
        return [f"{node.target}.{name}" for name, _ in module.named_buffers()]
    if order.writes(node, root):
        return None
    read = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    names = {name for name, _ in root.named_buffers(remove_duplicate=False)}
    if isinstance(node.target, torch._ops.OpOverload):
        written = [str(n.target) for n in order.written(node) if n.op == "get_attr"]
        return None if set(written) - names else written
    return [path for path in read if path in names]
