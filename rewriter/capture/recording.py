"""One call of a traced forward: runs on both examples, and becomes one node.

In-place writes are recorded as such, with their target, since a graph must not write to what
outlives a call; :mod:`.tidy` turns them into new values where no difference could be seen.
"""

from __future__ import annotations

import operator
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from recast.rewriter.autocast import Region, enabled, nesting, same_in_any
from recast.rewriter.compiled.array_inputs import tensor_of
from recast.rewriter.compiled.trees import flatten, rebuild
from recast.rewriter.ir import annotate
from recast.rewriter.order import draws

from . import frames, operands
from .calls import COUNTS, DTYPES, LAYOUT, METADATA, OUT_OF_PLACE, REFUSED, Layout
from .constants import Constants
from .dynamic_sizes import Sizes, name_of
from .layers import runs_users_code
from .no_grad import OF_THE_TENSOR, detach, learns, leave, of_batch
from .numpy_calls import Array
from .opaque_calls import OpaqueCall, keeping, versions, watched
from .refused import UNREGISTERED
from .restored_state import CopiesBeforeWrites
from .shown import shows
from .storages import memory
from .values import Value, make

if TYPE_CHECKING:
    from .tracer import Tracer

_WRITES_FROZEN = "writes under torch.no_grad to a tensor that gradients flow through"
_RANKS = (
    "recast.optimize(model.module) of what DistributedDataParallel wraps: the result averages the"
    " gradients of all ranks itself",
)
_DTYPE = ("dtype= at the calls that make tensors",)
_SAVING = ("a module of its own for what is recomputed, with no table in it",)


