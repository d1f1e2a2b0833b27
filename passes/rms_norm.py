"""RMS norms, by hand or torch's own: one call.

x * rsqrt(mean(x², -1, keepdim) + eps) * w         the root inverted or divided by, w in front
x.float() ... .type_as(x) * w                      rounded in between, as language models do
nn.RMSNorm, F.rms_norm                             over the last dimension alone
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule, apply

from .layer_norm import only_here
from .leaf import (
    Attr,
    Value,
    argument,
    arguments,
    bytes_of,
    differs,
    human,
    module_of,
    plural,
    put,
    reduction_of,
    spec_of,
    unpaid,
)

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_RMS_NORM = (("input", None), ("normalized_shape", None), ("weight", None), ("eps", None))


@dataclass(frozen=True, slots=True)
class Found:
    """The arguments of ``recast::rms_norm``."""

    x: Node
    weight: Value
    eps: Value
    rounding: str


# ---------------------------------------------------------------- by hand


def _powers(node: Any, exponent: float) -> Node | None:
    """x when ``node`` is x to ``exponent``."""
    raised = is_call(node, operator.pow, torch.pow) or is_method(node, "pow")
    if not raised or argument(node, 1, "exponent") != exponent:
        return None
    x = argument(node, 0, "input")
    return x if isinstance(x, Node) else None


def _function(node: Any, name: str) -> Node | None:
    """x when ``node`` is ``torch.<name>(x)`` or ``x.<name>()``."""
    if not is_call(node, getattr(torch, name)) and not is_method(node, name):
        return None
    x = argument(node, 0, "input")
    return x if isinstance(x, Node) else None


def _root(node: Any) -> Node | None:
    return _function(node, "sqrt") or _powers(node, 0.5)


def _inverse_root(node: Any) -> tuple[Node, tuple[Node, ...]] | None:
    """``(t, nodes)`` when ``node`` is one over the square root of t."""
    below = _function(node, "rsqrt") or _powers(node, -0.5)
    if below is not None:
        return below, (node,)
    root: Any = _function(node, "reciprocal")
    if root is None and is_call(node, operator.truediv) and node.args[0] == 1:
        root = node.args[1]
    below = _root(root)
    return None if below is None else (below, (root, node))


def _scaled(node: Node) -> tuple[Node, Node, tuple[Node, ...]] | None:
    """``(x, t, nodes)`` when ``node`` is x over the square root of t."""
    given: Any = node.args
    if len(given) != 2 or not all(isinstance(a, Node) for a in given):
        return None
    if is_call(node, operator.truediv):
        x, root = given
        below = _root(root)
        return None if below is None else (x, below, (root, node))
    if not is_call(node, operator.mul):
        return None
    for x, factor in (given, given[::-1]):
        inverse = _inverse_root(factor)
        if inverse is not None:
            return x, inverse[0], (*inverse[1], node)
    return None


def _square_of(node: Any) -> Node | None:
    if is_call(node, operator.mul) and len(node.args) == 2 and node.args[0] is node.args[1]:
        return node.args[0] if isinstance(node.args[0], Node) else None
    return _powers(node, 2) or _function(node, "square")


def _mean_square(node: Any, x: Node) -> tuple[float, tuple[Node, ...]] | None:
    """``(eps, nodes)`` when ``node`` is the mean of the squares of x's rows, and eps."""
    if not is_call(node, operator.add) or len(node.args) != 2:
        return None
    mean: Any
    eps: Any
    one, two = node.args
    mean, eps = (two, one) if isinstance(one, (int, float)) else (one, two)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or eps <= 0:
        return None
    nodes: tuple[Node, ...] = (node,)
    opened = is_call(mean, torch.unsqueeze)
    if opened:
        nodes, mean = (*nodes, mean), argument(mean, 0, "input")
    found = reduction_of(mean, "mean")
    spec, kept = spec_of(x), spec_of(node)
    if found is None or spec is None or kept is None or _square_of(found.source) is not x:
        return None
    last = len(spec.shape) - 1
    if found.dim % len(spec.shape) != last or bool(found.keepdim) is opened:
        return None
    if kept.shape != (*spec.shape[:-1], 1):
        return None
    return float(eps), (*nodes, mean, found.source)


