"""Cross layers that are mixtures of nonlinear experts of low rank, in the ways they are written.

loops       bmm(stack([x₀ * (U_e h_e + b) for e], 2), softmax(stack(gates, 1), 1)) + x
sums        sum(stack([x₀ * (U_e h_e + b) for e], 1) * softmax(gate(x)).unsqueeze(2), 1) + x
einsums     x₀ * sum(einsum(U, h) * softmax(gate(x)).unsqueeze(2), 1) + b + x
one expert  x₀ * (U h + b) + x,  h = act(C act(V x))
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from recast.rewriter.ir import Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule

from .cross_experts import (
    Experts,
    Gates,
    Stack,
    Turned,
    batched,
    count_of,
    expert,
    gates_of,
    listed,
)
from .cross_parts import base, is_column, is_static, numbers, row, rows, shape, terms, width
from .leaf import (
    Value,
    argument,
    einsum_of,
    human,
    plural,
    put,
    reduction_of,
    spec_of,
    unpaid,
)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A whole layer."""

    x0: Node
    experts: Experts
    gates: Gates | None
    outer: Value
    nodes: tuple[Node, ...]
    product: bool = False  # the mixture is the result of a matrix product, which autocast casts


# ---------------------------------------------------------------- the layer


_Mixed = tuple[Experts, Gates, tuple[Node, ...], bool]


def _mixed(node: Node, root: nn.Module) -> _Mixed | None:
    """``Σ_e gate_e · expert_e``: (B, d) or (B, d, 1); and whether that is a matrix product."""
    product = is_call(node, torch.bmm, torch.matmul, torch.einsum)
    if is_call(node, torch.bmm, torch.matmul):
        stack, gate = node.args
        experts = listed(stack, root) if isinstance(stack, Node) else None
        inner: tuple[Node, ...] = ()
    else:
        weighed = _summed(node) or _einsum(node)
        if weighed is None:
            return None
        stack, gate, along, inner = weighed
        experts = batched(stack, root) if along == 1 else None
        experts = experts or (listed(stack, root, along) if isinstance(stack, Node) else None)
        sizes = shape(gate)[1:]
        wide = along if len(sizes) == 2 else 0  # the gate's own dimension of the experts
        if experts is None or len(sizes) not in (1, 2) or sizes[wide - 1] != count_of(experts):
            return None
        if len(sizes) == 2 and sizes[2 - wide] != 1:
            return None  # it weighs more than the experts
    if experts is None:
        return None
    gates = gates_of(gate, experts, count_of(experts), root)
    return None if gates is None else (experts, gates, (*inner, node), product)


_Weighed = tuple[Any, Any, int, tuple[Node, ...]]


def _summed(node: Node) -> _Weighed | None:
    """``(stack, gate, along, nodes)`` of ``sum(stack * gate, along)``."""
    found = reduction_of(node, "sum")
    if found is None or found.keepdim or len(shape(found.source)) != 3:
        return None
    product, along = found.source, found.dim % 3
    if not is_call(product, operator.mul) or along == 0 or sole_user(product) is None:
        return None
    first, second = product.args
    made = torch.stack, torch.cat, torch.einsum
    if is_call(second, *made) or (is_call(first, torch.unsqueeze) and not is_call(first, *made)):
        first, second = second, first
    if shape(first) != shape(product) or len(shape(second)) != 3:
        return None
    return first, second, along, (product,)


def _einsum(node: Node) -> _Weighed | None:
    """The same by ``einsum("be,ben->bn", gate, stack)``."""
    found = einsum_of(node)
    if found is None or len(found.operands) != 2:
        return None
    (gate, stack), (weights, values) = found.terms, found.operands
    if len(gate) == 3:
        gate, stack, weights, values = stack, gate, values, weights
    if len({*gate}) != 2 or len({*stack}) != 3 or (len(gate), len(stack)) != (2, 3):
        return None
    batch, expert = tuple(gate)
    if stack[0] != batch or expert not in stack[1:]:
        return None
    kept = stack.replace(expert, "")
    return (values, weights, stack.index(expert), ()) if found.output == kept else None


def _read(node: Node, root: nn.Module) -> Mixture | None:
    """The layer whose value ``node`` is."""
    d = width(node)
    if not is_call(node, operator.add) or d is None or d == 1:
        return None
    found, additions = terms(node)
    biases = [t for t in found if is_static(t)]
    moving = [t for t in found if t not in biases]
    if len(moving) != 2 or len(biases) > 1 or any(numbers(b) != d for b in biases):
        return None
    outer = biases[0] if biases else None
    for product, residual in (moving, moving[::-1]):
        layer = _layer(product, root)
        if layer is None or base(layer.experts.x) is not base(residual):
            continue
        if sole_user(product) is None or width(layer.x0) != d or rows(layer.x0) != rows(node):
            continue
        return replace(layer, outer=outer, nodes=(*layer.nodes, *additions[::-1]))
    return None


