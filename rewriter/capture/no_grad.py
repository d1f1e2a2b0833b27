"""What ``torch.no_grad`` does to the result of a call: it has no history, unless the call returned
one of its arguments as it is (``x.float()`` of a float, dropout in eval mode), which keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from recast.rewriter.compiled.trees import flatten, rebuild
from recast.rewriter.ir import note

from .values import Value, make

if TYPE_CHECKING:
    from .tracer import Tracer

# These return their argument at one call and a new tensor at another.
_SOMETIMES = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
    "feature_alpha_dropout", "to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu",
    "cuda", "contiguous",
}  # fmt: skip

# These change the tensor itself, not what is in its memory, so on one that is detached they would
# be lost.
OF_THE_TENSOR = {
    "unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_",
    "detach_", "requires_grad_", "resize_", "resize_as_", "set_",
}  # fmt: skip


def without_history(result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """``result`` of a call with ``inputs``, as it leaves ``torch.no_grad``."""
    return result if any(result is x for x in inputs) else result.detach()


def detach(tracer: Tracer, value: Any) -> Any:
    """``value`` without its history: a ``detach`` node, which any pass may move."""
    if not _differentiable(value):
        return value
    pair = tuple(v.detach() for v in value.pair)
    node = tracer.node("call_method", "detach", (value.node,), {}, pair)
    return make(tracer, pair, static=value.static, node=node)


def leave(tracer: Tracer, node: fx.Node, result: Any, arguments: Any) -> Any:
    """The Values of ``result``, which ``node`` returned for ``arguments``, outside ``no_grad``."""
    inputs: list[Any] = []
    flatten(arguments, inputs, [])
    inputs = [v for v in inputs if _differentiable(v) and not _is_detached(v)]
    sometimes = _sometimes(tracer, node)

    def one(value: Any) -> Any:
        if not _differentiable(value) or any(value is v for v in inputs):
            return value
        same = [v for v in inputs if sometimes or _same(value, v)]
        if not same:
            return detach(tracer, value)
        given = (value.node, *(v.node for v in same))
        made = tracer.node("call_function", without_history, given, {}, value.pair)
        return make(tracer, value.pair, static=value.static, node=made)

    return rebuild(result, one)


def _same(a: Value, b: Value) -> bool:
    return any(x is y for x, y in zip(a.pair, b.pair, strict=True))


def _sometimes(tracer: Tracer, node: fx.Node) -> bool:
    if node.op == "call_module":
        layer = tracer.live.get_submodule(str(node.target))
        return isinstance(layer, nn.modules.dropout._DropoutNd)
    return getattr(node.target, "__name__", node.target) in _SOMETIMES


def _is_detached(value: Value) -> bool:
    made = value.made
    return made is not None and made.op == "call_method" and made.target == "detach"


def learns(tracer: Tracer, value: Any) -> bool:
    """Whether gradients may flow through ``value`` to a parameter."""
    for node in _history(value):
        if note(node).no_grad:
            continue
        if node.op == "get_attr" and isinstance(_held(tracer, node), nn.Parameter):
            return True
        if node.op == "call_module" and any(True for _ in _held(tracer, node).parameters()):
            return True
    return False


def of_batch(tracer: Tracer, value: Any) -> bool:
    """Whether gradients may flow through ``value`` to an input: a caller, or the layers before a
    module that is captured by itself, may ask for them. Or it comes from code that is kept whole
    under ``torch.no_grad``, which may switch gradients on.
    """
    return any(
        note(node).no_grad or (node.op == "placeholder" and _takes_gradients(tracer.pairs[node][0]))
        for node in _history(value)
    )


def _history(value: Any) -> Iterator[fx.Node]:
    """The nodes that ``value`` is computed from, as far as gradients flow."""
    todo, seen = [value.node] if _differentiable(value) else [], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen or (node.op == "call_method" and node.target == "detach"):
            continue
        seen.add(node)
        yield node
        if not note(node).no_grad:
            todo.extend(node.all_input_nodes)


def _held(tracer: Tracer, node: fx.Node) -> Any:
    held: Any = tracer.live
    for name in str(node.target).split("."):
        held = getattr(held, name, None)
    return held


def _differentiable(value: Any) -> bool:
    return isinstance(value, Value) and _takes_gradients(value.pair[0])


def _takes_gradients(value: Any) -> bool:
    tensor = isinstance(value, torch.Tensor)
    return tensor and (value.is_floating_point() or value.is_complex())
