"""Softmax cross entropy with one class a row, and the layer whose result it reads.

cross_entropy(x, y)                        nn.CrossEntropyLoss, F.cross_entropy, F.nll_loss of
                                           log_softmax; x (N, C), or (N, C, L) turned from (N, L, C)
cross_entropy(x Wᵀ / t + b, y)             behind a Linear layer or a product with a matrix, as a
                                           table or the items of the batch

Not with weights for the classes, nor with probabilities in place of classes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.layers.cross_entropy import shaped_as

from .leaf import (
    Attr,
    Linear,
    Value,
    argument,
    arguments,
    bytes_of,
    differs,
    human,
    linear_of,
    module_of,
    put,
    rank,
    spec_of,
    unpaid,
)

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

# With fewer classes the logits are small, and the layer is better off in a chain with its others.
FEWEST = 128

_CROSS_ENTROPY = (
    ("input", None), ("target", None), ("weight", None), ("size_average", None),
    ("ignore_index", -100), ("reduce", None), ("reduction", "mean"), ("label_smoothing", 0.0),
)  # fmt: skip
_NLL = _CROSS_ENTROPY[:-1]


@dataclass(frozen=True, slots=True)
class Loss:
    """``cross_entropy(logits, target)``, and the nodes that compute it from the logits."""

    logits: Node
    target: Node
    reduction: Value
    ignore_index: Value
    label_smoothing: Value
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """``x Wᵀ * scale + bias``, and the nodes that compute logits by it."""

    x: Node
    weight: Value
    turned: bool  # the weight is (D, C)
    bias: Value
    minus: bool  # the bias is taken from the product
    scales: tuple[tuple[Any, Any], ...]  # what is done with the product: (operator, number)
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The loss, and the layer before it if that is part of the call."""

    loss: Loss
    logits: Node  # (N, C), or (N, L, C) if ``deep``; the target (N,) or (N, L)
    layer: Layer | None
    deep: bool


# ---------------------------------------------------------------- the loss


def _loss(node: Node, root: nn.Module) -> Loss | Miss | None:
    module = module_of(node, root)
    if isinstance(module, nn.CrossEntropyLoss):
        return _of_module(node, module, nn.CrossEntropyLoss)
    if isinstance(module, nn.NLLLoss):
        return _behind_softmax(_of_module(node, module, nn.NLLLoss), root)
    if is_call(node, F.cross_entropy):
        return _of_call(node, arguments(node, _CROSS_ENTROPY))
    if is_call(node, F.nll_loss):
        return _behind_softmax(_of_call(node, [*arguments(node, _NLL), 0.0]), root)
    return None


def _of_module(node: Node, module: Any, kind: type[nn.Module]) -> Loss | Miss | None:
    if module.weight is not None:
        return _weighted(node)
    miss = differs(node, module, kind)
    if miss is not None:
        return miss
    logits, target = argument(node, 0, "input"), argument(node, 1, "target")
    if not isinstance(logits, Node) or not isinstance(target, Node):
        return None
    path = node.target
    smooth: Value = 0.0 if isinstance(module, nn.NLLLoss) else Attr(f"{path}.label_smoothing")
    reduction, ignored = Attr(f"{path}.reduction"), Attr(f"{path}.ignore_index")
    return Loss(logits, target, reduction, ignored, smooth, (node,))


def _of_call(node: Node, given: list[Any]) -> Loss | Miss | None:
    logits, target, weight, average, ignored, reduce, reduction, smoothing = given
    if weight is not None:
        return _weighted(node)
    if average is not None or reduce is not None or not isinstance(reduction, str):
        return None
    if not isinstance(logits, Node) or not isinstance(target, Node):
        return None
    return Loss(logits, target, reduction, ignored, smoothing, (node,))


def _weighted(node: Node) -> Miss:
    return Miss(node, "it weighs its classes", ("reduction='none' and a product with weights",))


