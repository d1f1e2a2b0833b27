"""Layer norms written by hand: torch's own.

    c = x - mean(x, -1)
    c / sqrt(k Σ_last c² + e)  =  layer_norm(x, e / (k n)) / sqrt(k n)        n = x.shape[-1]
    that * weight + bias                                                      parameters of (n,)

k is 1 for a sum, 1/n for a mean or a biased variance, 1/(n - 1) for an unbiased one; what is added
before a sum counts n times in e. Some twelve passes over memory become one, and so do about twenty
of backward. With e = 0 nothing is rewritten: the gradient of equal numbers would differ.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.layers.affine_layer_norm import affine_layer_norm

from .leaf import argument, bytes_of, extra, human, plural, spec_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True, slots=True)
class Found:
    """``layer_norm(x, eps) * scale * weight + bias``, over the last ``size`` numbers."""

    x: Node
    size: int
    eps: float
    scale: float
    weight: Node | None = None
    bias: Node | None = None


@dataclass(frozen=True, slots=True)
class _Spread:
    """``k Σ c² + e`` of the centred rows, and the nodes that compute it."""

    k: float
    e: float


class _Reader:
    """Reads the denominator of one division; collects the nodes it is made of."""

    def __init__(self, x: Node, centred: Node, mean: Node, size: int) -> None:
        self.x, self.centred, self.mean, self.size = x, centred, mean, size
        self.nodes: list[Node] = []

    def root(self, node: Any) -> Node | None:
        """What ``node`` is the square root of, seen through unsqueeze."""
        node = self._bare(node)
        if is_call(node, torch.sqrt) or is_method(node, "sqrt"):
            return self._enter(node)
        half = is_call(node, operator.pow, torch.pow) or is_method(node, "pow")
        return self._enter(node) if half and argument(node, 1, "exponent") == 0.5 else None

    def spread(self, node: Any) -> _Spread | None:
        """``node`` as ``k Σ c² + e``."""
        node = self._bare(node)
        constant = self._constant(node)
        if constant is not None:
            inner = self.spread(constant[0])
            return None if inner is None else _Spread(inner.k, inner.e + constant[1])
        if not isinstance(node, Node) or (reduced := _reduced(node)) is None:
            return None
        name, source = reduced
        self.nodes.append(node)
        if name == "var":
            free = _correction(node)
            known = source is self.x and free is not None and self.size > free
            return _Spread(1 / (self.size - free), 0.0) if known and free is not None else None
        constant = self._constant(source)
        square, e = (source, 0.0) if constant is None else constant
        if not self._squares(square):
            return None
        return _Spread(1.0, e * self.size) if name == "sum" else _Spread(1 / self.size, e)

    def _enter(self, node: Node) -> Node | None:
        self.nodes.append(node)
        source = argument(node, 0, "input")
        return source if isinstance(source, Node) else None

    def _bare(self, node: Any) -> Any:
        while is_call(node, torch.unsqueeze):
            self.nodes.append(node)
            node = argument(node, 0, "input")
        return node

    def _constant(self, node: Any) -> tuple[Any, float] | None:
        """``(a, e)`` when ``node`` is ``a + e``."""
        if not is_call(node, operator.add) or len(node.args) != 2:
            return None
        numbers = [a for a in node.args if isinstance(a, (int, float))]
        others = [a for a in node.args if isinstance(a, Node)]
        if len(numbers) != 1 or len(others) != 1:
            return None
        self.nodes.append(node)
        return others[0], float(numbers[0])

    def _squares(self, node: Any) -> bool:
        """Whether ``node`` is the square of the centred rows."""
        if is_call(node, operator.mul):
            found = all(self._centred(a) for a in node.args)
        elif is_call(node, torch.pow, operator.pow) or is_method(node, "pow"):
            two = argument(node, 1, "exponent") in (2, 2.0)
            found = two and self._centred(argument(node, 0, "input"))
        else:
            square = is_call(node, torch.square) or is_method(node, "square")
            found = square and self._centred(argument(node, 0, "input"))
        if found:
            self.nodes.append(node)
        return found

    def _centred(self, node: Any) -> bool:
        """Whether ``node`` is the centred rows, or the same subtraction again."""
        if node is self.centred:
            return True
        again = is_call(node, operator.sub) and tuple(node.args) == tuple(self.centred.args)
        if again:
            self.nodes.append(node)
        return again


def _reduced(node: Node) -> tuple[str, Any] | None:
    """``("sum" | "mean" | "var", source)`` of a reduction over the last dimension alone."""
    for name in ("sum", "mean", "var"):
        if is_call(node, getattr(torch, name)) or is_method(node, name):
            break
    else:
        return None
    source = argument(node, 0, "input")
    spec, dim = spec_of(source), argument(node, 1, "dim", node.kwargs.get("axis"))
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        (dim,) = dim
    if spec is None or not isinstance(dim, int) or isinstance(dim, bool):
        return None
    if name != "var" and extra(node, 3, "input", "dim", "axis", "keepdim"):
        return None
    return (name, source) if dim % len(spec.shape) == len(spec.shape) - 1 else None


def _correction(node: Node) -> int | None:
    """What a variance subtracts from the number of values before it divides by it."""
    if extra(node, 4, "input", "dim", "unbiased", "correction", "keepdim"):
        return None
    if "correction" in node.kwargs:
        given = node.kwargs["correction"]
        return given if isinstance(given, int) and given in (0, 1) else None
    unbiased = argument(node, 2, "unbiased", True)
    return int(unbiased) if isinstance(unbiased, bool) else None


def _mean_of(node: Any, within: list[Node]) -> Node | None:
    """x when ``node`` is the mean of its rows, seen through unsqueeze."""
    while is_call(node, torch.unsqueeze):
        within.append(node)
        node = argument(node, 0, "input")
    reduced = _reduced(node) if isinstance(node, Node) else None
    if reduced is None or reduced[0] != "mean" or not isinstance(reduced[1], Node):
        return None
    within.append(node)
    return reduced[1]


def _quotient(node: Node) -> tuple[Any, Any, bool] | None:
    """``(a, b, whether b is already the inverse)`` when ``node`` divides a by b."""
    if is_call(node, operator.truediv):
        return (*node.args, False)  # type: ignore[return-value]
    if not is_call(node, operator.mul):
        return None
    for one, two in (node.args, node.args[::-1]):
        if is_call(two, torch.rsqrt) or is_method(two, "rsqrt"):
            return one, two, True
    return None


def _match(node: Node, root: nn.Module) -> Answer:
    quotient = _quotient(node)
    if quotient is None:
        return None
    centred, below, inverse = quotient
    if not inverse and (miss := _by_deviation(node, centred, below)) is not None:
        return miss
    if not is_call(centred, operator.sub) or len(centred.args) != 2:
        return None
    x, mean = centred.args
    within: list[Node] = []
    spec = spec_of(x)
    if spec is None or not isinstance(x, Node) or not isinstance(mean, Node):
        return None
    if _mean_of(mean, within) is not x:
        return None
    size, below_spec = spec.shape[-1], spec_of(below)
    if not isinstance(size, int) or size < 2 or not spec.dtype.is_floating_point:
        return None
    kept = (*spec.shape[:-1], 1)
    mean_spec = spec_of(mean)
    if any(s is None or s.shape != kept for s in (mean_spec, below_spec)):
        return None  # of something else than its own row
    reader = _Reader(x, centred, mean, size)
    under = reader._enter(below) if inverse else reader.root(below)
    spread = None if under is None else reader.spread(under)
    if spread is None:
        return None
    if spread.e <= 0:
        return Miss(
            node,
            "a layer norm without a positive epsilon, whose gradient at equal numbers differs",
            ("add an epsilon below the root", "nn.LayerNorm"),
        )
    kn = spread.k * size
    inner = [*reader.nodes, centred, *within]
    weight, product = _vector(node, operator.mul, size)
    bias, total = (None, product) if weight is None else _vector(product, operator.add, size)
    found = Found(x, size, spread.e / kn, kn**-0.5, weight, bias)
    own = [*only_here(inner, node), *dict.fromkeys((node, product, total))]
    return Match(own, [total], found)


def _vector(node: Node, target: Any, size: int) -> tuple[Node | None, Node]:
    """``(v, next)`` where alone ``next = target(node, v)``, or the other way round, reads ``node``,
    and v is a parameter of ``size`` numbers; else ``(None, node)``.
    """
    user = sole_user(node)
    if user is None or not is_call(user, target) or len(user.args) != 2:
        return None, node
    other = user.args[1] if user.args[0] is node else user.args[0]
    spec = spec_of(other)
    if not isinstance(other, Node) or other.op != "get_attr" or spec is None:
        return None, node
    return (other, user) if spec.shape == (size,) else (None, node)


def _by_deviation(node: Node, above: Any, below: Any) -> Miss | None:
    """Centred rows, scaled or not, over their standard deviation and a constant."""
    if is_call(above, operator.mul):
        above = next((a for a in above.args if is_call(a, operator.sub)), None)
    if is_call(below, operator.add):
        below = next((a for a in below.args if isinstance(a, Node)), None)
    if not is_call(above, operator.sub) or not (
        is_call(below, torch.std) or is_method(below, "std")
    ):
        return None
    x = argument(below, 0, "input")
    if above.args[0] is not x or len(above.args) != 2 or _mean_of(above.args[1], []) is not x:
        return None
    return Miss(
        node,
        "it divides by a standard deviation to which a constant may be added; a layer norm of"
        " torch's divides by the root of the biased variance and a constant",
        ("nn.LayerNorm, if the numbers may change a little",),
    )


def only_here(inner: Sequence[Node], last: Node) -> list[Node]:
    """Those of ``inner`` that nothing but ``last`` is computed from."""
    kept = set(inner) | {last}
    while True:
        escaping = {n for n in kept if n is not last and not set(n.users) <= kept}
        if not escaping:
            return [n for n in dict.fromkeys(inner) if n in kept]
        kept -= escaping


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    weight = found.weight
    if weight is not None:
        if abs(found.scale - 1) > 1e-12:
            weight = build.call(operator.mul, weight, found.scale)
        return [build.call(affine_layer_norm, found.x, weight, found.bias, found.eps)]
    if abs(found.scale - 1) > 1e-12:
        weight = build.call(torch.Tensor.new_full, found.x, (found.size,), found.scale)
    norm = build.call(
        F.layer_norm, found.x, (found.size,), weight, None, found.eps, name="layer_norm"
    )
    return [norm]


def _worth(match: Match) -> str:
    found: Found = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    size = bytes_of(found.x)
    if size is None:
        return launches
    return f"{launches}, up to {human(2 * (len(match.nodes) - 1) * size)} a sample"


LAYER_NORM = Rule(
    name="fuse-layer-norm",
    equation="c / sqrt(mean(c²) + eps), c = x - mean(x) => layer_norm(x, eps)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: f"a layer norm over {match.found.size}, by hand, as torch's own",
    worth=_worth,
)


@dataclass(frozen=True)
class FuseLayerNorm:
    """c / sqrt(mean(c²) + eps), c = x - mean(x) => layer_norm(x, eps)

    Sums, means and variances of the last dimension; scaled where they are no means, and by a weight
    and a bias where the model does so.
    """

    name: ClassVar[str] = "fuse-layer-norm"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the layer norms of ``graph``; returns their number."""
        return apply(graph, [LAYER_NORM], context)
