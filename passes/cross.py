"""Cross networks: layers that multiply the first features with a projection of the last.

vectors     x' = x₀ * (x · w) + b + x            rows or columns, any product with a vector
            also (x₀ xᵀ) w, which writes a matrix a sample
matrices    x' = x₀ * (W x + b) + x              full, low rank U (V x), gated by σ(G x)

A network is read backwards from its last layer, as long as nothing else uses its inner values.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .cross_mixture import MIXTURE
from .cross_parts import (
    Projection,
    base,
    is_column,
    is_static,
    numbers,
    projection,
    row,
    shape,
    terms,
    through,
    weight_of,
    width,
)
from .leaf import Value, argument, human, plural, put, spec_of, unpaid

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_FAR = 12  # steps from a value to the end of the layer that starts from it


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its parts, and the node with its value."""

    node: Node
    x0: Node
    x: Node
    product: Projection
    gate: Projection | None
    outer: Value
    nodes: tuple[Node, ...]

    @property
    def kind(self) -> str:
        return "vector" if self.product.out == 1 else "matrix"


# ---------------------------------------------------------------- one layer


def read_layer(node: Node, root: nn.Module) -> Layer | None:
    """The layer whose value ``node`` is; None for anything else."""
    d = width(node)
    if d is None or d == 1:
        return None
    if is_call(node, torch.addcmul) and len(node.args) == 3 and not node.kwargs:
        return _added(node, d, root)
    if not is_call(node, operator.add):
        return None
    found, additions = terms(node)
    biases = [t for t in found if is_static(t)]
    if len(found) - len(biases) != 2 or len(biases) > 1 or any(numbers(b) != d for b in biases):
        return None
    moving = [t for t in found if t not in biases]
    if any(shape(t) != shape(node) for t in moving):
        return None
    for product, residual in (moving, moving[::-1]):
        crossed = _crossed(product, residual, d, root)
        if crossed is not None and sole_user(product) is not None:
            x0, part, gate, inner = crossed
            outer = biases[0] if biases else None
            nodes = (*inner, *additions[::-1])
            return Layer(node, x0, residual, part, gate, outer, nodes)
    return None


def _added(node: Node, d: int, root: nn.Module) -> Layer | None:
    """The layer ``addcmul(x, x₀, W x + b)``."""
    residual, *factors = (value for value in node.args if isinstance(value, Node))
    if len(factors) != 2 or shape(residual) != shape(node):
        return None
    crossed = _arranged(factors, (), residual, d, root)
    if crossed is None:
        return None
    x0, part, gate, inner = crossed
    return Layer(node, x0, residual, part, gate, None, (*inner, node))


Crossed = tuple[Node, Projection, Projection | None, tuple[Node, ...]]


def _crossed(node: Node, residual: Node, d: int, root: nn.Module) -> Crossed | None:
    """x₀, the projection of ``residual``, its gate, and the nodes that multiply them."""
    written = _outer(node, residual, d)
    if written is not None:
        return written
    if is_call(node, torch.bmm, torch.matmul) and is_column(node):
        first, second = node.args  # (B, d, 1) @ (B, 1, 1)
        if not isinstance(first, Node) or not isinstance(second, Node):
            return None
        if is_column(first) and shape(second)[1:] == (1, 1):
            return _arranged([first, second], (node,), residual, d, root)
        return None
    if is_call(node, torch.transpose) and len(shape(node)) == 2:
        return _turned(node, residual, d, root)
    factors, inner = _factors(node)
    if any(len(shape(factor)) < 2 for factor in factors):
        return None
    return _arranged(factors, tuple(inner), residual, d, root)


def _outer(node: Node, residual: Node, d: int) -> Crossed | None:
    """``(x₀ xᵀ) w``: a matrix (d, d) is written a sample, to be multiplied with a vector."""
    if not is_call(node, torch.matmul) or len(node.args) != 2:
        return None
    outer, weight = node.args
    if (
        not isinstance(weight, Node)
        or not is_static(weight)
        or numbers(weight) != d
        or shape(weight)[0] != d
    ):
        return None
    if not isinstance(outer, Node) or sole_user(outer) is None or shape(outer)[1:] != (d, d):
        return None
    if not is_call(outer, torch.bmm, operator.mul):
        return None
    x0, turned = outer.args
    if outer.target is operator.mul and is_call(x0, torch.unsqueeze) and shape(x0)[1:] == (1, d):
        x0, turned = turned, x0
    if not isinstance(x0, Node) or not is_column(x0) or width(x0) != d:
        return None
    if not isinstance(turned, Node) or shape(turned)[1:] != (1, d):
        return None
    x = argument(turned, 0, "input")
    if not is_call(turned, torch.unsqueeze) and not (
        is_call(turned, torch.transpose) and is_column(x)
    ):
        return None
    if base(x) is not base(residual):
        return None
    dead = (turned,) if sole_user(turned) is outer else ()
    part = Projection(x, (weight,), (False,), (None,), 1, (*dead, outer, node))
    return x0, part, None, part.nodes