def _behind_softmax(read: Loss | Miss | None, root: nn.Module) -> Loss | Miss | None:
    """``read``, of log_softmax(x), as a loss of x."""
    if not isinstance(read, Loss):
        return read
    node = read.logits
    module = module_of(node, root)
    if isinstance(module, nn.LogSoftmax):
        dim, dtype = module.dim, None
        if differs(node, module, nn.LogSoftmax) is not None:
            return None
    elif is_call(node, F.log_softmax, torch.log_softmax) or is_method(node, "log_softmax"):
        dim, dtype = argument(node, 1, "dim"), node.kwargs.get("dtype")
    else:
        return None
    x, spec = argument(node, 0, "input"), spec_of(node)
    if dtype is not None or spec is None or dim not in (1, 1 - len(spec.shape)):
        return None
    if sole_user(node) is None or not isinstance(x, Node):
        return None
    return Loss(
        x, read.target, read.reduction, read.ignore_index, read.label_smoothing,
        (node, *read.nodes),
    )  # fmt: skip


# ---------------------------------------------------------------- the layer


def _layer(logits: Node, last: Node, deep: bool, root: nn.Module) -> Layer | Miss | None:
    """The layer that makes ``logits``, which ``last`` alone reads."""
    nodes: list[Node] = [last]
    scales: list[tuple[Any, Any]] = []
    added, minus = None, False
    node: Any = logits
    while sole_user(node) is nodes[-1]:
        nodes.append(node)
        if is_call(node, torch.reshape, torch.flatten) and not deep:
            node = _with_rows(node)
            continue
        inner, other = _operands(node)
        if _is_number(other) and is_call(node, operator.truediv, operator.mul):
            scales.append((node.target, other))
        elif _is_vector(other, logits) and is_call(node, operator.add, operator.sub):
            if added is not None or scales:
                return None
            added, minus = other, is_call(node, operator.sub)
        else:
            break
        node = inner
    else:
        return None
    read = _weighed(node, root)
    if read is None or isinstance(read, Miss):
        return read
    x, weight, turned, bias = read
    if bias is not None and (scales or added is not None):
        return None
    given, whole = spec_of(x), spec_of(logits)
    if given is None or whole is None or given.dtype != whole.dtype:
        return None  # autocast, or a number that widens the product
    bias = bias if added is None else added
    return Layer(x, weight, turned, bias, minus, tuple(scales[::-1]), tuple(nodes[:0:-1]))


def _with_rows(node: Node) -> Node | None:
    """The value whose last dimension ``node`` keeps, while it joins those before it."""
    inner = argument(node, 0, "input")
    spec, made = spec_of(inner), spec_of(node)
    if spec is None or made is None or len(spec.shape) < 2 or len(made.shape) != 2:
        return None
    kept = spec.shape[-1] == made.shape[-1] and isinstance(spec.shape[-1], int)
    return inner if kept else None


def _operands(node: Node) -> tuple[Any, Any]:
    """The operands of an arithmetic call, first what may be a product; (None, None) for others."""
    if node.op != "call_function" or len(node.args) != 2:
        return None, None
    one, two = node.args
    if is_call(node, operator.mul, operator.add) and (rank(one) or 0) < (rank(two) or 0):
        return two, one
    return (one, two) if isinstance(one, Node) else (None, None)


