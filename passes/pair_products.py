"""Products of pairs of feature vectors, written as a loop or by indices, and their sums.

loops      stack([v_i * v_j ...], 1), cat([...]), v_0 * v_1 + v_0 * v_2 + ...
indices    x[:, li] * y[:, lj], also by index_select or cat([v_0, v_0 ...]) * cat([v_1, v_2 ...])
sums       over the vectors, over the pairs, over both; in the loop or after it
weights    of inner products in a loop, r[i, j] * sum(v_i * v_j, -1)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .field_matrices import OF_EINSUMS, OF_PAIRS
from .leaf import argument, human, plural, spec_of, unpaid
from .pair_linears import JOINED, LINEARS
from .pair_parts import Part, is_number, leaves, part_of, summed, weights_of
from .pair_pooling import POOLED
from .pair_vectors import Operands, Side, closed, given, itself, operands, side, stacks

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_FEWEST = 3  # products in a loop; for fewer, plain torch is as fast


@dataclass(frozen=True, slots=True)
class Found:
    """Products of pairs, and how they are summed and shaped."""

    operands: Operands
    pairs: int | None
    axes: tuple[str, ...]  # of the result: B, P, D, and 1 for what was summed with keepdim
    inner: tuple[Node, ...]  # stacks that only these pairs read
    flat: bool = False  # (B, P * D) or (B, 1, P * D) instead of (B, P, D)
    before: tuple[Node, ...] = ()  # other parts of the same cat
    after: tuple[Node, ...] = ()
    weighed: tuple[Part, ...] = ()  # one per pair, if each has a weight


# ---------------------------------------------------------------- sums


def _tail(node: Node, axes: tuple[str, ...]) -> tuple[list[Node], tuple[str, ...]]:
    """The sums after ``node``, and the axes that they leave."""
    nodes: list[Node] = []
    while (user := sole_user(nodes[-1] if nodes else node)) is not None:
        found = summed(user)
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
        alone = set(operand.users) == {node}  # else it exists anyway
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
    """The match of ``core`` and of the nodes that have no other use."""
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


def _match_loop(node: Node, root: nn.Module) -> Answer:
    if not is_call(node, torch.cat, torch.stack):
        return None
    given_parts = argument(node, 0, "tensors")
    spec = spec_of(node)
    if not isinstance(given_parts, (list, tuple)) or len(given_parts) < _FEWEST or spec is None:
        return None
    parts = [part_of(p) if isinstance(p, Node) else None for p in given_parts]
    at = [k for k, part in enumerate(parts) if part is not None and _own(part, node)]
    if len(at) < _FEWEST:
        return None
    first, last = at[0], at[-1]
    products = [p for k in at if (p := parts[k]) is not None]
    kinds = {(p.summed, p.shape, s.shape, p.weight is None)
             for k, p in zip(at, products, strict=True)
             if (s := spec_of(given_parts[k]))}  # fmt: skip
    if len(at) != last + 1 - first or len(kinds) != 1:
        return Miss(
            given_parts[first],
            f"{len(at)} of {len(given_parts)} parts are products of two feature vectors, "
            "but they do not stand side by side in one form",
            ("collect the products in a list of their own",),
        )
    (inner, _, shape, plain) = kinds.pop()
    joined = _joined(node, inner, len(shape), len(spec.shape))
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
        weighed=() if plain else tuple(products),
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
    added, adds = leaves(node)
    parts = [(leaf, part_of(leaf)) for leaf in added]
    products = [p for _, p in parts if p is not None and set(p.core[-1].users) <= adds]
    kinds = {(p.summed, p.shape, p.weight is None) for p in products}
    if len(products) < _FEWEST or len(kinds) != 1:
        return None
    own = {p.core[-1] for p in products}
    rest = tuple(leaf for leaf in added if leaf not in own)
    shapes = {spec.shape for leaf in added if (spec := spec_of(leaf)) is not None}
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
        weighed=() if first.weight is None else tuple(products),
    )  # fmt: skip


# ---------------------------------------------------------------- the rewrite


def _sum_of(axes: Sequence[str]) -> str:
    """What the op sums."""
    if "P" in axes:
        return "none" if "D" in axes else "dim"
    return "pairs" if "D" in axes else "all"


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    sum = _sum_of(found.axes)
    weights = weights_of(found.weighed, build)
    out = build.call(
        torch.ops.recast.pair_products.default,
        *given(found.operands, set(match.nodes), build),
        None, sum if weights is None else "dim",
        name="pair_products",
    )  # fmt: skip
    if weights is not None:  # not by a matrix product, which autocast would round
        if all(is_number(p.weight) for p in found.weighed):
            weights = build.call(torch.Tensor.type_as, weights, out)
        out = build.call(operator.mul, out, weights)
        out = build.call(torch.sum, out, 1, True) if sum == "all" else out
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
    """The result of the op in the shape that the graph expects."""
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
    """P * D: the last size, minus the other parts of the cat."""
    others = [spec_of(part) for part in (*found.before, *found.after)]
    return int(whole) - sum(int(spec.shape[-1]) for spec in others if spec is not None)


def _describe(match: Match) -> str:
    found: Found = match.found
    what = {
        "none": "products", "dim": "inner products",
        "pairs": "the summed products", "all": "the summed inner products",
    }[_sum_of(found.axes)]  # fmt: skip
    if found.weighed:
        what = f"{what}, weighed,"
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
        fired = apply(graph, [OF_EINSUMS, GATHERED, LOOP, CHAIN, JOINED], context)
        fired += apply(graph, [OF_PAIRS], context)
        return fired + apply(graph, [LINEARS, POOLED], context)