def _turned(node: Node, residual: Node, d: int, root: nn.Module) -> Crossed | None:
    """``(x₀ᵀ * s)ᵀ`` with s: (B,)."""
    product = argument(node, 0, "input")
    if not is_call(product, operator.mul) or sole_user(product) is None:
        return None
    a, b = product.args
    for first, s in ((a, b), (b, a)):
        if not isinstance(s, Node) or len(shape(s)) != 1:
            continue
        if is_call(first, torch.transpose):
            x0 = argument(first, 0, "input")
            dead = (first,) if sole_user(first) is product else ()
            return _arranged([x0, s], (*dead, product, node), residual, d, root)
    return None


def _factors(node: Node) -> tuple[list[Node], list[Node]]:
    """``(factors, products)``, as :func:`terms`."""
    found: list[Node] = []
    products = [node]
    if not is_call(node, operator.mul):
        return [], []
    for part in node.args:
        if not isinstance(part, Node):
            return [], []
        inner = _factors(part) if sole_user(part) is node else ([], [])
        found += inner[0] or [part]
        products += inner[1]
    return found, products


def _arranged(
    factors: Sequence[Node], inner: tuple[Node, ...], residual: Node, d: int, root: nn.Module
) -> Crossed | None:
    if len(factors) not in (2, 3):
        return None
    for x0, product, *rest in itertools.permutations(factors):
        if width(x0) != d or (rest and rest[0] is x0):
            continue
        part, gate = _of(product, residual, d, root), None
        if part is None or (rest and part.out == 1):
            continue
        nodes = part.nodes
        if rest:
            gate = _gate(rest[0], residual, d, root)
            if gate is None:
                continue
            nodes = (*nodes, *gate.nodes, rest[0])
        return x0, part, gate, (*nodes, *inner)
    return None


def _of(node: Node, residual: Node, d: int, root: nn.Module) -> Projection | None:
    """The projection of ``residual`` to d numbers or to one, of full or low rank."""
    if sole_user(node) is None:
        return None
    for found in (projection(node, root), through(node, root)):
        if found is not None and base(found.source) is base(residual) and found.out in (1, d):
            return found
    return None


def _gate(node: Node, residual: Node, d: int, root: nn.Module) -> Projection | None:
    if not is_call(node, torch.sigmoid) or sole_user(node) is None:
        return None
    source = argument(node, 0, "input")
    found = projection(source, root) if sole_user(source) is not None else None
    plain = found is not None and base(found.source) is base(residual) and found.out == d
    return found if plain else None


# ---------------------------------------------------------------- networks


def _views(nodes: Sequence[Node], values: Sequence[Node]) -> list[Node]:
    """Row and column views of ``values`` that only ``nodes`` use."""
    inside = set(nodes)
    found: list[Node] = []
    for value in values:
        while base(value) is not value:
            if set(value.users) <= inside:
                inside.add(value)
                found.append(value)
            value = argument(value, 0, "input")
    return found


def _sources(layer: Layer) -> list[Node]:
    gate = [] if layer.gate is None else [layer.gate.source]
    return [layer.x0, layer.x, layer.product.source, *gate]


def _joins(before: Layer | None, after: Layer) -> bool:
    """Whether ``after`` starts where ``before`` ends, and nothing else does."""
    if before is None or base(after.x) is not before.node or before.kind != after.kind:
        return False
    if base(before.x0) is not base(after.x0):
        return False
    inside = {*after.nodes, *_views(after.nodes, _sources(after))}
    return set(before.node.users) <= inside


def _following(node: Node, root: nn.Module) -> Iterator[Layer]:
    """The layers that take ``node`` as their input."""
    reached = [node]
    for _ in range(_FAR):
        reached = list(dict.fromkeys(user for n in reached for user in n.users))[:64]
        for n in reached:
            layer = read_layer(n, root)
            if layer is not None and base(layer.x) is node:
                yield layer


def network_at(node: Node, root: nn.Module) -> list[Layer]:
    """The layers of the network that ends at ``node``; empty where it does not end there."""
    layer = read_layer(node, root)
    if layer is None or any(_joins(layer, after) for after in _following(node, root)):
        return []
    found = [layer]
    while True:
        before = read_layer(base(found[0].x), root)
        if before is None or not _joins(before, found[0]):
            return found
        found.insert(0, before)