def _layer(product: Node, root: nn.Module) -> Mixture | None:
    """x₀ times the mixture; x₀ may stand within it."""
    views: list[Node] = []
    while base(product) is not product and sole_user(product) is not None:
        views.append(product)
        product = argument(product, 0, "input")
    mixed = _mixed(product, root)
    if mixed is not None and mixed[0].x0 is not None:
        experts, gates, nodes, cast = mixed
        found = (*experts.nodes, *gates.nodes, *nodes, *views)
        return Mixture(mixed[0].x0, experts, gates, None, found, cast)
    if not is_call(product, operator.mul):
        return None
    for x0, inner in (product.args, product.args[::-1]):
        if not isinstance(inner, Node) or not isinstance(x0, Node) or sole_user(inner) is None:
            continue
        mixed = _mixed(inner, root)
        if mixed is not None and mixed[0].x0 is None:
            experts, gates, nodes, cast = mixed
            found = (*experts.nodes, *gates.nodes, *nodes, product, *views)
            return Mixture(x0, experts, gates, None, found, cast)
        one = expert(inner, root)
        if one is not None:
            cast = one.inner is not None and not is_call(inner, operator.add)  # a Linear's own bias
            return Mixture(x0, one, None, None, (*one.nodes, product, *views), cast)
    return None


def _match(node: Node, root: nn.Module) -> Answer:
    found = _read(node, root)
    if found is None:
        return None
    if found.experts.miss is not None:
        return found.experts.miss
    match = Match(list(dict.fromkeys(found.nodes)), [node], found)
    return unpaid("cross_mixture", node, root) or match


# ---------------------------------------------------------------- the replacement


def _stacked(values: Sequence[Any], build: Build) -> Any:
    """(E, ..) of one matrix an expert: the parameter itself where they are all of its parts."""
    plain = [value.value if isinstance(value, Turned) else value for value in values]
    turned = [isinstance(value, Turned) for value in values]
    for k, value in enumerate(plain):
        while is_call(value, torch.transpose) and set(value.args[1:]) == {0, 1}:
            value, turned[k] = value.args[0], not turned[k]
        plain[k] = value
    if len(plain) == 1 and len(shape(plain[0])) == 3:
        whole = plain[0]
    elif (parent := _parent(plain)) is not None and len(set(turned)) == 1:
        whole = parent
    else:
        each = [put(build, value) for value in plain]
        each = [
            build.call(torch.transpose, value, 0, 1) if turn else value
            for value, turn in zip(each, turned, strict=True)
        ]
        if len(each) == 1:
            return build.call(torch.unsqueeze, each[0], 0)
        return build.call(torch.stack, each, 0)
    return build.call(torch.transpose, whole, 1, 2) if turned[0] else whole


def _parent(values: Sequence[Any]) -> Node | None:
    """P where ``values`` are P[0], P[1] .. to the last."""
    parents: set[Any] = set()
    for k, value in enumerate(values):
        if not is_call(value, operator.getitem) or value.args[1] != k:
            return None
        parents.add(value.args[0])
    parent = parents.pop() if len(parents) == 1 else None
    sizes = shape(parent)
    whole = isinstance(parent, Node) and len(sizes) == 3 and sizes[0] == len(values)
    return parent if whole else None


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Mixture = match.found
    experts, gates = found.experts, found.gates
    x0 = row(found.x0, build)
    x = x0 if base(experts.x) is base(found.x0) else row(experts.x, build)
    core = _stacked(experts.core, build) if experts.core else None
    weight = bias = None
    if gates is not None:
        weight, bias = _joined(gates.weights, build), _joined(gates.biases, build)
        if len(gates.weights) > 1:
            weight = build.call(torch.reshape, weight, (len(gates.weights), -1))
            bias = None if bias is None else build.call(torch.reshape, bias, (-1,))
    out = build.call(
        torch.ops.recast.cross_mixture.default, x0, x, _stacked(experts.v, build), core,
        _stacked(experts.u, build), weight, bias, put(build, experts.inner),
        put(build, found.outer), experts.activation, *(put(build, v) for v in experts.dropout),
        *([True] * found.product), name="cross_mixture",
    )  # fmt: skip
    return [build.call(torch.unsqueeze, out, 2) if is_column(match.outputs[0]) else out]


def _joined(values: Stack, build: Build) -> Any:
    each = [put(build, value) for value in values]
    return (build.call(torch.stack, each, 0) if len(each) > 1 else each[0]) if each else None


def _describe(match: Match) -> str:
    found: Mixture = match.found
    experts = plural(count_of(found.experts), "expert")
    return f"a cross layer that mixes {experts} of low rank in one call"


def _worth(match: Match) -> str:
    found: Mixture = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    spec, d = spec_of(found.x0), width(found.x0)
    if spec is None or d is None:
        return launches
    saved = 3 * 2 * count_of(found.experts) * d * spec.dtype.itemsize
    return f"{launches}, {human(saved)} of traffic a sample"


MIXTURE = Rule(
    name="fuse-cross-mixture",
    equation="x0 * sum(softmax(G x)_e U_e act(C_e act(V_e x))) + x => cross_mixture(x0, x, ..)",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)
