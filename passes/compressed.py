"""A layer of a compressed interaction network: all products of two stacks, mixed by a convolution.

Z = x.unsqueeze(2) * y.unsqueeze(1)        or einsum("bhd,bmd->bhmd", x, y)
out = Conv1d(1)(Z.view(B, H M, D))         and a relu behind it
    = Linear(Z.view(B, H M, D)^t)^t        or a product with a matrix (O, H M)
    = einsum("bhmd,ohm->bod", Z, W)        or in one, einsum("bhd,bmd,ohm->bod", x, y, W)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .leaf import (
    Attr,
    Value,
    argument,
    differs,
    einsum_of,
    human,
    is_fixed,
    linear_of,
    module_of,
    plural,
    put,
    rank,
    spec_of,
    unpaid,
)

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True, slots=True)
class Found:
    """Everything a layer is made of."""

    x: Node
    y: Node
    weights: Weights
    relu: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """(O, H M), (O, H M, 1), or (O, H, M) after a permutation by ``order``; and the bias."""

    weight: Value
    bias: Value = None
    order: tuple[int, ...] = ()


# ---------------------------------------------------------------- the products


def _products(node: Any) -> tuple[Node, Node, tuple[Node, ...]] | None:
    """``(x, y, nodes)`` when ``node`` is (B, H, M, D) of products x[b, h, d] y[b, m, d]."""
    if is_call(node, torch.einsum):
        return _einsum(node)
    if not is_call(node, operator.mul):
        return None
    sides: dict[int | None, tuple[Any, tuple[Node, ...]]] = {}
    for part in node.args:
        source, spread = _spread(part)
        sides[_inserted(source)] = source, spread
    if set(sides) != {1, 2}:
        return None
    x, y = (argument(sides[dim][0], 0, "input") for dim in (2, 1))
    if rank(x) != 3 or rank(y) != 3:
        return None
    nodes = [node]
    for dim in (2, 1):
        source, spread = sides[dim]
        for one in (*spread, source):
            if not set(one.users) <= {*nodes}:
                break
            nodes.append(one)
    return x, y, tuple(nodes)


def _spread(node: Any) -> tuple[Any, tuple[Node, ...]]:
    """``(x, nodes)``: what ``node`` expands along sizes of 1; the product does so anyway."""
    if is_method(node, "expand", "expand_as", "broadcast_to") and rank(node) == 4:
        return node.args[0], (node,)
    return node, ()


def _inserted(node: Any) -> int | None:
    """Where an ``unsqueeze`` of a (B, F, D) tensor puts its new dimension."""
    dim = argument(node, 1, "dim") if is_call(node, torch.unsqueeze) else None
    return dim % 4 if isinstance(dim, int) else None


def _einsum(node: Node) -> tuple[Node, Node, tuple[Node, ...]] | None:
    found = einsum_of(node)
    if found is None or len(found.operands) != 2:
        return None
    (first, second), (x, y), output = found.terms, found.operands, found.output
    nodes: tuple[Node, ...] = (node,)
    if len(first) == len(second) == 4 and output is not None:
        # a dimension of size 1 that was put into one or both, and is summed
        for k, operand in enumerate((x, y)):
            term, at = (first, second)[k], _inserted(operand)
            if at is None or term[at] in output:
                return None
            first, second = (term.replace(term[at], "", 1) if j == k else t
                             for j, t in enumerate((first, second)))  # fmt: skip
            nodes += (operand,) if set(operand.users) == {node} else ()
        x, y = (argument(operand, 0, "input") for operand in (x, y))
    plain = len(first) == len(second) == 3 and (first + second).isalpha()
    if not plain or first[0] != second[0] or first[2] != second[2] or first[1] == second[1]:
        return None
    if not (isinstance(x, Node) and isinstance(y, Node)):
        return None
    if output == first[:2] + second[1:]:
        return x, y, nodes
    return (y, x, nodes) if output == second[:2] + first[1:] else None


def _sizes(products: Node, flat: Node) -> list[Node]:
    """The nodes that read sizes of ``products``, or compute with them, for ``flat`` only."""
    found: list[Node] = []
    todo = [user for user in products.users if user is not flat]
    while todo:
        node = todo.pop()
        if node is flat or node in found:
            continue
        if node.target not in (getattr, "size", operator.getitem, operator.mul):
            return []
        found.append(node)
        todo.extend(node.users)
    return found


# ---------------------------------------------------------------- what mixes them


@dataclass(frozen=True, slots=True)
class _Mixed:
    """A mixture of products: of ``flat`` (B, H M, D), or of two vectors each at once."""

    weights: Weights
    nodes: tuple[Node, ...]  # what mixes, the last of them first in the graph
    flat: Any = None
    products: Any = None  # not yet (B, H M, D)
    sides: tuple[Node, Node] | None = None
    miss: Miss | None = None


def _mixed(node: Node, root: nn.Module) -> _Mixed | None:
    module = module_of(node, root)
    if isinstance(module, nn.Conv1d) and len(node.args) == 1 and not node.kwargs:
        bias = None if module.bias is None else Attr(f"{node.target}.bias")
        weights = Weights(Attr(f"{node.target}.weight"), bias)
        miss = _unlike(node, module) or differs(node, module, nn.Conv1d)
        return _Mixed(weights, (node,), flat=node.args[0], miss=miss)
    if is_call(node, torch.einsum):
        return _einsums(node)
    if is_call(node, torch.matmul) and len(node.args) == 2:
        weight, flat = node.args
        if isinstance(weight, Node) and rank(flat) == 3 and is_fixed(weight, 2):
            return _Mixed(Weights(weight), (node,), flat=flat)
        return None
    return _turned(node, root)


def _unlike(node: Node, conv: nn.Conv1d) -> Miss | None:
    """Why a convolution does not mix each column by itself."""
    kinds = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
    if kinds == ((1,), (1,), (0,), (1,), 1):
        return None
    return Miss(
        node,
        f"its convolution has kernel size {conv.kernel_size[0]}, stride {conv.stride[0]},"
        f" padding {conv.padding}, groups {conv.groups}",
        ("a layer of a compressed interaction network is nn.Conv1d(H * M, O, 1)",),
    )


def _einsums(node: Node) -> _Mixed | None:
    """``"bhmd,ohm->bod"`` of products, or ``"bhd,bmd,ohm->bod"``, in any order of operands."""
    found = einsum_of(node)
    if found is None or found.output is None or len(found.operands) not in (2, 3):
        return None
    given = list(zip(found.terms, found.operands, strict=True))
    held = [k for k, (_, v) in enumerate(given) if isinstance(v, Node) and is_fixed(v, 3)]
    if len(held) != 1 or not "".join(found.terms).isalpha():
        return None
    term, weight = given.pop(held[0])
    if len(found.output) != 3:
        return None
    batch, made, column = tuple(found.output)
    if len(given) == 1:
        ((letters, products),) = given
        if len(letters) != 4 or letters[0] != batch or letters[3] != column:
            return None
        h, m, sides = letters[1], letters[2], None
    else:
        (first, x), (second, y) = given
        if not all(len(t) == 3 and t[0] == batch and t[2] == column for t in (first, second)):
            return None
        h, m, products, sides = first[1], second[1], None, (x, y)
    if len({batch, made, column, h, m}) != 5 or set(term) != {made, h, m}:
        return None
    weights = Weights(weight, order=tuple(term.index(c) for c in (made, h, m)))
    return _Mixed(weights, (node,), products=products, sides=sides)


def _turned(node: Node, root: nn.Module) -> _Mixed | None:
    """``Linear(flat^t)^t``, with a relu between."""
    layer: Any = argument(node, 0, "input") if _turns(node) else None
    nodes = [node]
    if is_call(layer, torch.relu) and sole_user(layer) is node:
        nodes.append(layer)
        layer = argument(layer, 0, "input")
    if not isinstance(layer, Node) or sole_user(layer) is not nodes[-1]:
        return None
    linear = linear_of(layer, root)
    if linear is None:
        return None
    turned, weight, bias, miss = linear
    known = isinstance(weight, Attr) or (isinstance(weight, Node) and is_fixed(weight, 2))
    if not known or not _turns(turned):
        return None
    dead = (turned,) if sole_user(turned) is layer else ()
    nodes += [layer, *dead]
    flat = argument(turned, 0, "input")
    return _Mixed(Weights(weight, bias), tuple(nodes), flat=flat, miss=miss)


def _turns(node: Any) -> bool:
    """Whether ``node`` exchanges the last two of three dimensions."""
    if not is_call(node, torch.transpose) or rank(node) != 3:
        return False
    return {argument(node, 1, "dim0") % 3, argument(node, 2, "dim1") % 3} == {1, 2}


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    mixed = _mixed(node, root)
    if mixed is None:
        return None
    inner: list[Node] = []
    if mixed.sides is not None:
        x, y = mixed.sides
    else:
        flat = mixed.flat
        views = is_call(flat, torch.reshape, torch.flatten)
        products = argument(flat, 0, "input") if views else mixed.products
        found = _products(products)
        if found is None:
            return None
        x, y, made = found
        if views and not _keeps_columns(flat, x, y):
            return Miss(flat, "the products are not laid out as (batch, H * M, dim)")
        inner = [*made, *(_sizes(made[0], flat) if views else ()), *((flat,) if views else ())]
    if mixed.miss is not None:
        return mixed.miss
    if not all(isinstance(v, Node) and rank(v) == 3 and _wide(v) for v in (x, y)):
        return None
    if _rows(x) != _rows(y):
        return Miss(node, "one of the stacks is spread over the batch, or over the dimension")
    relu = any(is_call(n, torch.relu) for n in mixed.nodes)
    nodes = [*inner, *mixed.nodes[::-1]]
    user = sole_user(node)
    if not relu and is_call(user, torch.relu):
        assert user is not None
        nodes.append(user)
        relu = True
    match = Match(nodes, [nodes[-1]], Found(x, y, mixed.weights, relu))
    return unpaid("compressed_interaction", node, root) or match


def _wide(node: Node) -> bool:
    """Whether all sizes of ``node`` but the first are known."""
    spec = spec_of(node)
    return spec is not None and all(type(d) is int for d in spec.shape[1:])


def _rows(node: Node) -> tuple[Any, Any]:
    """(B, D) of ``node``."""
    spec = spec_of(node)
    assert spec is not None  # its rank is known
    return spec.shape[0], spec.shape[2]


def _keeps_columns(flat: Node, x: Node, y: Node) -> bool:
    """Whether the reshape joins the two feature dimensions and no others."""
    after, left, right = spec_of(flat), spec_of(x), spec_of(y)
    if after is None or left is None or right is None or len(after.shape) != 3:
        return False
    (_, heads, dim), (_, others, _) = left.shape, right.shape
    known = isinstance(heads, int) and isinstance(others, int) and isinstance(dim, int)
    return known and after.shape[1:] == (heads * others, dim)  # type: ignore[operator]


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    weight, bias = _weights(found.weights, build)
    return [
        build.call(
            torch.ops.recast.compressed_interaction.default,
            found.x, found.y, weight, bias, found.relu,
            name="compressed_interaction",
        )
    ]  # fmt: skip


def _weights(weights: Weights, build: Build) -> tuple[Any, Any]:
    """(O, H M) or (O, H M, 1), and the bias."""
    weight, bias = put(build, weights.weight), put(build, weights.bias)
    if weights.order not in ((), (0, 1, 2)):
        weight = build.call(torch.permute, weight, weights.order)
    return (build.call(torch.flatten, weight, 1) if weights.order else weight), bias


def _describe(match: Match) -> str:
    found: Found = match.found
    left, right = spec_of(found.x), spec_of(found.y)
    assert left is not None and right is not None
    tail = " and relu" if found.relu else ""
    return f"products of {left.shape[1]} x {right.shape[1]} vectors, mixed{tail} in one call"


def _worth(match: Match) -> str:
    found: Found = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    left, right = spec_of(found.x), spec_of(found.y)
    size = None if left is None else left.at(1)
    other = None if right is None else right.at(1)
    if left is None or size is None or other is None:
        return launches
    (_, heads, dim), (_, others, _) = size, other
    saved = 2 * heads * others * dim * left.dtype.itemsize
    return f"{launches}, {human(saved)} of traffic a sample"


CIN: Rule = Rule(
    name="fuse-compressed-interaction",
    equation="relu(Conv1d(x.unsqueeze(2) * y.unsqueeze(1))) => compressed_interaction(x, y, W, b)",
    match=_match,
    rewrite=_rewrite,
    describe=_describe,
    worth=_worth,
)


@dataclass(frozen=True)
class FuseCompressedInteraction:
    """relu(Conv1d(x.unsqueeze(2) * y.unsqueeze(1))) => compressed_interaction(x, y, W, b)

    One call a layer of xDeepFM's network; splits, sums and other activations stay as they are.
    """

    name: ClassVar[str] = "fuse-compressed-interaction"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the layers of ``graph``; returns their number."""
        return apply(graph, [CIN], context)
