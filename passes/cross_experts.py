"""Nonlinear experts of low rank and the gates that weigh them, in the ways they are written.

loops       stack([x₀ * (U_e act(C_e act(V_e x)) + b) for e], 2), softmax(stack(gates, 1), 1)
einsums     dropout(einsum("eij,bej->bei", U, act(..))), softmax(gate(x), 1).unsqueeze(2)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Miss

from .cross_parts import Projection, base, is_static, numbers, projection, shape
from .leaf import Attr, Value, argument, differs, einsum_of, module_of

_ACTIVATIONS = {torch.tanh: "tanh", torch.relu: "relu", torch.sigmoid: "sigmoid"}
Stack = tuple[Value, ...]  # one matrix an expert, or one (E, ..) of all


@dataclass(frozen=True, slots=True)
class Turned:
    """A matrix that is given as (in, out)."""

    value: Value


@dataclass(frozen=True, slots=True)
class Experts:
    """``φ(C φ(V x))`` and U, for all experts."""

    x: Node
    v: Stack
    core: Stack
    u: Stack
    activation: str
    nodes: tuple[Node, ...]
    inner: Value = None
    dropout: tuple[Value, Value] = (0.0, False)  # p, training
    x0: Node | None = None  # where each expert is multiplied with it
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Gates:
    """The softmax over experts."""

    weights: Stack
    biases: Stack
    nodes: tuple[Node, ...]


def count_of(experts: Experts) -> int:
    first = experts.v[0]
    sizes = shape(first.value if isinstance(first, Turned) else first)
    return sizes[0] if len(experts.v) == 1 and len(sizes) == 3 else len(experts.v)


# ---------------------------------------------------------------- experts


def _activated(node: Any) -> tuple[Node, str, tuple[Node, ...]] | None:
    """``(x, φ, nodes)`` where ``node`` is φ(x)."""
    if not isinstance(node, Node) or sole_user(node) is None:
        return None
    for function, name in _ACTIVATIONS.items():
        if is_call(node, function):
            source = argument(node, 0, "input")
            return (source, name, (node,)) if isinstance(source, Node) else None
    return node, "none", ()


def expert(node: Node, root: nn.Module) -> Experts | None:
    """One expert: U act(C act(V x)) + b, or without C; at least one act."""
    last = projection(node, root)
    if last is None or last.out <= 1:
        return None
    parts, acts = [last], []
    nodes = [*last.nodes]
    while len(parts) < 3:
        found = _activated(parts[-1].source)
        if found is None:
            break
        before = projection(found[0], root)
        if before is None or before.out <= 1:
            break
        parts.append(before)
        acts.append(found[1])
        nodes += [*found[2], *before.nodes]
    inner = [part for part in parts[1:] if part.biases[0] is not None]
    if len(parts) < 2 or inner or len(set(acts)) != 1 or acts[0] == "none":
        return None
    miss = next((part.miss for part in parts if part.miss is not None), None)
    return Experts(
        parts[-1].source,
        (_value(parts[-1]),), tuple(_value(part) for part in parts[1:-1]), (_value(last),),
        acts[0], tuple(nodes), last.biases[0], miss=miss,
    )  # fmt: skip


def _value(part: Projection) -> Any:
    return Turned(part.weights[0]) if part.turned[0] else part.weights[0]


def listed(stack: Node, root: nn.Module, along: int = 2) -> Experts | None:
    """``stack([x₀ * (U_e h_e + b) ..], along)``, and without x₀: (B, d, E), or (B, E, d)."""
    if not is_call(stack, torch.stack, torch.cat) or sole_user(stack) is None:
        return None
    if argument(stack, 1, "dim", 0) not in (along, along - 3) or len(shape(stack)) != 3:
        return None
    found = [_crossed(part, root) for part in argument(stack, 0, "tensors")]
    whole = [one for one in found if one is not None]
    if len(whole) != len(found) or len(whole) < 2:
        return None
    first = whole[0]
    for one in whole[1:]:
        same = base(one.x) is base(first.x) and one.activation == first.activation
        crossed = (one.x0 is None) == (first.x0 is None) and (
            one.x0 is None or first.x0 is None or base(one.x0) is base(first.x0)
        )
        if not same or not crossed or one.inner is not first.inner:
            return None
        if len(one.core) != len(first.core):
            return None
    return replace(
        first,
        v=tuple(v for one in whole for v in one.v),
        core=tuple(c for one in whole for c in one.core),
        u=tuple(u for one in whole for u in one.u),
        nodes=(*(n for one in whole for n in one.nodes), stack),
        miss=next((one.miss for one in whole if one.miss is not None), None),
    )


def _crossed(node: Any, root: nn.Module) -> Experts | None:
    """``x₀ * (U_e h_e + b)`` or ``U_e h_e + b``, in rows or columns."""
    views: list[Node] = []
    while is_call(node, torch.squeeze, torch.unsqueeze) and base(node) is not node:
        if sole_user(node) is None:
            return None
        views.append(node)
        node = argument(node, 0, "input")
    if not isinstance(node, Node) or sole_user(node) is None:
        return None
    if not is_call(node, operator.mul):
        plain = expert(node, root)
        return None if plain is None else replace(plain, nodes=(*plain.nodes, *views))
    for x0, product in (node.args, node.args[::-1]):
        if not isinstance(product, Node) or not isinstance(x0, Node) or sole_user(product) is None:
            continue
        found = expert(product, root)
        if found is not None:
            return replace(found, x0=x0, nodes=(*found.nodes, node, *views))
    return None


def batched(node: Any, root: nn.Module) -> Experts | None:
    """Einsums over all experts: V (E, r, d), C (E, r, r), U (E, d, r); and a dropout: (B, E, d).

    Or that multiplied with x₀, and a bias within.
    """
    if not isinstance(node, Node):
        return None
    if is_call(node, operator.mul, operator.add) and sole_user(node) is not None:
        return _around(node, root)
    dropout: tuple[Value, Value] = (0.0, False)
    nodes: list[Node] = []
    miss = None
    module = module_of(node, root)
    if isinstance(module, nn.Dropout):
        miss = differs(node, module, nn.Dropout)
        dropout = (Attr(f"{node.target}.p"), Attr(f"{node.target}.training"))
        nodes.append(node)
        node = argument(node, 0, "input")
    elif is_call(node, F.dropout):
        dropout = (argument(node, 1, "p", 0.5), argument(node, 2, "training", True))
        nodes.append(node)
        node = argument(node, 0, "input")
    if not isinstance(node, Node) or sole_user(node) is None:
        return None
    parts: list[Any] = []
    acts: list[str] = []
    while (read := _of_all(node)) is not None:
        weight, source, shared = read
        parts.append(weight)
        nodes.append(node)
        if shared:
            break
        found = _activated(source)
        if found is None:
            return None
        node, act, between = found
        acts.append(act)
        nodes += between
    if len(parts) not in (2, 3) or read is None or len(set(acts)) != 1 or acts[0] == "none":
        return None
    core = (parts[1],) if len(parts) == 3 else ()
    return Experts(
        read[1], (parts[-1],), core, (parts[0],), acts[0], tuple(nodes), None, dropout, None, miss
    )


def _around(node: Node, root: nn.Module) -> Experts | None:
    """``x₀.unsqueeze(1) * (experts + b)``, or ``experts + b``."""
    for other, inner in (node.args, node.args[::-1]):
        if not isinstance(other, Node) or shape(inner) != shape(node):
            continue
        found = batched(inner, root)
        if found is None or found.x0 is not None:
            continue
        if is_call(node, operator.add):
            sizes = shape(other)
            plain = is_static(other) and sizes[-1] == shape(node)[2] == numbers(other)
            if plain and found.inner is None:
                return replace(found, inner=other, nodes=(*found.nodes, node))
        elif is_call(other, torch.unsqueeze) and shape(other)[1:] == (1, shape(node)[2]):
            x0 = argument(other, 0, "input")
            dead = (other,) if sole_user(other) is node else ()
            return replace(found, x0=x0, nodes=(*dead, *found.nodes, node))
    return None


def _of_all(node: Node) -> tuple[Any, Node, bool] | None:
    """``(weight, x, shared)`` of ``einsum("eij,bej->bei", weight, x)``, x of each or of all."""
    found = einsum_of(node)
    if found is None or found.output is None or sole_user(node) is None or len(found.operands) != 2:
        return None
    terms, output, (first, second) = found.terms, found.output, found.operands
    if is_static(second) and not is_static(first):
        terms, (first, second) = terms[::-1], (second, first)
    if not is_static(first) or is_static(second) or not isinstance(second, Node):
        return None
    w, x = terms
    if len(w) != 3 or len(output) != 3 or len({*w, *x}) != 4 or {*output} - {*w, *x}:
        return None
    batch, expert, made = output[0], output[1], output[2]
    (summed,) = {*w} - {expert, made} if {expert, made} < {*w} else {""}
    if w[0] != expert or x not in (batch + summed, batch + expert + summed) or batch in w:
        return None
    weight = first if w == expert + made + summed else Turned(first)
    return weight, second, len(x) == 2


# ---------------------------------------------------------------- gates


def _softmax(node: Any) -> tuple[Node, int, tuple[Node, ...]] | None:
    """``(x, dim, nodes)`` where ``node`` is softmax(x, dim)."""
    if not isinstance(node, Node) or sole_user(node) is None:
        return None
    if not (is_call(node, torch.softmax, F.softmax) or is_method(node, "softmax")):
        return None
    source, dim = argument(node, 0, "input"), argument(node, 1, "dim")
    if node.kwargs.get("dtype") is not None or not isinstance(dim, int):
        return None
    return (source, dim % len(shape(source)), (node,)) if len(shape(source)) > 1 else None


def gates_of(node: Any, experts: Experts, count: int, root: nn.Module) -> Gates | None:
    """The gates (B, E), (B, E, 1) or (B, 1, E), softmax over E; all of ``experts.x``."""
    nodes: list[Node] = []
    found = None
    while isinstance(node, Node) and sole_user(node) is not None:
        softmax = _softmax(node) if found is None else None
        if softmax is not None:
            found, (node, dim, more) = softmax, softmax
            if shape(node)[dim] != count:
                return None
            nodes += more
        elif is_call(node, torch.unsqueeze, torch.squeeze):
            nodes.append(node)
            node = argument(node, 0, "input")
        else:
            break
    if found is None or not isinstance(node, Node) or sole_user(node) is None:
        return None
    if is_call(node, torch.stack, torch.cat):
        parts = [projection(part, root) for part in argument(node, 0, "tensors")]
        nodes.append(node)
    else:
        parts = [projection(node, root)]
    read = [part for part in parts if part is not None and base(part.source) is base(experts.x)]
    single = len(read) == 1 and read[0].out == count
    if len(read) != len(parts) or not (
        single or (len(read) == count and {p.out for p in read} == {1})
    ):
        return None
    if any(part.turned[0] or part.miss is not None for part in read):
        return None
    biases = {part.biases[0] is None for part in read}
    if len(biases) != 1:
        return None
    return Gates(
        tuple(part.weights[0] for part in read),
        () if biases == {True} else tuple(part.biases[0] for part in read),
        (*(n for part in read for n in part.nodes), *nodes),
    )
