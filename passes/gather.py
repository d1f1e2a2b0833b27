"""Lookups whose rows only a dot interaction reads: the interaction looks them up itself.

The rows are then never written. In return, backward reads the tables again, and the lookups no
longer overlap with a bottom network. So this pass is not in the default pipeline: ask for it with
``passes="default,gather-in-dots"``, and keep it where it is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, items, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .leaf import argument, bytes_of, human, on_gpu, plural, rank, tensor_at

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_DOT = torch.ops.recast.dot_interaction.default
_GATHERED = torch.ops.recast.gathered_dots.default
_BAGS = torch.ops.recast.embedding_bags.default
_BESIDE = torch.ops.recast.embedding_bags_beside.default
_JOIN = torch.ops.recast.join.default
_NARROW = 9  # the place of the flag among the arguments of embedding_bags
_MODES = ("sum", "mean", "none", "total")


@dataclass(frozen=True)
class Found:
    """A call of lookups and the interaction that reads all its rows."""

    call: Node
    dot: Node
    features: tuple[Node, ...]  # that are given
    order: tuple[int, ...]  # the number of a lookup, or -1 - i for the i-th given feature


def _call_of(row: Any) -> tuple[Node, Node] | None:
    """``(call, source)`` where ``row`` is a result of lookups: of a join, or of the call itself."""
    if not isinstance(row, Node) or not row.args or not isinstance(row.args[0], Node):
        return None
    source = row.args[0]
    call = source.args[0] if is_call(source, _JOIN) else source
    if not isinstance(call, Node) or not is_call(call, _BAGS, _BESIDE):
        return None
    return (call, source) if row in {item for _, item in items(source)} else None


def _unlike(call: Node, root: nn.Module, everywhere: bool) -> Miss | None:
    """Why the interaction cannot do these lookups itself, or None."""
    weights, ids, _, factors, _, mode, _, _, sparse, *_ = call.args
    tables = [tensor_at(weight, root) for weight in weights]  # type: ignore[union-attr]
    if not everywhere and not on_gpu(call, root):
        return Miss(call, "its tables are not on a GPU")
    if len({tuple(t.shape[1:]) for t in tables if t is not None}) != 1:
        return Miss(call, "tables of several widths")
    for k, how in enumerate(mode):  # type: ignore[arg-type]
        if how not in _MODES or factors[k] is not None:  # type: ignore[index]
            return Miss(call, f"lookup {k} is a {how} or has a weight for each id")
        if sparse[k]:  # type: ignore[index]
            return Miss(call, f"the table of lookup {k} asks for sparse gradients")
        if how == "none" and rank(ids[k]) != 1:  # type: ignore[index]
            return Miss(call, f"lookup {k} does not give one row per sample")
    return None


def _matcher(everywhere: bool) -> Callable[[Node, nn.Module], Answer]:
    def match(dot: Node, root: nn.Module) -> Answer:
        if not is_call(dot, _DOT):
            return None
        rows = list(argument(dot, 0, "features"))
        found = next((pair for pair in map(_call_of, rows) if pair is not None), None)
        if found is None:
            return None
        call, source = found
        outputs = {item: k for k, item in _numbered(source)}
        unlike = _unlike(call, root, everywhere)
        if unlike is not None:
            return unlike
        for item in outputs:
            if sole_user(item) is not dot or rows.count(item) != 1:
                return Miss(item, "its rows have readers other than the interaction")
        if argument(dot, 1, "dense") in outputs:
            return Miss(dot, "its dense part is looked up")
        if len(outputs) != len(call.args[1]):  # type: ignore[arg-type]
            return Miss(call, "some of its rows are not read")
        given = tuple(dict.fromkeys(row for row in rows if row not in outputs))
        if any(rank(row) != 2 for row in given):
            return Miss(dot, "a given feature is not a matrix (B, D)")
        order = tuple(outputs[r] if r in outputs else -1 - given.index(r) for r in rows)
        nodes = [call, *([source] if source is not call else []), *outputs, dot]
        return Match(nodes, [dot], Found(call, dot, given, order))

    return match


def _numbered(source: Node) -> list[tuple[int, Node]]:
    return [(int(item.args[1]), item) for _, item in items(source)]  # type: ignore[arg-type]


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    weights, ids, offsets, _, table, mode, padding, last, *_ = found.call.args
    narrow = bool(found.call.args[_NARROW]) if len(found.call.args) > _NARROW else False
    rest = [argument(found.dot, k, name) for k, name in
            ((1, "dense"), (2, "li"), (3, "lj"), (4, "pad"))]  # fmt: skip
    # The flag of align-rows, which runs before, where it is set.
    rest += found.dot.args[5:]
    return [
        build.call(
            _GATHERED, weights, ids, offsets, table, mode, padding, last, narrow,
            list(found.features), list(found.order), *rest, name="gathered_dots",
        )
    ]  # fmt: skip


def _describe(match: Match) -> str:
    found: Found = match.found
    count = len(found.call.args[1])  # type: ignore[arg-type]
    return f"{plural(count, 'lookup')} done by the interaction that reads their rows"


def _worth(match: Match) -> str | None:
    """Bytes a sample: rows are written once and read twice less, their tables read once more."""
    total = 0
    for node in match.nodes:
        if _call_of(node) is not None:
            size = bytes_of(node)
            if size is None:
                return None
            total += size
    return f"{human(2 * total)} of traffic a sample"


@cache
def gather_rule(everywhere: bool) -> Rule:
    """The rule for tables on a GPU only, or for all."""
    return Rule(
        name="gather-in-dots",
        equation="dot_interaction([x, *bags(ws, xs)], ..) => gathered_dots(ws, xs, [x], ..)",
        match=_matcher(everywhere),
        rewrite=_rewrite,
        describe=_describe,
        worth=_worth,
    )


@dataclass(frozen=True)
class GatherInDots:
    """dot_interaction([x, *bags(ws, xs)], ..) => gathered_dots(ws, xs, [x], ..)

    Where only the interaction reads the rows: sums, means or single rows of tables of one width.
    Only for tables on a GPU, unless ``everywhere``.
    """

    name: ClassVar[str] = "gather-in-dots"
    everywhere: bool = False

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the interactions of ``graph``; returns the number of those that were."""
        return apply(graph, [gather_rule(self.everywhere)], context)