def _match(node: Node, root: nn.Module) -> Answer:
    network = network_at(node, root)
    if not network:
        return _nearly(node, root)
    for layer in network:
        for part in (layer.product, layer.gate):
            if part is not None and part.miss is not None:
                return part.miss
    inner = [n for layer in network for n in layer.nodes]
    inner += _views(inner, [source for layer in network for source in _sources(layer)])
    user = sole_user(node)
    if is_column(node) and user is not None and base(user) is base(node) and user is not node:
        inner.append(user)
        node = user
    match = Match(list(dict.fromkeys(inner)), [node], network)
    return unpaid(f"cross_{network[0].kind}", node, root) or match


def _nearly(node: Node, root: nn.Module) -> Miss | None:
    """A Miss for a layer that adds back something other than its own input."""
    if not is_call(node, operator.add) or width(node) in (None, 1) or len(node.args) != 2:
        return None
    for product, residual in (node.args, node.args[::-1]):
        if not is_call(product, operator.mul) or not isinstance(residual, Node):
            continue
        if shape(product) != shape(residual) or is_static(residual):
            continue
        for x0, other in (product.args, product.args[::-1]):
            found = through(other, root) if isinstance(other, Node) else None
            if found is None or x0 is not residual or found.out != width(node):
                continue
            if base(found.source) is not base(residual):
                return Miss(
                    node,
                    f"a layer of {base(found.source).name}, but {residual.name} is added back",
                    ("x0 * linear(x) + x adds back what the layer starts from",),
                )
    return None


# ---------------------------------------------------------------- the replacement


def _rewrite(match: Match, build: Build) -> list[Node]:
    network: list[Layer] = match.found
    x0 = row(network[0].x0, build)
    x = x0 if base(network[0].x) is base(network[0].x0) else row(network[0].x, build)
    outer = [put(build, layer.outer) for layer in network]
    parts = [layer.product for layer in network]
    if network[0].kind == "vector":
        weights = [put(build, part.weights[0]) for part in parts]
        scalars = [put(build, part.biases[0]) for part in parts]
        out = build.call(
            torch.ops.recast.cross_vector.default, x0, x, weights, scalars, outer,
            name="cross_vector",
        )  # fmt: skip
    else:
        weights = [weight_of(part, k, build) for part in parts for k in range(len(part.weights))]
        inner = [put(build, bias) for part in parts for bias in part.biases]
        gates: list[Any] = []
        for layer in network:
            gate = layer.gate
            gates += [None, None] if gate is None else [
                weight_of(gate, 0, build), put(build, gate.biases[0]),
            ]  # fmt: skip
        depths = [len(part.weights) for part in parts]
        out = build.call(
            torch.ops.recast.cross_matrix.default, x0, x, weights, inner, gates, outer, depths,
            name="cross_matrix",
        )  # fmt: skip
    return [build.call(torch.unsqueeze, out, 2) if is_column(match.outputs[0]) else out]


def _describe(match: Match) -> str:
    network: list[Layer] = match.found
    low = sum(len(layer.product.weights) > 1 for layer in network)
    gated = sum(layer.gate is not None for layer in network)
    extras = [f"{low} of low rank"] * bool(low) + [f"{gated} gated"] * bool(gated)
    more = f" ({', '.join(extras)})" if extras else ""
    kind = "vectors" if network[0].kind == "vector" else "matrices"
    return f"a cross network of {plural(len(network), 'layer')} of {kind}{more} in one call"


def _worth(match: Match) -> str:
    network: list[Layer] = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    spec, d = spec_of(network[0].node), width(network[0].node)
    if spec is None or d is None:
        return launches
    passes = sum(3 * (len(layer.nodes) - len(layer.product.nodes)) - 4 for layer in network)
    if network[0].kind == "vector":
        passes += 5 * len(network) - 3
    saved = max(passes, 0) * d * spec.dtype.itemsize
    return f"{launches}, {human(saved)} of traffic a sample"


CROSS = Rule(
    name="fuse-cross",
    equation="x0 * (W x + b) + x, layer by layer => cross_matrix(x0, x, Ws, bs), or cross_vector",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


@dataclass(frozen=True)
class FuseCross:
    """x0 * (W x + b) + x, layer by layer => cross_matrix(x0, x, Ws, bs), or cross_vector

    Matrices may have full or low rank, and may be gated; when each W is a vector, all layers become
    one call. A mixture of nonlinear low-rank experts becomes cross_mixture, layer by layer.
    """

    name: ClassVar[str] = "fuse-cross"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the cross networks of ``graph``; returns their number."""
        return apply(graph, [CROSS, MIXTURE], context)
