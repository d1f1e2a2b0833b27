"""Field-matrixed factorisation machines: one matrix per pair of fields, in several spellings.

loops      r + sum((v_i @ W[k]) * v_j, 1) + ..      any form of pair products, summed to one number
einsums    einsum("bpd,pde,bpe->b", x[:, i], W, x[:, j])                    or "->bp", then a sum
           einsum("bid,ijde,bje->bij", x, W, x) * mask, summed              or "->b"

All pairs together are one quadratic form of the concatenated vectors: out = sum((x M) * x, 1),
where block (i, j) of M (F D, F D) is the matrix of that pair, or 0. The products of every pair with
its matrix, (B, P, D), are never written: 2048 samples of 10 fields of 16 take 1/2 of the time of
one product per field, 26 fields 1/4, and 39 fields of 10 numbers 1/12.

Where a vector is not finite, neither is the result of its sample; but as zeros of M are multiplied
with it too, an inf of the model may become NaN, also in gradients of that sample's other vectors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recast.rewriter.ir import Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match

from .field_form import Found, dim_of, form_of, form_rule, gathered, pays, places
from .leaf import argument, einsum_of, is_fixed, spec_of, tensor_at
from .pair_linears import Layer, layer_of, weights_of
from .pair_parts import summed
from .pair_vectors import Side, Vector, closed, count_of, side, vector

# ---------------------------------------------------------------- from products of pairs


def _match_pairs(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, torch.ops.recast.pair_products.default):
        return None
    args: Any = node.args
    if args[4] is not None or args[5] != "all" or not args[1]:
        return None
    for one, other in ((0, 1), (1, 0)):
        li, lj = tensor_at(args[2 + one], root), tensor_at(args[2 + other], root)
        if li is None or lj is None or li.tolist() != list(range(len(li))):
            continue
        match = _of_layers(node, args[one], args[other], lj, root)
        match = match or _of_stack(node, args[one], args[other], lj, root)
        if match is not None:
            return match
    return None


def _of_layers(
    node: Node, ones: Sequence[Node], others: Sequence[Node], lj: torch.Tensor, root: nn.Module
) -> Match | None:
    """Each pair its own layer without a bias."""
    read = [layer_of(f, node, root) for f in ones]
    layers = [layer for layer in read if isinstance(layer, Layer) and not layer.biased]
    if len(layers) != len(lj) or len(layers) != len(ones):
        return None
    if len({layer.key for layer in layers}) != len(layers):
        return None  # one layer on many vectors is a single product
    listed = _listed(others)
    if listed is None:
        return None
    left, right = [layer.vector for layer in layers], [listed[k] for k in lj.tolist()]
    sources, place, total = places([*left, *right])
    dim = dim_of([*sources, *ones])
    if dim is None or not pays(total, len(layers)) or len(place) < total:
        return None  # vectors of no pair would be read too: an inf in one of them
    li, at = (torch.tensor([place[v] for v in vectors]) for vectors in (left, right))

    def turned(build: Build) -> Node:
        return weights_of(layers, build, turned=True)

    found = Found(sources, total, dim, len(layers), form_of(li, at, total, dim, turned), True)
    inside = closed([*(x.node for x in layers), node], [n for x in layers for n in x.picks])
    return Match([n for n in node.graph.nodes if n in inside], [node], found)


def _listed(features: Sequence[Node]) -> list[Vector] | None:
    """The vectors of all ``features``, one after the other."""
    vectors: list[Vector] = []
    for feature in features:
        one = vector(feature)
        count = count_of(feature)
        if one is None and count is None:
            return None
        vectors += [one[0]] if one is not None else [Vector(feature, k) for k in range(count or 0)]
    return vectors


def _of_stack(
    node: Node, ones: Sequence[Node], others: Sequence[Node], lj: torch.Tensor, root: nn.Module
) -> Match | None:
    """``einsum("bpd,pde->bpe", x[:, i], W)``, or the same with a dimension of size 1 in between."""
    product = ones[0] if len(ones) == 1 else None
    nodes: list[Node] = [node]
    while isinstance(product, Node) and not is_call(product, torch.einsum):
        views = is_call(product, torch.squeeze, torch.ops.aten.contiguous.default)
        if not views or sole_user(product) is None:
            return None
        nodes.append(product)
        product = argument(product, 0, "input", product.args[0])
    found = einsum_of(product)
    if product is None or found is None or sole_user(product) is None or len(found.operands) != 2:
        return None
    x, weight = found.operands
    if found.terms == ["bfmd", "fde"] and found.output == "bfme" and is_call(x, torch.unsqueeze):
        inner = argument(x, 0, "input") if argument(x, 1, "dim") in (2, -2) else None
        dead = [x] if sole_user(x) is product else []
    elif _plain(found.terms, found.output):
        inner, dead = x, []
    else:
        return None
    picked = side(inner, root) if isinstance(inner, Node) else None
    if not isinstance(picked, Side) or not isinstance(weight, Node) or not is_fixed(weight, 3):
        return None
    right = _listed(others)
    if right is None:
        return None
    pairs = Side((), tuple(right[k] for k in lj.tolist()))
    return gathered(node, [*nodes, product, *dead], (picked, pairs), weight, (0, 1, 2), True)


def _plain(terms: Sequence[str], output: str | None) -> bool:
    """``bpd,pde->bpe`` in any letters."""
    x, w = terms
    plain = len(x) == len(w) == 3 and len({*x, *w}) == 4 and (x + w).isalpha()
    return plain and w[0] == x[1] and w[1] == x[2] and output == x[:2] + w[2]


# ---------------------------------------------------------------- from einsums


@dataclass(frozen=True, slots=True)
class _Einsum:
    """An einsum of two tensors of vectors and a weight, down to one number per sample."""

    core: tuple[Node, ...]  # its sum, the mask, the einsum
    x: tuple[str, Node]
    y: tuple[str, Node]
    weight: tuple[str, Node]
    kept: str  # the letters that are summed after it
    mask: Node | None


def _read(node: Node) -> _Einsum | None:
    core: list[Node] = [node]
    product: Node = node
    mask: Any = None
    over: tuple[int, ...] = ()
    last = summed(node)
    if last is not None:
        product, over, keeps = last
        core.append(product)
        if keeps or sole_user(product) is not node:
            return None
        if is_call(product, operator.mul):
            mask, inner = product.args
            if not is_call(inner, torch.einsum):
                mask, inner = inner, mask
            if not isinstance(mask, Node) or not is_call(inner, torch.einsum):
                return None
            if sole_user(inner) is not product:
                return None
            product = inner
            core.append(product)
    found = einsum_of(product)
    if found is None or len(found.operands) != 3 or not found.output:
        return None
    if tuple(sorted(over)) != tuple(range(1, len(found.output))):
        return None
    given: list[tuple[str, Any]] = list(zip(found.terms, found.operands, strict=True))
    held = [k for k, (t, v) in enumerate(given) if isinstance(v, Node) and is_fixed(v, len(t))]
    if len(held) != 1 or not all(t.isalpha() and len({*t}) == len(t) for t in found.terms):
        return None
    weight = given.pop(held[0])
    x, y = given
    batch = found.output[0]
    fits = all(len(t) == 3 and t[0] == batch and isinstance(v, Node) for t, v in (x, y))
    if not fits or batch in weight[0]:
        return None
    return _Einsum(tuple(core), x, y, weight, found.output[1:], mask)


def _match_einsum(node: Node, root: nn.Module) -> Answer:
    found = _read(node)
    if found is None:
        return None
    return _picked(node, found, root) if found.x[0][1] == found.y[0][1] else _all(node, found)


def _picked(node: Node, found: _Einsum, root: nn.Module) -> Match | None:
    """``bpd,pde,bpe`` of vectors selected by indices."""
    (first, x), (second, y), (term, weight) = found.x, found.y, found.weight
    letters = first[1:] + second[2]
    if found.mask is not None or len({*letters}) != 3 or {*term} != {*letters}:
        return None
    if found.kept not in ("", first[1]):
        return None
    left, right = side(x, root), side(y, root)
    if not isinstance(left, Side) or not isinstance(right, Side):
        return None
    order = [term.index(c) for c in letters]
    return gathered(node, found.core, (left, right), weight, order, False, _made(found))


def _all(node: Node, found: _Einsum) -> Match | None:
    """``bid,ijde,bje`` of all pairs, and a mask of them."""
    (first, x), (second, y), (term, weight) = found.x, found.y, found.weight
    letters = first[1] + second[1] + first[2] + second[2]
    mask, fields, dim = found.mask, count_of(x), dim_of([x])
    if x is not y or len({*letters}) != 4 or {*term} != {*letters} or len(term) != 4:
        return None
    if found.kept not in ("", letters[:2], letters[1::-1]) or fields is None or dim is None:
        return None
    if mask is not None and (not is_fixed(mask, 2) or not found.kept or not _alike(mask, weight)):
        return None
    order = tuple(term.index(c) for c in letters)

    def matrix(build: Build) -> Node:
        whole = weight
        if order != (0, 1, 2, 3):
            whole = build.call(torch.permute, whole, order)
        if mask is None:
            return whole
        turned = mask
        if found.kept != letters[:2]:
            turned = build.call(torch.transpose, mask, 0, 1)
        wide = build.call(torch.unsqueeze, build.call(torch.unsqueeze, turned, 2), 3)
        return build.call(operator.mul, whole, wide)

    form = Found((x,), fields, dim, fields * fields, matrix, False, _made(found), mask)
    nodes = [n for n in node.graph.nodes if n in found.core]
    return Match(nodes, [node], form)


def _made(found: _Einsum) -> str:
    if found.mask is not None:
        return ""
    return "terms" if found.kept else "sum"


def _alike(a: Node, b: Node) -> bool:
    first, second = spec_of(a), spec_of(b)
    return first is not None and second is not None and first.dtype == second.dtype


OF_PAIRS, OF_EINSUMS = form_rule(_match_pairs), form_rule(_match_einsum)
