"""One layer of a cross network, of vectors or of matrices, in the ways it is written."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from recast.rewriter.ir import Node, is_call, sole_user

from .cross_parts import (
    Projection,
    base,
    is_column,
    is_static,
    numbers,
    projection,
    rows,
    shape,
    terms,
    through,
    width,
)
from .leaf import Value, argument


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
            if rows(x0) != rows(node):
                continue  # what is spread over the batch is no cross network's first features
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
    if crossed is None or rows(crossed[0]) != rows(node):
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
