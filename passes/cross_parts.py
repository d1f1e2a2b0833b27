"""What a cross layer is made of: values that may stand in columns, and products with a matrix.

A (B, d) value may be written as (B, d, 1), with ``W @ x`` for its products; both mean the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Build, Miss

from .leaf import Attr, Value, argument, differs, einsum_of, extra, module_of, put, spec_of


@dataclass(frozen=True, slots=True)
class Projection:
    """``x Wᵀ + b``; or, with two, ``(x Vᵀ + v) Uᵀ + b``."""

    source: Node  # x, in rows or columns
    weights: tuple[Value, ...]  # (out, in); (in,) for a vector
    turned: tuple[bool, ...]  # those that are given as (in, out)
    biases: tuple[Value, ...]
    out: int  # the width of the result; a vector has 1
    nodes: tuple[Node, ...]
    miss: Miss | None = None  # why its module may not be taken
    summed: bool = False  # the result is one of a sum, which autocast does not cast


def shape(node: Any) -> tuple[Any, ...]:
    """The shape of ``node``; () where it is not known."""
    spec = spec_of(node)
    return () if spec is None else spec.shape


def base(node: Node) -> Node:
    """The value behind views between rows (B, d) and columns (B, d, 1)."""
    while is_call(node, torch.unsqueeze, torch.squeeze):
        source, dim = argument(node, 0, "input"), argument(node, 1, "dim")
        column = shape(node) if is_call(node, torch.unsqueeze) else shape(source)
        if len(column) != 3 or column[-1] != 1 or dim not in (2, -1):
            break
        node = source
    return node


def is_column(node: Node) -> bool:
    """Whether ``node`` is (B, d, 1)."""
    found = shape(node)
    return len(found) == 3 and found[2] == 1 and found[1] != 1


def rows(node: Node) -> tuple[Any, ...]:
    """The shape of ``node`` as rows."""
    return shape(node)[:2] if is_column(node) else shape(node)


def width(node: Node) -> int | None:
    """d of a value in rows or columns."""
    found = shape(node)
    if len(found) < 2:
        return None
    size = found[1] if is_column(node) else found[-1]
    return size if isinstance(size, int) else None


def is_static(node: Any) -> bool:
    """Whether the shape of ``node`` does not depend on the batch: a weight, whatever it is."""
    found = shape(node)
    return bool(found) and all(isinstance(size, int) for size in found)


def numbers(node: Any) -> int:
    """How many numbers a static value holds."""
    return torch.Size(shape(node)).numel()


def terms(node: Node) -> tuple[list[Node], list[Node]]:
    """``(terms, additions)`` of a sum; parts of it that are used elsewhere are terms."""
    found: list[Node] = []
    additions = [node]
    for part in node.args:
        if is_call(part, operator.add) and sole_user(part) is node and len(part.args) == 2:
            inner = terms(part)
            found += inner[0]
            additions += inner[1]
        elif isinstance(part, Node):
            found.append(part)
        else:
            return [], []
    return found, additions


def row(node: Node, build: Build) -> Node:
    """``node`` as rows."""
    inner = base(node)
    return build.call(torch.squeeze, inner, 2) if is_column(inner) else inner


def weight_of(part: Projection, index: int, build: Build) -> Any:
    """The matrix as (out, in)."""
    value = put(build, part.weights[index])
    return build.call(torch.transpose, value, 0, 1) if part.turned[index] else value


# ---------------------------------------------------------------- products with a matrix


def projection(node: Any, root: nn.Module) -> Projection | None:
    """The product that ``node`` is, with the bias that is added to it."""
    if is_call(node, operator.add) and len(node.args) == 2:
        return _biased(node, root)
    if not isinstance(node, Node):
        return None
    if node.op == "call_module":
        return _module(node, root)
    for read in (_linear, _matmul, _tensordot, _einsum, _summed, _widened):
        found = read(node, root)
        if found is not None:
            return found
    return None


def through(node: Any, root: nn.Module) -> Projection | None:
    """Like :func:`projection`; two products in a row are one of low rank."""
    outer = projection(node, root)
    if outer is None or sole_user(outer.source) is None:
        return outer
    inner = projection(outer.source, root)
    if inner is None or inner.out <= 1 or outer.out <= 1 or len(outer.weights) > 1:
        return outer
    return replace(
        outer,
        source=inner.source,
        weights=(*inner.weights, *outer.weights),
        turned=(*inner.turned, *outer.turned),
        biases=(*inner.biases, *outer.biases),
        nodes=(*inner.nodes, *outer.nodes),
        miss=inner.miss or outer.miss,
    )


def _biased(node: Node, root: nn.Module) -> Projection | None:
    first, second = node.args
    pairs: list[tuple[Any, Any]] = [(first, second), (second, first)]
    for product, bias in pairs:
        if not is_static(bias) or not isinstance(product, Node) or sole_user(product) is None:
            continue
        found = projection(product, root)
        if found is None or found.biases[-1] is not None or numbers(bias) != found.out:
            continue
        if shape(node) != shape(product):
            continue  # the bias widens it
        biases = (*found.biases[:-1], bias)
        return replace(found, biases=biases, nodes=(*found.nodes, node), summed=True)
    return None


def _module(node: Node, root: nn.Module) -> Projection | None:
    module = module_of(node, root)
    source = argument(node, 0, "input")
    if not isinstance(module, nn.Linear) or not isinstance(source, Node):
        return None
    path = str(node.target)
    bias = None if module.bias is None else Attr(f"{path}.bias")
    return Projection(
        source, (Attr(f"{path}.weight"),), (False,), (bias,), module.out_features, (node,),
        differs(node, module, nn.Linear),
    )  # fmt: skip


def _of(node: Node, source: Any, weight: Any, turned: bool, bias: Any = None) -> Projection | None:
    """The product with a static matrix or vector."""
    sizes = shape(weight)
    if not is_static(weight) or not isinstance(source, Node) or is_static(source):
        return None
    if len(sizes) == 1 or (len(sizes) == 2 and sizes[1 if turned else 0] == 1):
        return Projection(source, (weight,), (False,), (bias,), 1, (node,))
    if len(sizes) != 2:
        return None
    out = sizes[1] if turned else sizes[0]
    return Projection(source, (weight,), (turned,), (bias,), out, (node,))


def _linear(node: Node, root: nn.Module) -> Projection | None:
    if not is_call(node, F.linear):
        return None
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    return _of(node, argument(node, 0, "input"), weight, False, bias)


def _matmul(node: Node, root: nn.Module) -> Projection | None:
    if not is_call(node, torch.matmul, torch.mm, torch.mv) or len(node.args) != 2:
        return None
    a: Any
    b: Any
    a, b = node.args
    if is_static(b) and len(shape(a)) >= 2 and not is_column(a):
        return _of(node, a, b, True)
    if len(shape(a)) == 2 and isinstance(b, Node) and is_column(b):
        return _of(node, b, a, False)
    return None


def _tensordot(node: Node, root: nn.Module) -> Projection | None:
    if not is_call(node, torch.tensordot) or extra(node, 3, "a", "b", "dims", "out"):
        return None
    a, b = argument(node, 0, "a"), argument(node, 1, "b")
    dims = argument(node, 2, "dims")
    if node.kwargs.get("out") is not None:
        return None
    pairs = tuple(map(tuple, dims)) if isinstance(dims, Sequence) else ()
    rows = len(shape(a)) == 2 and (pairs in (((1,), (0,)), ((-1,), (0,))) or dims == 1)
    columns = len(shape(a)) == 3 and shape(a)[2] == 1 and pairs == ((1,), (0,))
    if columns and numbers(b) != shape(a)[1]:
        return None
    return _of(node, a, b, True) if rows or columns else None


def _einsum(node: Node, root: nn.Module) -> Projection | None:
    """``"bi,ij->bj"``, ``"bi,ji->bj"``, ``"bi,i->b"`` and the like."""
    found = einsum_of(node)
    if found is None or len(found.operands) != 2:
        return None
    terms, output, operands = found
    if is_static(operands[0]):
        terms, operands = terms[::-1], operands[::-1]
    x, w = terms
    if len(x) < 2 or len({*x}) != len(x) or not (x + w).isalpha():
        return None
    summed = x[-1]
    if len(w) == 1:
        return (
            _of(node, operands[0], operands[1], True) if w == summed and output == x[:-1] else None
        )
    if len(w) != 2 or summed not in w or len({*w}) != 2:
        return None
    (made,) = {*w} - {summed}
    plain = made not in x and output == x[:-1] + made
    return _of(node, operands[0], operands[1], w[0] == summed) if plain else None


def _summed(node: Node, root: nn.Module) -> Projection | None:
    """``sum(x * w, -1)``."""
    if not (is_call(node, torch.sum) or is_method(node, "sum")):
        return None
    if extra(node, 3, "input", "dim", "axis", "keepdim"):
        return None
    product, dim = argument(node, 0, "input"), argument(node, 1, "dim", node.kwargs.get("axis"))
    if not is_call(product, operator.mul) or sole_user(product) is None or len(shape(product)) != 2:
        return None
    if dim not in (1, -1):
        return None
    first, second = product.args
    pairs: list[tuple[Any, Any]] = [(first, second), (second, first)]
    for x, w in pairs:
        if not isinstance(x, Node) or is_static(x) or shape(x) != shape(product):
            continue
        if is_static(w) and numbers(w) == width(x):
            return Projection(x, (w,), (False,), (None,), 1, (product, node), summed=True)
    return None


def _widened(node: Node, root: nn.Module) -> Projection | None:
    """``p.unsqueeze(1)`` of a product with a vector."""
    if not is_call(node, torch.unsqueeze, torch.reshape) or len(shape(node)) != 2:
        return None
    source = argument(node, 0, "input")
    if len(shape(source)) != 1 or shape(node) != (*shape(source), 1):
        return None
    if sole_user(source) is None:
        return None
    found = projection(source, root)
    return None if found is None else replace(found, nodes=(*found.nodes, node))