def _match_by_hand(node: Node, root: nn.Module) -> Answer:
    scaled = _scaled(node)
    if scaled is None:
        return None
    x, below, nodes = scaled
    mean = _mean_square(below, x)
    spec = spec_of(x)
    if mean is None or spec is None or not spec.dtype.is_floating_point:
        return None
    if not isinstance(spec.shape[-1], int):
        return None
    eps, more = mean
    inner = [*more, below, *nodes]
    last, rounding = node, "none"
    cast = sole_user(last)
    narrow = None if cast is None else _rounded(cast, last, x)
    if cast is not None and narrow is not None:
        inner.append(cast)
        last = cast
        if narrow is not x:
            x, rounding = narrow, "unit"
            inner.insert(0, scaled[0])
    weight: Value = None
    product = sole_user(last)
    if product is not None and is_call(product, operator.mul) and len(product.args) == 2:
        other: Any = product.args[0] if product.args[1] is last else product.args[1]
        if _is_weight(other, spec.shape[-1]):
            weight, last = other, product
    nodes_here = only_here([n for n in inner if n is not last], last)
    match = Match([*nodes_here, last], [last], Found(x, weight, eps, rounding))
    return unpaid("rms_norm", node, root) or match


def _rounded(cast: Node, unit: Node, x: Node) -> Node | None:
    """What the norm is of when its result goes through ``cast``: x, or what x was cast from.

    None where ``cast`` is none, or to a dtype that is not the input's own.
    """
    if not is_method(x, "float") or len(x.args) != 1:
        return None
    if is_method(cast, "float") and cast.args == (unit,):
        return x  # it is float32 already
    source = x.args[0]
    back = is_method(cast, "type_as") and cast.args == (unit, source)
    return source if back and isinstance(source, Node) else None


def _is_weight(node: Any, size: int) -> bool:
    spec = spec_of(node)
    return spec is not None and spec.shape == (size,) and spec.dtype.is_floating_point


# ---------------------------------------------------------------- torch's own


def _match_own(node: Node, root: nn.Module) -> Answer:
    read = _own(node, root)
    if not isinstance(read, tuple):
        return read
    shape, found = read
    spec = spec_of(found.x)
    if spec is None or not spec.dtype.is_floating_point or tuple(shape) != spec.shape[-1:]:
        return None  # over several dimensions
    return unpaid("rms_norm", node, root) or Match([node], [node], found)


def _own(node: Node, root: nn.Module) -> Any:
    """``(normalized_shape, Found)``, a Miss, or None."""
    module = module_of(node, root)
    if isinstance(module, nn.RMSNorm):
        path = str(node.target)
        weight = None if module.weight is None else Attr(f"{path}.weight")
        found = Found(argument(node, 0, "input"), weight, Attr(f"{path}.eps"), "torch")
        return differs(node, module, nn.RMSNorm) or (module.normalized_shape, found)
    if module is not None or not is_call(node, F.rms_norm, torch.rms_norm):
        return None
    x, shape, weight, eps = arguments(node, _RMS_NORM)
    known = isinstance(shape, (list, tuple)) and (eps is None or isinstance(eps, float))
    plain = weight is None or isinstance(weight, Node)
    return (shape, Found(x, weight, eps, "torch")) if known and plain else None


# ---------------------------------------------------------------- the rewrite


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    weight, eps = put(build, found.weight), put(build, found.eps)
    target = torch.ops.recast.rms_norm.default
    return [build.call(target, found.x, weight, eps, found.rounding, name="rms_norm")]


def _worth(match: Match) -> str:
    found: Found = match.found
    count = max(len(match.nodes), 6) - 1  # torch's own makes six passes too
    size = bytes_of(found.x)
    passes = plural(count, "pass")
    return passes if size is None else f"{passes} over {human(size)} a sample"


def _describe(match: Match) -> str:
    spec = spec_of(match.found.x)
    size = "" if spec is None else f" over {spec.shape[-1]}"
    return f"an RMS norm{size} in one call"


BY_HAND = Rule(
    name="fuse-rms-norm",
    equation="x * rsqrt(mean(x²) + eps) * w => rms_norm(x, w, eps)",
    match=_match_by_hand,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)
OWN = Rule(
    name="fuse-rms-norm",
    equation="F.rms_norm(x, (n,), w, eps) => rms_norm(x, w, eps)",
    match=_match_own,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


@dataclass(frozen=True)
class FuseRmsNorm:
    """x * rsqrt(mean(x²) + eps) * w => rms_norm(x, w, eps)

    By hand, with the roundings of language models or without them, nn.RMSNorm and F.rms_norm; on a
    CPU only.
    """

    name: ClassVar[str] = "fuse-rms-norm"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the RMS norms of ``graph``; returns their number."""
        return apply(graph, [BY_HAND, OWN], context)
