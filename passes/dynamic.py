"""Ids of any value as rows: what stands in front of lookups in dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from recast.rewriter.ir import Graph, Node
from recast.rewriter.rule import Build
from recast.runtime.dynamic import table as dynamic_table
from recast.runtime.dynamic.module import DynamicEmbedding, DynamicEmbeddingBag
from recast.runtime.dynamic.rows import find_rows

from .leaf import module_of, tensor_at

if TYPE_CHECKING:
    from .embeddings import Lookup


def kind_of(module: nn.Module, plain: type[nn.Module]) -> type[nn.Module]:
    """The class whose forward ``module`` must have: ``plain``, or its dynamic form."""
    if isinstance(module, (DynamicEmbedding, DynamicEmbeddingBag)):
        return DynamicEmbedding if plain is nn.Embedding else DynamicEmbeddingBag
    return plain


def is_dynamic(lookup: Lookup, root: nn.Module) -> bool:
    module = module_of(lookup.node, root)
    return isinstance(module, (DynamicEmbedding, DynamicEmbeddingBag))


def misread(graph: Graph, root: nn.Module) -> Node | None:
    """The first node that reads the weight of a dynamic table itself, whose rows have no order."""
    for node in graph.nodes:
        held = tensor_at(node, root) if node.op == "get_attr" else None
        if held is None or dynamic_table.of(held) is None:
            continue
        other = next((user for user in node.users if user.target is not find_rows), None)
        if other is not None:
            return other
    return None


def padding(lookup: Lookup, root: nn.Module) -> int | None:
    """``padding_idx`` among the rows of the matrix: the first, which no id has."""
    module = module_of(lookup.node, root)
    assert isinstance(module, (DynamicEmbedding, DynamicEmbeddingBag))
    return None if module.table.padding is None else 0


def encode(
    build: Build, group: Sequence[Lookup], weights: Mapping[int, Any]
) -> tuple[dict[int, Node], dict[int, Node]]:
    """bag(w, x) => m, r = find_rows(table, w, x), bag(m, r)     w dynamic

    One node for all dynamic tables of a group. ``weights``: the node of each table, by its id.
    Gives the matrix of each dynamic table by the table's id, and the rows of each of its lookups
    by their place in the group.
    """
    dynamic = {k: x for k, x in enumerate(group) if is_dynamic(x, build.root)}
    if not dynamic:
        return {}, {}
    paths = {id(x.table): str(x.node.target) for x in reversed(dynamic.values())}
    tables = list({id(x.table): None for x in dynamic.values()})
    call = build.call(
        find_rows,
        [build.get(f"{paths[t]}.table") for t in tables],
        [weights[t] for t in tables],
        [x.ids for x in dynamic.values()],
        [tables.index(id(x.table)) for x in dynamic.values()],
        [build.get(f"{x.node.target}.training") for x in dynamic.values()],
        name="find_rows",
    )
    matrices = {t: build.item(call, place) for place, t in enumerate(tables)}
    rows = {k: build.item(call, len(tables) + place) for place, k in enumerate(dynamic)}
    return matrices, rows
