"""Takes the columns of a tensor in one call, where a model selects them one by one.

    x[:, 0], x[:, 1] ... => unbind(x, 1)

Slices of columns, and casts of them: see column_slices.py; lists of columns: chosen_columns.py.

A model with one matrix of ids selects a column for each table: 39 of them take 36 us of Python and
torch, all in one call 11 (one core of a Xeon).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from recast.rewriter import alias
from recast.rewriter.ir import Graph, Node, is_call, is_method
from recast.rewriter.rule import Answer, Build, Match, Rule, apply

from .chosen_columns import CHOSEN
from .column_slices import CASTS, LEAST, SLICES
from .leaf import argument, plural, spec_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


class Column(NamedTuple):
    """``x[:, place]`` for dimension 1; ``place`` as it is given, which may be from the end."""

    source: Node
    dim: int
    place: int


def read(node: Node) -> Column | None:
    """The column that ``node`` selects."""
    if is_call(node, operator.getitem):
        source, key = node.args
        spec = spec_of(source)
        key = key if isinstance(key, tuple) else (key,)
        if spec is None or not key:
            return None
        if key[0] is ...:
            key = (*[slice(None)] * (len(spec.shape) + 1 - len(key)), *key[1:])
        places = [dim for dim, k in enumerate(key) if k != slice(None)]
        if len(places) != 1:
            return None
        dim, place = places[0], key[places[0]]
    elif is_call(node, torch.select) or is_method(node, "select"):
        source, dim, place = (argument(node, k, n) for k, n in enumerate(("input", "dim", "index")))
        spec = spec_of(source)
        if spec is None or not isinstance(dim, int):
            return None
        dim %= len(spec.shape)
    else:
        return None
    plain = isinstance(source, Node) and type(place) is int
    return Column(source, dim, place) if plain else None  # type: ignore[arg-type]


def _match(node: Node, root: nn.Module) -> Answer:
    first = read(node)
    if first is None or len(first.source.users) < LEAST:
        return None
    # Not what is written to or returned: torch refuses writes to a part of what unbind gives.
    hidden = alias.hidden(node.graph, root)
    found = [
        user
        for user in first.source.users
        if (one := read(user)) is not None and one[:2] == first[:2] and user in hidden
    ]
    if not found or found[0] is not node or len(found) < LEAST:
        return None
    spec = spec_of(first.source)
    assert spec is not None
    width: Any = spec.shape[first.dim]
    # Of few columns among many, most views would be made for nothing.
    if not isinstance(width, int) or width > 2 * len(found):
        return None
    return Match(found, found, first)


def _rewrite(match: Match, build: Build) -> list[Node]:
    source, dim, _ = match.found
    columns = build.call(torch.unbind, source, dim, name="columns")
    return [build.item(columns, one.place) for node in match.nodes if (one := read(node))]


SPLIT = Rule(
    name="split-columns",
    equation="x[:, 0], x[:, 1] ... => unbind(x, 1)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda m: f"{plural(len(m.nodes), 'column')} of {m.found.source.name} in one call",
)


@dataclass(frozen=True)
class SplitColumns:
    """x[:, 0], x[:, 1] ... => unbind(x, 1)

    Slices of columns are split likewise, and columns that are cast to integers one by one are cast
    at once. Different columns that a list chooses are selected. Columns of a tensor that the model
    writes to, or returns, stay.
    """

    name: ClassVar[str] = "split-columns"

    def run(self, graph: Graph, context: Context) -> int:
        """Split the tensors of ``graph`` into their columns; returns how many were."""
        return sum(apply(graph, [rule], context) for rule in (CASTS, SLICES, SPLIT, CHOSEN))
