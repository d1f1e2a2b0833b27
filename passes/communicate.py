"""Lookups in sharded tables, with their communication as nodes of the graph.

    rows = bags(ws, ids)  =>  arrived = wait_ids(send_ids(ws, ids))        ids to the owners
                              rows = wait_rows(send_rows(bags(ws, arrived)))    rows back

The tables here are this rank's parts; the graph is the same on all ranks. Raw ids of dynamic tables
travel too, and the owner finds their rows: ``find_rows`` comes after ``wait_ids``.
The first four nodes are placed as early as their inputs allow, and ``wait_rows`` before the first
reader of the rows; work that does not need the rows (the bottom network) runs while they travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from recast.rewriter import order
from recast.rewriter.ir import KEY, Graph, Node, annotate, is_call, items, merge, note
from recast.rewriter.report.journal import Fired
from recast.rewriter.rule import Miss
from recast.runtime.plan import Plan
from recast.runtime.ranks.exchange_ids import send_ids, wait_ids
from recast.runtime.ranks.exchange_route import Route
from recast.runtime.ranks.exchange_rows import send_rows, wait_rows

from .dynamic import drop, encode_arrived, ids_behind, paddings, weight_behind
from .leaf import plural
from .overlap import Place, place_of
from .shard import BAGS, TABLE, name_of, spread_tables

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_IDS, _OFFSETS, _WEIGHTS, _MODE, _PADDING, _ENDED, _SPARSE = 1, 2, 3, 5, 6, 7, 8
_ARRIVED = 5  # values of wait_ids


def _route(
    call: Node, root: nn.Module, plan: Plan, wire: tuple[str, str], repeating: frozenset[str]
) -> Route:
    """The route of the lookups of ``call``."""
    weights: Sequence[Any] = call.args[0]  # type: ignore[assignment]
    names = [name_of(w, root) for w in weights]
    tables = {t.name: t for t in plan.tables}
    table, mode, ended = (tuple(call.args[at]) for at in (TABLE, _MODE, _ENDED))  # type: ignore[arg-type]
    return Route(
        world_size=plan.world_size,
        tables=tuple(tables[str(n)] for n in names),
        placements=tuple(plan.placement(str(n)) for n in names),
        table=table,
        mode=mode,
        include_last_offset=ended,
        wire=wire,
        repeating=repeating & frozenset(map(str, names)),
    )


def _where(call: Node, root: nn.Module) -> Place:
    """Where the nodes go: beside independent work where there is any."""
    at = place_of(call, root)
    if not isinstance(at, Miss):
        return at
    place = order.positions(call.graph)
    rows = [item for _, item in items(call)]
    readers = {user for n in (call, *rows) for user in n.users} - set(rows)
    reader = min(readers, key=place.__getitem__) if readers else call.next
    return Place(call, [], reader, [])


def _rewrite(call: Node, root: nn.Module, at: Place, route: Route, rule: str) -> None:
    graph, args = call.graph, call.args
    rows = dict(sorted(items(call), key=itemgetter(0)))
    specs = [note(item).spec for item in rows.values()]
    spec = tuple(specs) if len(rows) == len(route.table) else None

    def make(target: Any, *given: Any, name: str | None = None, **words: Any) -> Node:
        made = graph.create_node("call_function", target, given, words, name=name)
        made.meta[KEY] = merge([call], rule)
        return made

    for node in at.moved:
        at.first.prepend(node)
    ids = [ids_behind(node) for node in args[_IDS]]  # type: ignore[union-attr]
    weights = [weight_behind(node) for node in args[0]]  # type: ignore[union-attr]
    padding = paddings(call, root, args[_PADDING])  # type: ignore[arg-type]
    given: dict[str, Any] = {"padding_idx": padding}
    for word, k in (("offsets", _OFFSETS), ("per_sample_weights", _WEIGHTS)):
        if any(v is not None for v in args[k]):  # type: ignore[union-attr]
            given[word] = args[k]
    with graph.inserting_before(at.first):
        sent = make(send_ids, weights, ids, route, **given)
        arrived = make(wait_ids, sent)
        annotate(arrived, spec=(None,) * _ARRIVED)
        came, offsets, factors, local_padding, exchange = (
            make(getitem, arrived, k) for k in range(_ARRIVED)
        )
        matrices, rows_here = encode_arrived(call, make, came, exchange)
        modes, ended = list(route.local_modes), [True] * len(route.table)
        local = make(
            BAGS, matrices, rows_here, offsets, factors, args[TABLE], modes, local_padding, ended,
            args[_SPARSE], name="embedding_bags",
        )  # fmt: skip
        flying = make(send_rows, local, exchange)
    with graph.inserting_before(at.reader):
        landed = make(wait_rows, flying)
    for node in (sent, arrived, local, flying):
        annotate(node, place="owners")
    annotate(landed, spec=spec)
    for item in reversed(rows.values()):
        item.args = (landed, item.args[1])
        landed.append(item)
    graph.erase_node(call)
    drop(graph)


@dataclass(frozen=True)
class Communicate:
    """bags(ws, ids) => wait_rows(send_rows(bags(ws, wait_ids(send_ids(ws, ids)))))

    For tables that are spread over ranks by the plan. ``wire``: what rows travel as, forward and
    backward (see ``runtime.wire``). ``repeating``: tables of whose ids each is sent once.
    """

    name: ClassVar[str] = "communicate"
    plan: Plan
    wire: tuple[str, str] = ("fp32", "fp32")
    repeating: frozenset[str] = frozenset()

    def run(self, graph: Graph, context: Context) -> int:
        """Insert the communication of ``graph``; returns the number of calls that got it."""
        fired = 0
        for call in [n for n in graph.nodes if is_call(n, BAGS)]:
            if context.fuel_left() == 0:
                break
            if not all(spread_tables(call, context.root, self.plan)):
                continue
            route = _route(call, context.root, self.plan, self.wire, self.repeating)
            at = _where(call, context.root)
            origin, where = note(call).origin, note(call).where
            beside = f", beside {', '.join(n.name for n in at.beside)}" if at.beside else ""
            once = (
                f", ids of {plural(len(route.repeating), 'table')} once" if route.repeating else ""
            )
            what = f"{plural(len(route.table), 'lookup')} of {route}{once}{beside}"
            context.journal.fired.append(Fired(self.name, call.name, origin, where, what))
            _rewrite(call, context.root, at, route, self.name)
            context.burn()
            fired += 1
        return fired
