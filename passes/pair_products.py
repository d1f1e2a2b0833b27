"""Products of pairs of feature vectors, written as a loop or by indices, and their sums.

loops      stack([v_i * v_j ...], 1), cat([...]), v_0 * v_1 + v_0 * v_2 + ...
indices    x[:, li] * y[:, lj], also by index_select or cat([v_0, v_0 ...]) * cat([v_1, v_2 ...])
sums       over the vectors, over the pairs, over both; in the loop or behind it
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .leaf import argument, extra, human, plural, spec_of, unpaid
from .pair_linears import JOINED, LINEARS
from .pair_pooling import POOLED
from .pair_vectors import (
    Operands,
    Side,
    Vector,
    closed,
    given,
    itself,
    operands,
    side,
    stacks,
    vector,
)

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_FEWEST = 3  # products in a loop; of fewer, plain torch is as fast


@dataclass(frozen=True, slots=True)
class Found:
    """Products of pairs, and what becomes of them."""

    operands: Operands
    pairs: int | None
    axes: tuple[str, ...]  # of the result: of B, P, D, and 1 for what was summed with keepdim
    inner: tuple[Node, ...]  # stacks that only these pairs read
    flat: bool = False  # (B, P * D) or (B, 1, P * D) instead of (B, P, D)
    before: tuple[Node, ...] = ()  # other parts of the same cat
    after: tuple[Node, ...] = ()


# ---------------------------------------------------------------- sums


def _summed(node: Any) -> tuple[Node, tuple[int, ...], bool] | None:
    """``(x, dims, keepdim)`` when ``node`` sums x over dimensions, counted from the front."""
    if not (is_call(node, torch.sum) or is_method(node, "sum")):
        return None
    if extra(node, 3, "input", "dim", "axis", "keepdim", "keepdims"):
        return None
    source, dim = argument(node, 0, "input"), argument(node, 1, "dim", node.kwargs.get("axis"))
    keep = argument(node, 2, "keepdim", node.kwargs.get("keepdims", False))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    spec = spec_of(source)
    if spec is None or not all(type(d) is int for d in dims) or not isinstance(keep, bool):
        return None
    return source, tuple(d % len(spec.shape) for d in dims), keep


def _tail(node: Node, axes: tuple[str, ...]) -> tuple[list[Node], tuple[str, ...]]:
    """The sums behind ``node`` and the axes they leave."""
    nodes: list[Node] = []
    while (user := sole_user(nodes[-1] if nodes else node)) is not None:
        found = _summed(user)
        if found is None or not found[1] or any(axes[d] == "B" for d in found[1]):
            break
        _, dims, keep = found
        kept = ["1" if d in dims else a for d, a in enumerate(axes) if keep or d not in dims]
        axes = tuple(kept)
        nodes.append(user)
    return nodes, axes


# ---------------------------------------------------------------- two gathered operands


def _match_gathered(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, operator.mul):
        return None
    a, b = node.args
    specs = [spec_of(a), spec_of(b), spec_of(node)]
    if not isinstance(a, Node) or not isinstance(b, Node) or None in specs:
        return None
    first, second, whole = (spec for spec in specs if spec is not None)
    if first != second or first != whole or len(whole.shape) != 3:
        return None
    if not whole.dtype.is_floating_point or not isinstance(whole.shape[1], int):
        return None
    sides = []
    for operand in (a, b):
        found = side(operand, root)
        if isinstance(found, Miss):
            return found
        alone = set(operand.users) == {node}  # else it is there anyway
        sides.append(found if found is not None and alone else None)
    if sides == [None, None] or (sides[0] is None and is_call(a, torch.mul)):
        return None
    left, right = (s or itself(o) for s, o in zip(sides, (a, b), strict=True))
    if left is None or right is None:
        return None
    tail, axes = _tail(node, ("B", "P", "D"))
    return _finish(
        node, root, [node, *tail], [*left.nodes, *right.nodes], left, right, whole.shape[1], axes
    )


def _finish(
    node: Node,
    root: nn.Module,
    core: Sequence[Node],
    picks: Sequence[Node],
    left: Side,
    right: Side,
    pairs: int | None,
    axes: tuple[str, ...],
    **more: Any,
) -> Answer:
    """The match of ``core`` and of what serves nothing else."""
    if not all(_one_kind(v.source, node) for v in (*left.vectors, *right.vectors)):
        return None
    kept = {*more.get("before", ()), *more.get("after", ())}
    inside = closed(core, [n for n in picks if n not in kept])
    found = operands(left, right)
    own = stacks(found, lambda source: source in kept or bool(set(source.users) - inside))
    nodes = [n for n in node.graph.nodes if n in inside or n in own]
    last = core[-1]
    match = Match(nodes, [last], Found(found, pairs, axes, tuple(own), **more))
    return unpaid("pair_products", node, root) or match


def _one_kind(source: Node, product: Node) -> bool:
    """Whether a source has the dtype and the batch of the product."""
    a, b = spec_of(source), spec_of(product)
    return a is not None and b is not None and (a.dtype, a.shape[0]) == (b.dtype, b.shape[0])


# ---------------------------------------------------------------- a loop over pairs


@dataclass(frozen=True, slots=True)
class Part:
    """One product of a loop."""

    left: Vector
    right: Vector
    core: tuple[Node, ...]  # the product, and its sum
    picks: tuple[Node, ...]
    summed: bool
    shape: tuple[Any, ...]  # of the product


def _part(node: Any) -> Part | None:
    """``v * w``, or its sum over the vector."""
    found = _summed(node)
    product = found[0] if found is not None else node
    if not is_call(product, operator.mul):
        return None
    spec, a, b = spec_of(product), *product.args
    if not isinstance(a, Node) or not isinstance(b, Node) or spec is None:
        return None
    if spec_of(a) != spec_of(b) or spec_of(a) != spec:
        return None
    if found is not None and found[1] != (len(spec.shape) - 1,):
        return None
    left, right = vector(a), vector(b)
    if left is None or right is None or (found is not None and sole_user(product) is not node):
        return None
    core = (product,) if found is None else (product, node)
    picks = (*left[1], *right[1])
    return Part(left[0], right[0], core, picks, found is not None, spec.shape)


def _match_loop(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, torch.cat, torch.stack):
        return None
    given_parts = argument(node, 0, "tensors")
    spec = spec_of(node)
    if not isinstance(given_parts, (list, tuple)) or len(given_parts) < _FEWEST or spec is None:
        return None
    parts = [_part(p) if isinstance(p, Node) else None for p in given_parts]
    at = [k for k, part in enumerate(parts) if part is not None and _own(part, node)]
    if len(at) < _FEWEST:
        return None
    first, last = at[0], at[-1]
    products = [p for k in at if (p := parts[k]) is not None]
    kinds = {(p.summed, p.shape, s.shape) for k, p in zip(at, products, strict=True)
             if (s := spec_of(given_parts[k]))}  # fmt: skip
    if len(at) != last + 1 - first or len(kinds) != 1:
        return Miss(
            given_parts[first],
            f"{len(at)} of {len(given_parts)} parts are products of two feature vectors, "
            "but they do not stand side by side in one form",
            ("collect the products in a list of their own",),
        )
    (summed, _, shape) = kinds.pop()
    joined = _joined(node, summed, len(shape), len(spec.shape))
    if joined is None:
        return None
    axes, flat = joined
    before, after = tuple(given_parts[:first]), tuple(given_parts[last + 1 :])
    tail: list[Node] = []
    if not (before or after or flat):
        tail, axes = _tail(node, axes)
    core = [*(n for p in products for n in p.core), node, *tail]
    return _finish(
        node, root, core, [n for p in products for n in p.picks],
        Side((), tuple(p.left for p in products)), Side((), tuple(p.right for p in products)),
        len(products), axes, flat=flat, before=before, after=after,
    )  # fmt: skip


def _own(part: Part, user: Node) -> bool:
    """Whether only ``user`` reads the product."""
    return set(part.core[-1].users) == {user}


def _joined(node: Node, summed: bool, rank: int, whole: int) -> tuple[tuple[str, ...], bool] | None:
    """``(axes, flat)`` of parts that a ``cat`` or ``stack`` joins; None for other dimensions."""
    dim = argument(node, 1, "dim", 0) % whole
    if node.target is torch.stack:
        forms = {(False, 2): ("B", "P", "D"), (True, 1): ("B", "P"), (True, 2): ("B", "P", "1")}
        return (forms[summed, rank], False) if dim == 1 and (summed, rank) in forms else None
    if summed:
        forms = {(True, 2): ("B", "P"), (True, 3): ("B", "P", "1")}
        return (forms[True, rank], False) if dim == 1 and (True, rank) in forms else None
    if rank == 2 and dim == 1:
        return ("B", "P", "D"), True
    if rank == 3:
        return (("B", "P", "D"), dim == 2) if dim in (1, 2) else None
    return None


# ---------------------------------------------------------------- a chain of additions


def _match_chain(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, operator.add) or any(is_call(u, operator.add) for u in node.users):
        return None
    leaves, adds = _leaves(node)
    parts = [(leaf, _part(leaf)) for leaf in leaves]
    products = [p for _, p in parts if p is not None and set(p.core[-1].users) <= adds]
    if len(products) < _FEWEST or len({(p.summed, p.shape) for p in products}) != 1:
        return None
    own = {p.core[-1] for p in products}
    rest = tuple(leaf for leaf in leaves if leaf not in own)
    shapes = {spec.shape for leaf in leaves if (spec := spec_of(leaf)) is not None}
    if len(own) != len(products) or len(shapes) != 1 or spec_of(node) is None:
        return None
    (shape,) = shapes
    first = products[0]
    axes = {1: ("B",), 2: ("B", "1"), 3: ("B", "1", "1")} if first.summed else {
        2: ("B", "D"), 3: ("B", "1", "D")}  # fmt: skip
    if len(shape) not in axes:
        return None
    core = [*(n for p in products for n in p.core), *adds - {node}, node]
    return _finish(
        node, root, core, [n for p in products for n in p.picks],
        Side((), tuple(p.left for p in products)), Side((), tuple(p.right for p in products)),
        len(products), axes[len(shape)], before=rest,
    )  # fmt: skip


def _leaves(node: Node) -> tuple[list[Node], set[Node]]:
    """What a tree of additions adds, in order, and the additions; zeros are nothing."""
    leaves: list[Node] = []
    adds = {node}
    waiting = [node]
    while waiting:
        for operand in reversed(waiting.pop().args):
            if not isinstance(operand, Node):
                leaves.extend([] if operand == 0 else [operand])  # type: ignore[list-item]
            elif is_call(operand, operator.add) and len(operand.users) == 1:
                adds.add(operand)
                waiting.append(operand)
            else:
                leaves.append(operand)
    return leaves[::-1], adds


# ---------------------------------------------------------------- the rewrite


def _sum_of(axes: Sequence[str]) -> str:
    """What the op sums."""
    if "P" in axes:
        return "none" if "D" in axes else "dim"
    return "pairs" if "D" in axes else "all"


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    sum = _sum_of(found.axes)
    out = build.call(
        torch.ops.recast.pair_products.default,
        *given(found.operands, set(match.nodes), build), None, sum,
        name="pair_products",
    )  # fmt: skip
    out = _shaped(out, sum, found, match.outputs[0], build)
    last = match.outputs[0]
    if is_call(last, operator.add):
        for term in found.before:
            out = build.call(operator.add, term, out)
        return [out]
    if found.before or found.after:
        parts = [*found.before, out, *found.after]
        out = build.call(torch.cat, parts, argument(last, 1, "dim", 0))
    return [out]


def _shaped(out: Node, sum: str, found: Found, last: Node, build: Build) -> Node:
    """The result of the op in the shape that the graph goes on with."""
    if found.flat:
        spec = spec_of(last)
        assert spec is not None
        width = _width(found, spec.shape[-1])
        return build.call(torch.reshape, out, (-1, *[1] * (len(spec.shape) - 2), width))
    rank = len(found.axes)
    if sum == "all":
        return out if rank == 2 else build.call(
            torch.squeeze if rank == 1 else torch.unsqueeze, out, 1
        )  # fmt: skip
    if sum in ("dim", "pairs") and rank == 3:
        return build.call(torch.unsqueeze, out, found.axes.index("1"))
    return out


def _width(found: Found, whole: Any) -> int:
    """P * D: the last size, less the other parts of the cat."""
    others = [spec_of(part) for part in (*found.before, *found.after)]
    return int(whole) - sum(int(spec.shape[-1]) for spec in others if spec is not None)


def _describe(match: Match) -> str:
    found: Found = match.found
    what = {
        "none": "products", "dim": "inner products",
        "pairs": "the summed products", "all": "the summed inner products",
    }[_sum_of(found.axes)]  # fmt: skip
    return f"{what} of {plural(found.pairs, 'pair') if found.pairs else 'pairs'} in one call"


def _worth(match: Match) -> str:
    found: Found = match.found
    launches = plural(len(match.nodes) - 1, "launch")
    left = found.operands.left[0]
    spec = spec_of(left)
    if spec is None or found.pairs is None or not isinstance(spec.shape[-1], int):
        return launches
    copies = 2 + (_sum_of(found.axes) != "none")  # both operands; the product where it is summed
    saved = 2 * copies * found.pairs * spec.shape[-1] * spec.dtype.itemsize
    return f"{launches}, {human(saved)} of traffic a sample"


def _rule(match: Any) -> Rule:
    return Rule(
        name="fuse-pair-products",
        equation="x[:, i] * y[:, j], summed or not => pair_products(x, y, i, j)",
        match=match,
        rewrite=_rewrite,
        describe=_describe,
        worth=_worth,
    )


GATHERED, LOOP, CHAIN = _rule(_match_gathered), _rule(_match_loop), _rule(_match_chain)


@dataclass(frozen=True)
class FusePairProducts:
    """x[:, i] * y[:, j], summed or not => pair_products(x, y, i, j)

    Loops over pairs with stack, cat or additions; index lists and index tensors; one tensor of
    vectors, many, or field-aware ones (B, F, F, D).
    """

    name: ClassVar[str] = "fuse-pair-products"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the products of pairs of ``graph``; returns how often it fired."""
        fired = apply(graph, [GATHERED, LOOP, CHAIN, JOINED], context)
        return fired + apply(graph, [LINEARS, POOLED], context)
