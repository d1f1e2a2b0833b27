"""Cross networks: layers that multiply the first features with a projection of the last.

vectors     x' = x₀ * (x · w) + b + x            rows or columns, any product with a vector
            also (x₀ xᵀ) w, which writes a matrix a sample
matrices    x' = x₀ * (W x + b) + x              full, low rank U (V x), gated by σ(G x)

A network is read backwards from its last layer, as long as nothing else uses its inner values.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.layers.as_product import promoted

from .cross_layer import Layer, read_layer
from .cross_mixture import MIXTURE
from .cross_parts import (
    base,
    is_column,
    is_static,
    row,
    shape,
    through,
    weight_of,
    width,
)
from .leaf import argument, human, plural, put, spec_of, unpaid

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_FAR = 12  # steps from a value to the end of the layer that starts from it


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
    gated = [*parts, *(layer.gate for layer in network if layer.gate is not None)]
    if any(part.summed for part in gated):  # the sum is of the dtype of its weights
        like = put(build, parts[0].weights[0])
        start = build.call(promoted, x0, like)
        x0, x = start, start if x is x0 else build.call(promoted, x, like)
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
