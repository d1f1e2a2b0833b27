"""Runs lookups and the work that does not wait for them on two streams of a GPU.

A lookup is bound by memory, a bottom network by compute: in parallel they take the time of one. The
lookups are launched first, so that they are under way while the rest is launched; a ``join`` is
placed before the first reader of their rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter import alias, order
from recast.rewriter.ir import (
    KEY,
    Graph,
    Node,
    annotate,
    depends,
    is_call,
    items,
    merge,
    note,
)
from recast.rewriter.report.journal import Fired, Missed
from recast.rewriter.rule import Miss

from .leaf import module_of, on_gpu, plural

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_BAGS = torch.ops.recast.embedding_bags.default
_BESIDE = torch.ops.recast.embedding_bags_beside.default
_JOIN = torch.ops.recast.join.default
# Work that takes the GPU long enough to be worth a second stream.
_LONG = (
    torch.ops.recast.mlp.default, F.linear, torch.matmul, operator.matmul, torch.bmm, torch.mm,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where the nodes of one overlap are placed."""

    first: Node  # the lookups, and what they need, go before it
    moved: list[Node]  # these, in order
    reader: Node  # the join goes before it
    beside: list[Node]  # long work between the two


def _long(node: Node, root: nn.Module) -> bool:
    return is_call(node, *_LONG) or isinstance(module_of(node, root), nn.Linear)


def place_of(call: Node, root: nn.Module) -> Place | Miss:
    """Where the lookups of ``call`` can run beside other work; a Miss where they cannot."""
    place = order.positions(call.graph)
    rows = [item for _, item in items(call)]
    readers = {user for n in (call, *rows) for user in n.users} - set(rows)
    if not readers:
        return Miss(call, "nothing reads its rows")
    reader = min(readers, key=place.__getitem__)
    free = [
        n for n in call.graph.nodes
        if place[n] < place[reader] and _long(n, root) and not depends(call, {n})
    ]  # fmt: skip
    if not free:
        return Miss(call, "no product that could run beside it stands before the first reader")
    first = min((free[0], call), key=place.__getitem__)
    hoisted = set() if first is call else order.hoisted([call], first, place)
    fixed = next((n for n in hoisted if not order.movable(n, root)), None)
    if fixed is not None:
        return Miss(fixed, "an input of the lookups with side effects would have to move")
    crossed = [n for n in call.graph.nodes if place[first] <= place[n] < place[reader]]
    writing = [n for n in crossed if n not in hoisted and order.writes(n, root)]
    known = alias.roots(call.graph, root) if writing else {}
    for n in writing:
        if alias.clash(n, root, hoisted | {call}, known):
            return Miss(n, "it writes in place to what the lookups beside it may still read")
    return Place(first, sorted(hoisted, key=place.__getitem__), reader, free)


def _rewrite(call: Node, at: Place, name: str) -> None:
    rows = dict(sorted(items(call), key=itemgetter(0)))
    for node in at.moved:
        at.first.prepend(node)
    spec = note(call).spec
    if spec is None and len(rows) == len(call.args[1]):  # type: ignore[arg-type]
        spec = tuple(note(item).spec for item in rows.values())
    call.target = _BESIDE
    call._rename("embedding_bags_beside")
    annotate(call, rule=name, spec=spec)
    with call.graph.inserting_before(at.reader):
        join = call.graph.create_node("call_function", _JOIN, (call,), name="join")
    join.meta[KEY] = merge([call], name)
    annotate(join, spec=spec)
    call.replace_all_uses_with(join, delete_user_cb=lambda user: user is not join)
    for item in reversed(rows.values()):
        join.append(item)


def _lookups(graph: Graph, root: nn.Module, everywhere: bool) -> Iterator[Node]:
    for node in list(graph.nodes):
        if is_call(node, _BAGS) and (everywhere or on_gpu(node, root)):
            yield node


@dataclass(frozen=True)
class OverlapLookups:
    """mlp(x), rows = bags(ws, xs) => rows = bags_beside(ws, xs), mlp(x), join(rows)

    Where a product (Linear, matmul, mlp) stands before the first reader of the rows and none of
    the lookups' inputs is computed from it. Only for tables on a GPU, unless ``everywhere``.
    """

    name: ClassVar[str] = "overlap-lookups"
    everywhere: bool = False

    def run(self, graph: Graph, context: Context) -> int:
        """Overlap the lookups of ``graph``; returns the number of calls that were."""
        fired = 0
        for call in _lookups(graph, context.root, self.everywhere):
            if context.fuel_left() == 0:
                break
            at = place_of(call, context.root)
            if isinstance(at, Miss):
                where = note(at.node).where or note(call).where
                context.journal.miss(Missed(self.name, at.node.name, at.why, where, at.tries))
                continue
            _rewrite(call, at, self.name)
            names = ", ".join(n.name for n in at.beside)
            what = f"{plural(len(call.args[1]), 'lookup')} beside {names}"  # type: ignore[arg-type]
            origin, where = note(call).origin, note(call).where
            context.journal.fired.append(Fired(self.name, call.name, origin, where, what))
            context.burn()
            fired += 1
        return fired
