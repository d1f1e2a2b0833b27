"""Lookups in dynamic tables: the nodes that turn raw ids into row numbers, in front of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import TYPE_CHECKING, Any

from torch import nn

from recast.rewriter.ir import Graph, Node, is_call
from recast.rewriter.rule import Build
from recast.runtime.dynamic import table as dynamic_table
from recast.runtime.dynamic.module import DynamicEmbedding, DynamicEmbeddingBag
from recast.runtime.dynamic.ranks import fetch_own_rows, find_own_rows
from recast.runtime.dynamic.rows import fetch_rows, find_rows

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


def _has_tiers(lookup: Lookup, root: nn.Module) -> bool:
    module = module_of(lookup.node, root)
    if not isinstance(module, (DynamicEmbedding, DynamicEmbeddingBag)):
        return False
    return bool(module.table.settings.tiers)


def misread(graph: Graph, root: nn.Module) -> Node | None:
    """The first node that reads the weight of a dynamic table, whose rows are unordered, as a
    matrix.
    """
    for node in graph.nodes:
        held = tensor_at(node, root) if node.op == "get_attr" else None
        if held is None or dynamic_table.of(held) is None:
            continue
        other = next(
            (user for user in node.users if user.target not in (find_rows, fetch_rows)), None
        )
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

    and ``find_rows(table, w, fetch_rows(table, w, x))`` where rows are on disk.
    Adds one node for all dynamic tables of a group. ``weights``: the node of each table, by its id.
    Returns the matrix of each dynamic table by the table's id, and the rows of each of its lookups
    by their position in the group.
    """
    dynamic = {k: x for k, x in enumerate(group) if is_dynamic(x, build.root)}
    if not dynamic:
        return {}, {}
    paths = {id(x.table): str(x.node.target) for x in reversed(dynamic.values())}
    tables = list({id(x.table): None for x in dynamic.values()})
    given: list[Any] = [
        [build.get(f"{paths[t]}.table") for t in tables],
        [weights[t] for t in tables],
        [x.ids for x in dynamic.values()],
        [tables.index(id(x.table)) for x in dynamic.values()],
        [build.get(f"{x.node.target}.training") for x in dynamic.values()],
    ]
    if any(_has_tiers(x, build.root) for x in dynamic.values()):
        fetched = build.call(fetch_rows, *given, name="fetch_rows")
        given[_IDS] = [build.item(fetched, k) for k in range(len(dynamic))]
    call = build.call(find_rows, *given, name="find_rows")
    matrices = {t: build.item(call, place) for place, t in enumerate(tables)}
    rows = {k: build.item(call, len(tables) + place) for place, k in enumerate(dynamic)}
    return matrices, rows


# ---------------------------------------------------------------- over ranks

_TABLES, _WEIGHTS, _IDS, _TABLE, _TRAINING = range(5)  # arguments of find_rows


def weight_behind(node: Any) -> Any:
    """The node of the weight whose rows ``node``, a matrix of ``find_rows``, are; else ``node``."""
    found = _found(node, matrix=True)
    return node if found is None else found[0].args[_WEIGHTS][found[1]]


def ids_behind(node: Any) -> Any:
    """The node of the raw ids whose rows ``node`` has; else ``node``."""
    found = _found(node, matrix=False)
    if found is None:
        return node
    ids = found[0].args[_IDS][found[1]]
    fetch = ids.args[0] if is_call(ids, getitem) else None
    if isinstance(fetch, Node) and is_call(fetch, fetch_rows):
        return fetch.args[_IDS][ids.args[1]]  # type: ignore[index]
    return ids


def reads_rows_of(node: Node) -> bool:
    """Whether ``node`` is one of those that :func:`encode` puts in front of lookups."""
    return is_call(node, find_rows) or is_call(node, fetch_rows)


def paddings(call: Node, root: nn.Module, padding: Sequence[Any]) -> list[Any]:
    """``padding_idx`` of the lookups of ``call``, as an id where they are of a dynamic table."""
    known = list(padding)
    for k, node in enumerate(call.args[1]):  # type: ignore[arg-type]
        found = _found(node, matrix=False)
        if found is not None:
            find, j = found
            weight = tensor_at(find.args[_WEIGHTS][find.args[_TABLE][j]], root)
            table = None if weight is None else dynamic_table.of(weight)
            known[k] = None if table is None else table.padding
    return known


def encode_arrived(
    call: Node, make: Callable[..., Node], ids: Node, exchange: Node
) -> tuple[list[Any], Any]:
    """bags(m, r), m, r = find_rows(table, w, x)  =>  bags(m', r'), m', r' = find_own_rows(x')

    and ``find_own_rows(fetch_own_rows(x'))`` where rows are on disk, with x' the ids that arrived
    here. Returns the matrices of the tables of ``call`` and the rows of its lookups; where no table
    is dynamic, these are the weights and ``ids`` unchanged.
    """
    matrices, rows = list(call.args[0]), list(call.args[1])  # type: ignore[arg-type]
    found = {k: f for k, node in enumerate(rows) if (f := _found(node, matrix=False)) is not None}
    if not found:
        return matrices, ids
    rows = [make(getitem, ids, k) for k in range(len(rows))]
    tables = {t: f for t, node in enumerate(matrices) if (f := _found(node, matrix=True))}
    place = {t: at for at, t in enumerate(tables)}
    owned = call.args[4]  # the table of each lookup
    given: list[Any] = [
        [f.args[_TABLES][j] for f, j in tables.values()],
        [f.args[_WEIGHTS][j] for f, j in tables.values()],
        [rows[k] for k in found],
        [place[owned[k]] for k in found],  # type: ignore[index]
        [f.args[_TRAINING][j] for f, j in found.values()],
    ]
    if any(_has_fetched(f) for f, _ in found.values()):
        fetched = make(fetch_own_rows, exchange, *given, name="fetch_rows")
        given[_IDS] = [make(getitem, fetched, j) for j in range(len(found))]
    find = make(find_own_rows, exchange, *given, name="find_rows")
    for t, at in place.items():
        matrices[t] = make(getitem, find, at)
    for j, k in enumerate(found):
        rows[k] = make(getitem, find, len(place) + j)
    return matrices, rows


def _found(node: Any, *, matrix: bool) -> tuple[Any, int] | None:
    """The ``find_rows`` that ``node`` is an output of, and the table or lookup it belongs to."""
    if not isinstance(node, Node) or not is_call(node, getitem):
        return None
    find, at = node.args[:2]
    if not isinstance(find, Node) or not is_call(find, find_rows) or not isinstance(at, int):
        return None
    tables = len(find.args[_TABLES])  # type: ignore[arg-type]
    if matrix != (at < tables):
        return None
    return find, at if matrix else at - tables


def _has_fetched(find: Node) -> bool:
    """Whether the ids of ``find`` come from a ``fetch_rows``."""
    return any(
        is_call(ids, getitem) and is_call(ids.args[0], fetch_rows)
        for ids in find.args[_IDS]  # type: ignore[union-attr]
    )


def drop(graph: Graph) -> None:
    """Erase every ``find_rows`` and ``fetch_rows`` that is no longer read."""
    for find in [n for n in reversed(graph.nodes) if reads_rows_of(n)]:
        for item in [user for user in find.users if not user.users]:
            graph.erase_node(item)
        if not find.users:
            graph.erase_node(find)
