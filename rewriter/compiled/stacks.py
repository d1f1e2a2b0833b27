"""Results of one operation that go side by side into others, and may be one tensor on the way.

Of an operation whose ``direct`` has ``stacked``, results (B, D) that are read together, in one
order, by ``cat`` along columns, by ``stack``, or by operations that ``takes_stacks``, may be one
tensor (B, n, D). Then nothing is joined, and nothing is cut apart in backward: ``cat`` is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recast.rewriter import alias
from recast.rewriter.ir import Graph, Node, Spec, is_call, note


@dataclass(frozen=True)
class Stacked:
    """The operation ``target`` of a call with ``results`` results, of which those of each of
    ``stacks`` may be one tensor. ``unread``: its one stack may be left to be read later.
    """

    target: Any
    results: int
    stacks: tuple[tuple[int, ...], ...]
    unread: bool

    def called(self, direct: bool) -> Callable[..., Any]:
        """A call of it: a list for each stack, of one tensor or of its results; behind them a list
        of all results, with None in place of those in stacks.
        """
        if not direct:
            return lambda *args: self._apart(self.target(*args))
        ways = self.target.direct
        call = (ways.unread if self.unread else ways.stacked)(self.stacks)
        count, stacks = self.results, len(self.stacks)
        others = sorted({*range(count)} - {k for places in self.stacks for k in places})

        def run(*args: Any) -> tuple[list[Any], ...]:
            found = call(*args)
            if len(found) == count:
                return self._apart(found)
            rest = [None] * count
            for k, value in zip(others, found[stacks:], strict=True):
                rest[k] = value
            return *([one] for one in found[:stacks]), rest

        return run

    def _apart(self, found: Sequence[Any]) -> tuple[list[Any], ...]:
        return *([found[k] for k in places] for places in self.stacks), list(found)


@dataclass(frozen=True)
class Joined:
    """``cat(values, dim)``, or ``stack`` along dimension 1, of values (B, D) or stacks of them.

    With ``row``, the values are (B, 1, D), or (B, D) that the model would turn into that.
    """

    stacks: bool
    dim: int
    row: bool

    def __call__(self, values: list[Tensor]) -> Tensor:
        if not self.stacks and not self.row:
            values = [v.flatten(1) if v.dim() == 3 else v for v in values]
        else:
            values = [v if v.dim() == 3 else v.unsqueeze(1) for v in values]
            if self.dim == 2:
                values = [v.flatten(1).unsqueeze(1) for v in values]
        joined = values[0] if len(values) == 1 else torch.cat(values, self.dim)
        return joined.unsqueeze(2) if self.stacks and self.row else joined


class Plan(NamedTuple):
    """calls: what is called in place of an operation; joins: in place of a cat or stack; names: of
    the list that has the place of a result, by the node of that result, and by the one that makes a
    row (B, 1, D) of it; made: of the lists of a call, in order.
    """

    calls: dict[Node, Stacked]
    joins: dict[Node, Joined]
    names: dict[Node, str]
    made: dict[Node, list[str]]


def plan(graph: Graph, root: nn.Module, taken: set[str]) -> Plan:
    """All results of ``graph`` that may be stacked. ``taken``: names that lists must not have."""
    found = Plan({}, {}, {}, {})
    givers = [n for n in graph.nodes if hasattr(_direct(n.target), "stacked") and not n.kwargs]
    if not givers:
        return found
    hidden = alias.hidden(graph, root)
    for call in givers:
        results = _direct(call.target).count(*call.args)
        groups = [] if results is None else list(_groups(call, hidden))
        if not groups:
            continue
        places = tuple(tuple(_number(part) for part in group) for group in groups)
        readers = list(groups[0][0].users)
        unread = (
            places == (tuple(range(results)),)
            and len(readers) == 1
            and getattr(_direct(readers[0].target), "takes_unread", False)
            and _quiet(call, readers[0])
        )
        found.calls[call] = Stacked(call.target, results, places, unread)
        found.made[call] = []
        for k, group in enumerate(groups):
            name = f"{call.name}_stack" if len(groups) == 1 else f"{call.name}_stack_{k}"
            while name in taken:
                name += "_"
            taken.add(name)
            found.made[call].append(name)
            for part in group:
                found.names.update({part: name, _result(part): name})
            for reader in group[0].users:
                join = _join(reader)
                if join is not None:
                    found.joins[reader] = join
    return found


def _result(part: Node) -> Node:
    """The result of a call that ``part`` is, or is made of."""
    return part if part.target is getitem else part.all_input_nodes[0]


def _number(part: Node) -> int:
    return int(_result(part).args[1])  # type: ignore[arg-type]


def _face(result: Node) -> Node:
    """What is read of a result: the row that is made of it, or itself."""
    only = next(iter(result.users)) if len(result.users) == 1 else result
    return only if is_call(only, torch.unsqueeze) and only.args == (result, 1) else result


def _groups(call: Node, hidden: set[Node]) -> Iterator[list[Node]]:
    """Results of ``call`` that all their readers take side by side, in one order."""
    results = list(call.users)
    if any(p.target is not getitem or type(p.args[1]) is not int for p in results):
        return
    parts = [_face(result) for result in results]
    if len({p.args[1] for p in results}) != len(results) or not hidden.issuperset(parts):
        return
    alike: dict[Any, list[Node]] = {}
    for part in parts:
        spec = note(part).spec
        if isinstance(spec, Spec) and part.users:
            kind = frozenset(part.users), spec.dtype, spec.shape[1:]
            alike.setdefault(kind, []).append(part)
    for (readers, _, shape), group in alike.items():
        rows = (len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)) and len(group) > 1
        order = _order(group, next(iter(readers))) if rows else []
        once = len(order) == len(group)
        if once and all(_takes(r, order, len(shape) == 2, hidden) for r in readers):
            yield order


def _order(group: list[Node], reader: Node) -> list[Node]:
    """``group`` in the order in which ``reader`` lists it."""
    listed = reader.args[0] if reader.args else None
    inside = set(group)
    return [v for v in listed if v in inside] if isinstance(listed, (list, tuple)) else []


def _takes(reader: Node, parts: list[Node], row: bool, hidden: set[Node]) -> bool:
    """Whether ``reader`` takes ``parts`` side by side in its list, and nowhere else. ``row``: they
    are (B, 1, D).
    """
    if reader.op != "call_function" or _order(parts, reader) != parts:
        return False
    listed: Any = reader.args[0]
    used: list[Node] = []
    torch.fx.node.map_arg((reader.args, reader.kwargs), used.append)
    inside = set(parts)
    if sum(value in inside for value in used) != len(parts):
        return False
    at = next(k for k, value in enumerate(listed) if value is parts[0])
    if list(listed[at : at + len(parts)]) != parts:
        return False
    if getattr(_direct(reader.target), "takes_stacks", False):
        return True
    join = _join(reader)
    return join is not None and join.row == row and reader in hidden


def _join(reader: Node) -> Joined | None:
    """What ``reader`` joins, if it is a cat of matrices or rows along their columns, or a stack of
    vectors beside each other.
    """
    if not is_call(reader, torch.cat, torch.stack) or set(reader.kwargs) - {"dim", "axis"}:
        return None
    dim = reader.args[1] if len(reader.args) > 1 else reader.kwargs.get("dim", 0)
    specs = [note(v).spec if isinstance(v, Node) else None for v in reader.args[0]]  # type: ignore[union-attr]
    ranks = {len(s.shape) if isinstance(s, Spec) else 0 for s in specs}
    if len(ranks) != 1 or not isinstance(dim, int) or "axis" in reader.kwargs:
        return None
    (rank,) = ranks
    stacks = reader.target is torch.stack
    dim %= max(rank + stacks, 1)
    row = rank == 3 and all(s.shape[1] == 1 for s in specs if isinstance(s, Spec))
    fits = dim == 1 if rank == 2 or (row and stacks) else row and dim > 0
    return Joined(stacks, dim, row) if fits else None


def _quiet(node: Node, reader: Node) -> bool:
    """Whether nothing between ``node`` and ``reader`` could write to what ``node`` reads."""
    between = node.next
    while between is not reader:
        target = between.target
        if not isinstance(target, torch._ops.OpOverload):
            if between.op not in ("placeholder", "get_attr") and target is not getitem:
                return False
        elif target.namespace != "recast" and target._schema.is_mutable:
            return False
        between = between.next
        if between.op in ("root", "output"):
            return False
    return True


def _direct(target: Any) -> Any:
    return getattr(target, "direct", None) if isinstance(target, torch._ops.OpOverload) else None