def _is_vector(value: Any, logits: Node) -> bool:
    """Whether ``value`` has one number for each class."""
    spec, whole = spec_of(value), spec_of(logits)
    return (
        spec is not None and whole is not None and len(spec.shape) == 1
        and spec.shape[0] == whole.shape[-1] and spec.dtype == whole.dtype
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    """Whether ``value`` is one number: a constant, or a tensor of shape () or (1,)."""
    if isinstance(value, Node):
        spec = spec_of(value)
        return spec is not None and spec.shape in ((), (1,)) and spec.dtype.is_floating_point
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _weighed(node: Node, root: nn.Module) -> tuple[Node, Value, bool, Value] | Miss | None:
    """``(x, weight, whether it is (D, C), bias)`` of a product with one matrix."""
    linear, turned = linear_of(node, root), False
    if linear is None and (is_call(node, torch.matmul, torch.mm) or is_method(node, "mm")):
        linear = Linear(argument(node, 0, "input"), argument(node, 1, "mat2"), None, None)
        turned = True
    if linear is None:
        return None
    x, weight, bias, miss = linear
    if miss is not None:
        return miss
    if not isinstance(x, Node) or not (isinstance(weight, Attr) or rank(weight) == 2):
        return None
    if turned and is_call(weight, torch.transpose):
        weight, turned = argument(weight, 0, "input"), False
    return x, weight, turned, bias


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    loss = _loss(node, root)
    if loss is None or isinstance(loss, Miss):
        return loss
    logits, nodes = loss.logits, loss.nodes
    given, target = spec_of(logits), spec_of(loss.target)
    if given is None or target is None or not given.dtype.is_floating_point:
        return None
    if target.dtype != torch.int64 or len(target.shape) != len(given.shape) - 1:
        return None  # probabilities, or no batch
    deep = len(given.shape) == 3
    if deep:
        turned = is_call(logits, torch.transpose) and {*logits.args[1:]} in ({1, 2}, {1, -1})
        if not turned or sole_user(logits) is None:
            return None
        nodes, logits = (logits, *nodes), argument(logits, 0, "input")
    elif len(given.shape) != 2:
        return None
    layer = _layer(logits, nodes[0], deep, root) if _many(logits) else None
    if isinstance(layer, Layer):
        nodes = (*layer.nodes, *nodes)
    else:
        layer = None  # its reason is the chains' to tell
    found = Found(loss, logits, layer, deep)
    return unpaid("cross_entropy", node, root) or Match([*nodes], [node], found)


def _many(logits: Node) -> bool:
    """Whether there are classes enough for the layer to be part of the call."""
    spec = spec_of(logits)
    classes = None if spec is None else spec.shape[-1]
    return not isinstance(classes, int) or classes >= FEWEST


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    loss, target = found.loss, found.loss.target
    flat = build.call(torch.flatten, target) if found.deep else target
    setting = [put(build, v) for v in (loss.reduction, loss.ignore_index, loss.label_smoothing)]
    if found.layer is None:
        logits = build.call(torch.flatten, found.logits, 0, 1) if found.deep else found.logits
        op = torch.ops.recast.cross_entropy.default
        out = build.call(op, logits, flat, *setting, name="cross_entropy")
    else:
        op = torch.ops.recast.linear_cross_entropy.default
        args = _operands_of(found.layer, build)
        out = build.call(op, *args, flat, *setting, name="linear_cross_entropy")
    return [build.call(shaped_as, out, target) if found.deep else out]


def _operands_of(layer: Layer, build: Build) -> tuple[Any, Any, Any]:
    """x (N, D), W (C, D) and the bias."""
    x = layer.x
    for function, number in layer.scales:
        x = build.call(function, x, number)
    if rank(layer.x) != 2:
        x = build.call(torch.flatten, x, 0, -2)
    weight, bias = put(build, layer.weight), put(build, layer.bias)
    if layer.turned:
        weight = build.call(torch.transpose, weight, 0, 1)
    return x, weight, build.call(operator.neg, bias) if layer.minus else bias


def _worth(match: Match) -> str | None:
    size = bytes_of(match.found.loss.logits)
    passes = 4 if match.found.layer is None else 7
    return None if size is None else f"{human(passes * size)} of traffic a sample"


def _describe(match: Match) -> str:
    found: Found = match.found
    spec = spec_of(found.loss.logits)
    classes = None if spec is None else spec.shape[1]
    what = (
        f"a cross entropy of {classes} classes" if isinstance(classes, int) else "a cross entropy"
    )
    return what if found.layer is None else f"{what} and the layer before it: no logits are kept"


CROSS_ENTROPY = Rule(
    name="fuse-cross-entropy",
    equation="cross_entropy(x Wᵀ + b, y) => linear_cross_entropy(x, W, b, y)",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


@dataclass(frozen=True)
class FuseCrossEntropy:
    """cross_entropy(x Wᵀ + b, y) => linear_cross_entropy(x, W, b, y)

    Without the layer where somebody else reads the logits, or there are few. On a CPU only.
    """

    name: ClassVar[str] = "fuse-cross-entropy"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the cross entropies of ``graph``; returns their number."""
        return apply(graph, [CROSS_ENTROPY], context)
