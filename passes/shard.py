"""Separates sharded tables from those that every rank holds.

A call of ``embedding_bags`` with tables of both kinds becomes two: one to be exchanged, one local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, items
from recast.rewriter.rule import Answer, Build, Match, Rule, apply
from recast.runtime.plan import Plan

from .dynamic import weight_behind
from .leaf import plural, tensor_at

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

BAGS = torch.ops.recast.embedding_bags.default
_PER_LOOKUP = (1, 2, 3, 4, 5, 6, 7, 8)  # the arguments of embedding_bags that are lists of lookups
TABLE = 4  # of them, the table of each lookup
_NARROW, _WHOLE = 9, 10  # a flag of the call, and another list of lookups: not in every call


def name_of(weight: Any, root: nn.Module) -> str | None:
    """The name of a table in the plan: its first path in ``state_dict()``."""
    tensor = tensor_at(weight_behind(weight), root)
    return next((name for name, p in root.named_parameters() if p is tensor), None)


def spread_tables(call: Node, root: nn.Module, plan: Plan) -> list[bool]:
    """For each table of a call of ``embedding_bags``: whether it is sharded."""
    kinds = {p.table: p.sharding_type for p in plan.placements}
    weights: Sequence[Any] = call.args[0]  # type: ignore[assignment]
    whole = "data_parallel"
    return [kinds.get(name_of(w, root) or "", whole) != whole for w in weights]


def _matcher(plan: Plan) -> Callable[[Node, nn.Module], Answer]:
    def match(node: Node, root: nn.Module) -> Answer:
        if not is_call(node, BAGS):
            return None
        spread = spread_tables(node, root, plan)
        if all(spread) or not any(spread):
            return None
        outputs = [item for _, item in sorted(items(node), key=lambda found: found[0])]
        return Match([node, *outputs], outputs, (node, spread))

    return match


def _rewrite(match: Match, build: Build) -> list[Node]:
    call, spread = match.found
    made: dict[int, tuple[Node, int]] = {}  # lookup -> its call, and its place in it
    for kept in (True, False):
        tables = [t for t, s in enumerate(spread) if s is kept]
        lookups = [k for k, t in enumerate(call.args[TABLE]) if spread[t] is kept]
        args: list[Any] = [[call.args[0][t] for t in tables]]
        args += [[call.args[at][k] for k in lookups] for at in _PER_LOOKUP]
        args[TABLE] = [tables.index(t) for t in args[TABLE]]
        args += call.args[_NARROW:_WHOLE]
        args += [[flags[k] for k in lookups] for flags in call.args[_WHOLE:]]
        part = build.call(BAGS, *args, name="embedding_bags")
        made |= {k: (part, j) for j, k in enumerate(lookups)}
    return [build.item(*made[item.args[1]]) for item in match.outputs]  # type: ignore[index]


def _describe(match: Match) -> str:
    _, spread = match.found
    return f"{plural(sum(spread), 'table')} over ranks, {len(spread) - sum(spread)} on every rank"


@cache
def shard_rule(plan: Plan) -> Rule:
    """The rule for one plan."""
    return Rule(
        name="shard-tables",
        equation="bags([v.., w..]) => bags([v..]), bags([w..]) where v is over ranks, w on each",
        match=_matcher(plan),
        rewrite=_rewrite,
        describe=_describe,
    )


@dataclass(frozen=True)
class ShardTables:
    """bags([v.., w..]) => bags([v..]), bags([w..]) where v is over ranks, w on each

    As the plan says: data_parallel tables are on every rank.
    """

    name: ClassVar[str] = "shard-tables"
    plan: Plan

    def run(self, graph: Graph, context: Context) -> int:
        """Take the calls of ``graph`` apart; returns how many there were."""
        return apply(graph, [shard_rule(self.plan)], context)