def record(
    tracer: Tracer, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of a call, as Values; as a plain value if it is the same for every batch."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if kind != "call_module" and name in REFUSED and not operands.static(tracer, (args, kwargs)):
        if name in ("tolist", "numpy") and shows(pure=True):
            return _run(tracer, kind, target, args, kwargs, 0)
        tracer.refuse(REFUSED[name], size="numpy" if name in ("numpy", "__array__") else "")
    arrays = _of_arrays(kind, target, args)
    if arrays:
        args = tuple(map(tensor_of, args))
    region = _region(tracer)
    if saving() != tracer.saving or frames.checkpointed():
        tracer.refuse("saves tensors its own way, as activation checkpointing does", tries=_SAVING)
    if torch.get_default_dtype() is not tracer.default_dtype:
        tracer.refuse("changes torch's default dtype inside forward", tries=_DTYPE)
    layer = tracer.live.get_submodule(target) if kind == "call_module" else None
    beyond = isinstance(target, OpaqueCall)
    own = beyond or (layer is not None and runs_users_code(layer))
    plain = kind != "call_module" and not beyond
    in_place = plain and _in_place(target, name, kwargs)
    frozen = not torch.is_grad_enabled()
    by_layer = args if frozen and not own and getattr(layer, "inplace", False) else ()
    if any(learns(tracer, one) or of_batch(tracer, one) for one in by_layer):
        tracer.refuse(_WRITES_FROZEN)
    learning = None  # what is written to, if what it is computed from may ask for gradients
    if in_place:
        args, kwargs = _target_first(args, kwargs)
        _writes(tracer, args, kwargs)
        if frozen:
            if any(learns(tracer, one) for one in _written(args)):
                tracer.refuse(_WRITES_FROZEN)
            if name not in OF_THE_TENSOR:
                learning = args[0] if args and of_batch(tracer, args[0]) else None
                out = {"out": kwargs["out"]} if "out" in kwargs else {}
                args = tuple(rebuild(args, lambda t: detach(tracer, t)))
                kwargs = {**rebuild(kwargs, lambda t: detach(tracer, t)), **out}
    node_args, node_kwargs = operands.argument(tracer, args), operands.argument(tracer, kwargs)
    if beyond:
        pair = tuple(_run_outside(tracer, target, args, kwargs, k) for k in (0, 1))
        given = [operands.example(tracer, args, k) for k in (0, 1)]
        pure = target not in tracer.writers  # else it cannot be undone
        target = keeping(target, given, pair, tracer.holds_shapes and pure)
    else:
        pair = tuple(_run(tracer, kind, target, args, kwargs, k) for k in (0, 1))
    static = plain and operands.static(tracer, (args, kwargs))
    if plain and name in METADATA and operands.same(pair):
        _rely(tracer, name, args, _nodes((node_args, node_kwargs)), pair[0])
        return pair[0]
    if static and operands.literal(pair[0]) and pair[0] is not None:
        return pair[0]
    node = tracer.node(kind, target, node_args, node_kwargs, pair)
    if not same_in_any(node, layer):
        annotate(node, autocast=region)
    # Code of the user may ask for gradients, record them all the same, and write.
    if frozen and (own or name in OF_THE_TENSOR or kwargs.get("out") is not None):
        annotate(node, no_grad=True)
    static = static and not draws(node, tracer.root)
    if static:
        tracer.static.add(node)
    elif in_place:
        _no_longer_static(tracer, args, kwargs)
    passed: dict[int, Value] = {}
    if kind == "call_module" or (beyond and target.custom is None):
        leaves: list[Any] = []
        flatten((args, kwargs), leaves, [])
        passed = {id(v.pair[0]): v for v in leaves if isinstance(v, Value)}
    result = _wrap(tracer, node, pair[0], pair[1], static, passed)
    if arrays and isinstance(result, Value) and not result.number:
        Array.of(result)
    if in_place and isinstance(args[0] if args else None, Value):
        if pair[0] is not args[0].pair[0]:
            return result
        if learning is not None:
            return learning  # which keeps its history: that the write has none, torch does not say
        args[0].made = node  # later calls read the result, so the order is in the graph
        return args[0]
    if own:  # runs under torch.no_grad itself, and may switch gradients on inside
        return result
    return leave(tracer, node, result, (args, kwargs)) if frozen else result


def _of_arrays(kind: str, target: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is an operator or a method on arrays alone, which gives one."""
    python = target is getattr or getattr(target, "__module__", "") == "_operator"
    given = [v for v in args if isinstance(v, Value) and not v.number]
    arrays = bool(given) and all(isinstance(v, Array) for v in given)
    return arrays and (kind == "call_method" or python)


def _rely(
    tracer: Tracer, name: str, args: tuple[Any, ...], nodes: list[fx.Node], answer: Any
) -> None:
    """Note that Python got the same ``answer`` about tensors in both examples, and bakes it."""
    tracer.asks_of_own(args, "dtype" if name in DTYPES else "shape")
    for node in nodes:
        tracer.ranks.add(node)
        tracer.bake(node, (answer,) if name in COUNTS else ())
        if name in LAYOUT and node.op == "placeholder":
            tracer.ask(node, Layout(name, args[1:]), answer)
    if name in DTYPES:
        tracer.bake_dtypes(nodes)


def _region(tracer: Tracer) -> Region:
    """What the blocks of ``torch.autocast`` set in which forward now is."""
    watched = tracer.reading.profile
    devices = watched.autocast if watched is not None else []
    before, outside = tracer.autocast
    inside = enabled(devices)
    around = tuple(one for one in outside if one[0] not in devices)
    now = tuple(one for one in enabled() if one[0] not in devices)
    if nesting() - before != len(devices) or around != now:
        tracer.refuse("switches autocast inside forward, other than by a with block")
    return inside


def saving() -> Any:
    """The hooks on tensors saved for backward that are in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# ---------------------------------------------------------------- running it


def _run(tracer: Tracer, kind: str, target: Any, args: Any, kwargs: Any, k: int) -> Any:
    args, kwargs = operands.example(tracer, args, k), operands.example(tracer, kwargs, k)
    if kind == "call_module":
        layer = tracer.live.get_submodule(target)
        own = runs_users_code(layer)  # may ask for gradients inside
        with tracer.quiet(), torch.set_grad_enabled(own and torch.is_grad_enabled()):
            result = layer(*args, **kwargs)
            return rebuild(result, lambda t: t.detach() if t.requires_grad else t)
    with tracer.quiet(), torch.no_grad():
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)


def _run_outside(tracer: Tracer, target: OpaqueCall, args: Any, kwargs: Any, k: int) -> Any:
    """Run a function that leaves torch, on example ``k``."""
    tracer.opaque_calls.setdefault(target, tracer.where() or "")
    values: list[Any] = []
    flatten((args, kwargs), values, [])
    held: dict[int, torch.UntypedStorage] = {}
    for value in values:  # it may write to all its arguments, and differently at each call
        if isinstance(value, Value) and not value.number:
            places = memory(value.pair[0])
            if places.keys() & tracer.parameters and target.custom is not None:
                held |= places  # seldom written to, so it is seen whether it is
                continue
            tracer.written |= places.keys()
            tracer.mixed |= places.keys()
    given = operands.example(tracer, (args, kwargs), k)
    before = versions(given)
    with (
        watched(target, tracer.live, given) as why,
        CopiesBeforeWrites(held) as now,
    ):
        result = target.over(tracer.live)(*given[0], **given[1])
    if versions(given) != before:
        tracer.writers.add(target)
    if now.copies:
        why.append("it writes to a parameter")
    kept = [v for v in values if not isinstance(v, Value) or (v.path or "").startswith("_")]
    if kept and versions(given) != before:
        why.append("it writes to a tensor that is not made in forward")
    if why:
        tracer.refuse(f"{target.__name__}() leaves torch, and {why[0]}", outside=target.function)
    return rebuild(result, lambda t: t.detach() if t.requires_grad else t)


# ---------------------------------------------------------------- writes in place


def _in_place(target: Any, name: str, kwargs: dict[str, Any]) -> bool:
    if target is operator.setitem or kwargs.get("inplace") is True or kwargs.get("out") is not None:
        return True
    if getattr(target, "__module__", "") == "_operator":
        return target in OUT_OF_PLACE
    return name.endswith("_") and not name.endswith("__")


def _target_first(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With what is written to as the first argument: ``nn.init`` gives it by its name, ``tensor``,
    and so may a user, ``input``.
    """
    named = {"input", "tensor"} & kwargs.keys()
    if args or len(named) != 1:
        return args, kwargs
    (name,) = named
    return (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}


def _writes(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what is written to; refuse writes to what outlives a call, except buffers."""
    targets = _written(args)
    targets += [t for t in (kwargs.get("out"),) if t is not None]
    for target in targets:
        if not isinstance(target, Value):
            if isinstance(target, torch.Tensor):
                tracer.refuse(*_outsider(target))
            continue
        if target.number:
            continue
        places = memory(target.pair[0]).keys()
        if places & tracer.parameters:
            tracer.refuse("writes in place to a parameter")
        if target.path is not None and target.path.startswith(f"{Constants.ATTRIBUTE}."):
            tracer.refuse("writes in place to a tensor that is not a buffer")
        tracer.written |= places
        if target is kwargs.get("out"):
            tracer.outs |= places


def _written(args: tuple[Any, ...]) -> list[Any]:
    """What a call writes to: its first argument, or all in it (``torch._foreach_mul_``)."""
    many = bool(args) and isinstance(args[0], (list, tuple))
    return [*args[0]] if many else [*args[:1]]


def _outsider(written: torch.Tensor) -> tuple[str, str, tuple[str, ...]]:
    """Why forward may not write to a tensor that the model does not know, and what to do."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        layer = frame.f_locals.get("self")
        if isinstance(layer, nn.Module) and any(b is written for b in layer._buffers.values()):
            kind = type(layer).__name__
            why = f"writes to a buffer of a {kind} that is no submodule: in a plain list, say"
            return why, "", UNREGISTERED
        frame = frame.f_back
    return "writes in place to a tensor that was made outside torch", "", ()


def _no_longer_static(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Mark these tensors and their views: something that depends on inputs, or random numbers, was
    written to them.
    """
    for value in (*_written(args), kwargs.get("out")):
        if isinstance(value, Value) and not value.number:
            tracer.mixed |= memory(value.pair[0]).keys()


# ---------------------------------------------------------------- its result


def _wrap(
    tracer: Tracer, node: fx.Node, first: Any, second: Any, static: bool, given: dict[int, Value]
) -> Any:
    """Values for what a call returned; ``given`` are the arguments of a layer, by identity."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.dim() != second.dim():
            tracer.refuse("the number of dimensions differs between the example batches")
        return make(tracer, (first, second), static=static, node=node)
    if first is None and second is None:
        return None
    if isinstance(first, (bool, int, float, complex)):
        return make(tracer, (first, second), static=static, node=node)
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        if len(first) != len(second):
            tracer.refuse(
                f"{node.target} returns {len(first)} values for one example batch and"
                f" {len(second)} for the other"
            )
        tracer.bake(node, (len(first),))
        if _cuts_the_batch(tracer, node):
            tracer.ask(node, Sizes(()), (len(first),))  # of another batch there may be more
        items = []
        for k, (a, b) in enumerate(zip(first, second, strict=True)):
            if id(a) in given and given[id(a)].pair[1] is b:  # returned unchanged
                items.append(given[id(a)])
                continue
            item = tracer.node("call_function", operator.getitem, (node, k), {}, (a, b))
            if static:
                tracer.static.add(item)
            items.append(_wrap(tracer, item, a, b, static, given))
        if hasattr(first, "_fields"):  # not through its own __new__, which may look inside
            kind: Any = type(first)
            return tuple.__new__(kind, items)
        return type(first)(items)
    if type(first) is type(second) and operands.same((first, second)):
        return first
    made = node
    while made.target is operator.getitem and isinstance(made.args[0], fx.Node):
        made = made.args[0]
    if str(made.target).startswith("c10d."):
        why = f"sends tensors to the other ranks ({made.target}), as DistributedDataParallel does"
        tracer.refuse(f"{why} with buffers", tries=_RANKS)
    name = getattr(made.target, "__name__", made.target)
    tracer.refuse(f"{name} returns a {type(first).__name__}, which cannot be followed")


# what cuts a tensor into pieces, as many as its sizes say, and the dimension if none is given
_PIECES = {
    "split": 0, "chunk": 0, "unbind": 0, "tensor_split": 0, "unsafe_split": 0, "unsafe_chunk": 0,
    "split_with_sizes": 0, "vsplit": 0, "hsplit": 1, "dsplit": 2,
}  # fmt: skip


def _cuts_the_batch(tracer: Tracer, node: fx.Node) -> bool:
    """Whether ``node`` cuts a tensor along a dimension that depends on the batch."""
    name, given = name_of(node), node.args[0] if node.args else None
    if node.op == "call_module" or isinstance(node.target, OpaqueCall) or name not in _PIECES:
        return False  # of the user's own
    if not isinstance(given, fx.Node) or not isinstance(tracer.pairs[given][0], torch.Tensor):
        return False
    place = 1 if name == "unbind" else 2
    dim: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", _PIECES[name])
    first, second = (tracer.pairs[given][k].shape for k in (0, 1))
    along = dim if isinstance(dim, int) and dim < len(first) else 0
    return bool(first[along] != second[along])


def _nodes(value: Any) -> list[fx.Node]:
    """All nodes inside an argument."""
    found: list[fx.Node] = []

    def keep(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.node.map_arg(value, keep)
    return found
