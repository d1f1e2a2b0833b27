"""Reads a Parameter that is indexed by ids as what it is: a table, and a lookup of its rows.

    table[ids], table.index_select(0, ids) => embedding(ids, table)

torch gives an indexed Parameter a dense gradient. As a lookup it is grouped with the others, and
its gradient is rows. Indices may be negative, which count from the end; ids may not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, is_call, is_method
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply
from recast.runtime.dynamic import table as dynamic_table

from .leaf import argument, spec_of, tensor_at

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_IDS = (torch.int64, torch.int32)
# Calls that keep what is not negative so, and calls that give nothing negative.
_KEEP = ("long", "to", "view", "reshape", "flatten", "unsqueeze", "squeeze", "contiguous")
_KEEPING = (operator.getitem, torch.reshape, torch.flatten, torch.unsqueeze, torch.squeeze)
_NEVER = ("argmax", "argmin", "argsort", "abs")
_NEVER_FUNCTIONS = (torch.argmax, torch.argmin, torch.argsort, torch.abs,
                    torch.bucketize, torch.searchsorted)  # fmt: skip


class Indexed(NamedTuple):
    """``table[ids]``, or ``index_select``, whose ids are never negative."""

    table: Node
    ids: Node
    rows: int
    wraps: bool


def _read(node: Node) -> tuple[Any, Any, bool] | None:
    """``(table, ids, whether negative ids count from the end)`` of what may be an indexing."""
    if is_call(node, operator.getitem):
        return node.args[0], node.args[1], True
    method = is_method(node, "index_select")
    if not method and not is_call(node, torch.index_select):
        return None
    if argument(node, 1, "dim") != 0:
        return None
    return argument(node, 0, "self" if method else "input"), argument(node, 2, "index"), False


def _match(node: Node, root: nn.Module) -> Answer:
    read = _read(node)
    if read is None:
        return None
    source, ids, wraps = read
    table, spec = tensor_at(source, root), spec_of(ids)
    if not isinstance(table, nn.Parameter) or spec is None or spec.dtype not in _IDS:
        return None
    if not spec.shape or all(isinstance(size, int) for size in spec.shape):
        return None  # a row of the table, or a choice of rows that is the same for all samples
    if table.dim() == 1:
        return Miss(
            node,
            "a vector indexed by ids gets a dense gradient, and is no table of rows",
            ("nn.Embedding(rows, 1)",),
        )
    if table.dim() != 2 or not table.is_floating_point() or not table.is_leaf:
        return None
    if dynamic_table.of(table) is not None:
        return None
    wraps = wraps and not _never_negative(ids)
    return Match([node], [node], Indexed(source, ids, len(table), wraps))


def _never_negative(ids: Any) -> bool:
    """Whether no id can be negative, by the call that made it: ``x % rows``, ``x.clamp(0)`` ..."""
    while is_call(ids, *_KEEPING) or is_method(ids, *_KEEP):
        ids = ids.args[0]
    if is_call(ids, operator.mod, torch.remainder) or is_method(ids, "remainder"):
        by = argument(ids, 1, "other")
        return isinstance(by, int) and by > 0
    if is_call(ids, torch.clamp) or is_method(ids, "clamp", "clamp_min"):
        least = argument(ids, 1, "min")
        return isinstance(least, int) and least >= 0
    return is_call(ids, *_NEVER_FUNCTIONS) or is_method(ids, *_NEVER)


def _rewrite(match: Match, build: Build) -> Sequence[Node]:
    found: Indexed = match.found
    ids: Any = found.ids
    if found.wraps:
        # What lies before the first row stays as it is, so that the error can name it.
        last = build.call(operator.add, ids, found.rows)
        wraps = build.call(
            operator.and_, build.call(operator.lt, ids, 0), build.call(operator.ge, last, 0)
        )
        ids = build.call(torch.where, wraps, last, ids)
    return [build.call(F.embedding, ids, found.table, name="indexed")]


LOOK_UP = Rule(
    name="look-up-rows",
    equation="table[ids] => embedding(ids, table)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda m: "a Parameter indexed by ids, read as a lookup",
)


@dataclass(frozen=True)
class LookUpRows:
    """table[ids], table.index_select(0, ids) => embedding(ids, table)

    Where ``table`` is a Parameter of two dimensions. Negative indices still count from the end.
    """

    name: ClassVar[str] = "look-up-rows"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the indexings of ``graph``; returns how many were."""
        return apply(graph, [LOOK_UP], context)
