"""A layer of a compressed interaction network: all products of two stacks, mixed by a convolution.

Z = x.unsqueeze(2) * y.unsqueeze(1)        or einsum("bhd,bmd->bhmd", x, y)
out = Conv1d(1)(Z.view(B, H M, D))         and a relu behind it
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .leaf import argument, differs, einsum_of, human, module_of, plural, rank, spec_of, unpaid

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True, slots=True)
class Found:
    """Everything a layer is made of."""

    x: Node
    y: Node
    conv: Node
    biased: bool
    relu: bool


# ---------------------------------------------------------------- the products


def _products(node: Any) -> tuple[Node, Node, tuple[Node, ...]] | None:
    """``(x, y, nodes)`` when ``node`` is (B, H, M, D) of products x[b, h, d] y[b, m, d]."""
    if is_call(node, torch.einsum):
        return _einsum(node)
    if not is_call(node, operator.mul):
        return None
    parts: dict[int | None, Any] = {_inserted(part): part for part in node.args}
    if set(parts) != {1, 2}:
        return None
    x, y = (argument(parts[dim], 0, "input") for dim in (2, 1))
    if rank(x) != 3 or rank(y) != 3:
        return None
    nodes = [parts[dim] for dim in (2, 1) if set(parts[dim].users) == {node}]
    return x, y, (node, *nodes)


def _inserted(node: Any) -> int | None:
    """Where an ``unsqueeze`` of a (B, F, D) tensor puts its new dimension."""
    dim = argument(node, 1, "dim") if is_call(node, torch.unsqueeze) else None
    return dim % 4 if isinstance(dim, int) else None


def _einsum(node: Node) -> tuple[Node, Node, tuple[Node, ...]] | None:
    found = einsum_of(node)
    if found is None or len(found.operands) != 2:
        return None
    (first, second), (x, y) = found.terms, found.operands
    plain = len(first) == len(second) == 3 and (first + second).isalpha()
    if not plain or first[0] != second[0] or first[2] != second[2] or first[1] == second[1]:
        return None
    if not (isinstance(x, Node) and isinstance(y, Node)):
        return None
    if found.output == first[:2] + second[1:]:
        return x, y, (node,)
    return (y, x, (node,)) if found.output == second[:2] + first[1:] else None


def _sizes(products: Node, flat: Node) -> list[Node]:
    """What asks ``products`` for its sizes, and computes with them for ``flat`` only."""
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


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    conv = module_of(node, root)
    if not isinstance(conv, nn.Conv1d) or len(node.args) != 1 or node.kwargs:
        return None
    flat = node.args[0]
    found = _products(argument(flat, 0, "input")) if is_call(flat, torch.reshape) else None
    if found is None or not isinstance(flat, Node):
        return None
    x, y, inner = found
    kinds = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
    if kinds != ((1,), (1,), (0,), (1,), 1):
        return Miss(
            node,
            f"its convolution has kernel size {conv.kernel_size[0]}, stride {conv.stride[0]},"
            f" padding {conv.padding}, groups {conv.groups}",
            ("a layer of a compressed interaction network is nn.Conv1d(H * M, O, 1)",),
        )
    if not _keeps_columns(flat, x, y):
        return Miss(flat, "the products are not laid out as (batch, H * M, dim)")
    miss = differs(node, conv, nn.Conv1d)
    if miss is not None:
        return miss
    nodes = [*inner, *_sizes(inner[0], flat), flat, node]
    user = sole_user(node)
    relu = is_call(user, torch.relu)
    if relu:
        assert user is not None
        nodes.append(user)
    match = Match(nodes, [nodes[-1]], Found(x, y, node, conv.bias is not None, relu))
    return unpaid("compressed_interaction", node, root) or match


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
    path = str(found.conv.target)
    return [
        build.call(
            torch.ops.recast.compressed_interaction.default,
            found.x, found.y, build.get(f"{path}.weight"),
            build.get(f"{path}.bias") if found.biased else None, found.relu,
            name="compressed_interaction",
        )
    ]  # fmt: skip


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
