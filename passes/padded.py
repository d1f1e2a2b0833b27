"""A recurrent unit over packed sequences, without the packing.

    gru(pack(x, lengths)), padded again  =>  gru(x, lengths)

``pack_padded_sequence`` sorts the sequences by length, copies them into that order and then step by
step into one tensor; ``pad_packed_sequence`` goes the way back. The op reads and writes the padded
rows where they are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from recast.rewriter.ir import Graph, Node, is_call, is_method, items
from recast.rewriter.rule import Answer, Build, Match, Rule

from .leaf import argument, spec_of

_OP = torch.ops.recast.gru.default
_PACK, _PAD = torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence


class Packing(NamedTuple):
    """``pack_padded_sequence(rows, lengths)``; ``sort`` is the call that ordered them, if any."""

    rows: Any
    lengths: Any
    sort: Node | None
    batch_first: bool
    made: Node


class Padding(NamedTuple):
    """A call of ``pad_packed_sequence``, with what reads its rows and its lengths."""

    value: float
    batch_first: bool
    call: Node
    parts: tuple[Node, ...]
    outputs: tuple[Node, ...]
    lengths: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The op, what it reads, and what reads it."""

    call: Node
    x: Packing
    scores: Packing | None
    padding: Padding | None
    lasts: tuple[Node, ...]
    stacked: tuple[Node, ...]  # what is read of those, in the callers' order, after a stack


def _ordering(index: Any) -> Node | None:
    """The sort of which ``index`` is the second result, on whatever device."""
    while is_method(index, "to", "cpu"):
        index = index.args[0]
    second = is_call(index, operator.getitem) and index.args[1] == 1
    sort: Any = index.args[0] if second else None
    known = is_call(sort, torch.sort) and argument(sort, 1, "dim", -1) in (0, -1)
    return sort if known and argument(sort, 2, "descending", False) is True else None


def _packing(rows: Any) -> Packing | None:
    """How ``rows`` were packed."""
    is_first = is_call(rows, operator.getitem) and rows.args[1] == 0
    made: Any = rows.args[0] if is_first else None
    if not is_call(made, _PACK) or made.kwargs or len(made.args) != 3:
        return None
    source: Any
    lengths: Any
    source, lengths, first = made.args
    if type(first) is not bool:
        return None
    is_second = is_call(lengths, operator.getitem) and lengths.args[1] == 0
    sort: Any = lengths.args[0] if is_second else None
    if not is_call(sort, torch.sort):
        return Packing(source, lengths, None, first, made)
    moved = is_method(source, "index_select") or is_call(source, torch.index_select)
    if not moved or argument(source, 1, "dim") != (0 if first else 1):
        return None
    if _ordering(argument(source, 2, "index")) is not sort:
        return None
    return Packing(source.args[0], argument(sort, 0, "input"), sort, first, made)


def _turned_back(index: Any, sort: Node | None) -> bool:
    """Whether ``index`` undoes the order of ``sort``, as ``invert_permutation`` makes it."""
    if sort is None or not is_method(index, "scatter_") or len(index.args) != 4:
        return False
    made: Any
    counted: Any
    made, dim, order, counted = index.args
    return bool(
        dim == 0
        and is_call(made, torch.empty_like)
        and made.args[0] is order
        and _ordering(order) is sort
        and is_call(counted, torch.arange)
        and counted.args[0] == 0
        and is_method(counted.args[1], "numel")
        and counted.args[1].args[0] is order
    )


def _padding(rows: Node, x: Packing) -> Padding | None:
    """What ``rows`` of all states are made of again."""
    if len(rows.users) != 1:
        return None
    call = next(iter(rows.users))
    if not is_call(call, _PAD) or call.kwargs or len(call.args) != 5:
        return None
    value: Any
    given, counts, first, value, total = call.args
    spec = spec_of(x.rows)
    steps = None if spec is None else spec.shape[1 if x.batch_first else 0]
    if given is not rows or not _counts_of(counts, x.made) or type(first) is not bool:
        return None
    if type(value) not in (int, float) or type(total) is not int or total != steps:
        return None
    parts, outputs, lengths = [], [], []
    if len(call.users) != len(list(items(call))):
        return None
    for key, part in items(call):
        if key == 1:
            own = [n for n in part.users if _own_lengths(n, part, x.sort)]
            whole = len(own) == len(part.users) and bool(own)
            parts += [part] if whole else []
            outputs += own if whole else []
            lengths += [] if whole else [part]
            continue
        if x.sort is not None:
            parts.append(part)
        for user in part.users if x.sort is not None else ():
            moved = is_method(user, "index_select") or is_call(user, torch.index_select)
            if not moved or argument(user, 1, "dim") != (0 if first else 1):
                return None
            if not _turned_back(argument(user, 2, "index"), x.sort):
                return None
        outputs += list(part.users) if x.sort is not None else [part]
    return Padding(float(value), first, call, tuple(parts), tuple(outputs), tuple(lengths))


def _own_lengths(node: Node, lengths: Node, sort: Node | None) -> bool:
    """Whether ``node`` is ``lengths`` in the callers' order."""
    index: Any = None
    if is_call(node, operator.getitem) and node.args[0] is lengths:
        index = node.args[1]
    while is_method(index, "to", "cpu"):
        index = index.args[0]
    return _turned_back(index, sort)


def _counts_of(value: Any, made: Node) -> bool:
    return is_call(value, operator.getitem) and value.args == (made, 1)


def _match(node: Node, root: torch.nn.Module) -> Answer:
    if not is_call(node, _OP) or len(node.args) != 6 or node.kwargs:
        return None
    x, scores = _packing(node.args[0]), None
    if x is None or not _counts_of(node.args[1], x.made):
        return None
    if node.args[2] is not None:
        scores = _packing(node.args[2])
        if scores is None or scores.lengths is not x.lengths or scores.sort is not x.sort:
            return None
    spec = spec_of(x.rows)
    if spec is None or len(spec.shape) != 3 or len(node.users) != len(list(items(node))):
        return None
    nodes, outputs, lasts, stacked = [node], [], [], []
    padding = None
    for key, part in items(node):
        if key == 1:
            stacks, back = _stacked(part, x.sort)
            nodes += [part, *stacks] if stacks else []
            lasts += [] if stacks else [part]
            stacked += back
            continue
        if not part.users:
            nodes.append(part)
            continue
        if padding is not None or (padding := _padding(part, x)) is None:
            return None  # something else is done with packed states
        nodes += [part, padding.call, *padding.parts]
        outputs += [*padding.outputs, *padding.lengths]
    outputs += lasts + stacked
    if not outputs:
        return None
    found = Found(node, x, scores, padding, tuple(lasts), tuple(stacked))
    return Match([*nodes, *outputs], outputs, found)


def _stacked(last: Node, sort: Node | None) -> tuple[list[Node], list[Node]]:
    """The ``stack([last])`` that are all that is read of ``last``, and what puts them back into the
    callers' order; nothing if anything else is read.
    """
    stacks, back = list(last.users), [user for one in last.users for user in one.users]
    alone = all(is_call(one, torch.stack) and one.args == ([last],) for one in stacks)
    moved = all(
        is_call(one, torch.index_select) and one.args[1] == 1 and _turned_back(one.args[2], sort)
        for one in back
    )
    return (stacks, back) if alone and moved else ([], [])


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    x, scores, padding = found.x, found.scores, found.padding
    rows = x.rows if x.batch_first else build.call(torch.transpose, x.rows, 0, 1)
    weighed = None
    if scores is not None:
        first = scores.batch_first
        weighed = scores.rows if first else build.call(torch.transpose, scores.rows, 0, 1)
    _, _, _, start, params, keeps = found.call.args
    value = 0.0 if padding is None else padding.value
    # torch's own is so laid out, unless it is then copied into the callers' order
    turned = padding is not None and (x.sort is None) == padding.batch_first
    turned = turned or (padding is not None and not padding.batch_first)
    call = build.call(
        _OP, rows, None, weighed, _start(build, start, x), params, keeps, x.lengths, x.sort is None,
        value, turned, name="gru",
    )  # fmt: skip
    made: dict[Node, Node] = {}
    for n in found.lasts:
        last = build.item(call, 1)
        order = None if x.sort is None else build.item(x.sort, 1)
        made[n] = last if order is None else build.call(torch.index_select, last, 0, order)
    for n in found.stacked:
        made[n] = build.call(torch.stack, [build.item(call, 1)])
    if padding is not None:
        sorted_lengths = x.lengths if x.sort is None else build.item(x.sort, 0)
        for n in padding.outputs:
            if is_call(n, operator.getitem) and x.sort is not None:
                made[n] = x.lengths
                continue
            out = build.item(call, 0)
            made[n] = out if padding.batch_first else build.call(torch.transpose, out, 0, 1)
        made.update(dict.fromkeys(padding.lengths, sorted_lengths))
    return [made[n] for n in match.outputs]


def _start(build: Build, start: Any, x: Packing) -> Any:
    """The first states in the callers' order; None for zeros."""
    cut = is_call(start, operator.getitem) and isinstance(start.args[1], slice)
    zeros = start.args[0] if cut else start
    spec, own = spec_of(x.rows), spec_of(start)
    known = spec is not None and own is not None and own.dtype == spec.dtype
    if is_call(zeros, torch.zeros) and known:
        return None
    if start is None or x.sort is None:
        return start
    order = build.item(x.sort, 1)
    return build.call(torch.index_select, start, 0, build.call(torch.argsort, order))


def drop_orders(graph: Graph) -> None:
    """Erase what would undo an order, and is read no more: it is written in place, which looks like
    an effect.
    """
    for node in [n for n in graph.nodes if is_method(n, "scatter_") and len(n.args) == 4]:
        made, readers = node.args[0], _readers(node)
        if readers is None or not isinstance(made, Node) or len(made.users) > 1:
            continue
        if _turned_back(node, _ordering(node.args[2])):
            for one in (*readers, node, made):
                graph.erase_node(one)


def _readers(node: Node) -> list[Node] | None:
    """What reads ``node``, the last first, if nothing comes of it."""
    found: list[Node] = []
    for user in node.users:
        inner = _readers(user) if is_method(user, "cpu", "to") else None
        if inner is None and not (is_call(user, PackedSequence) and not user.users):
            return None
        found += [*(inner or []), user]
    return found


PADDED = Rule(
    name="fuse-recurrence",
    equation="gru(pack(x, lengths)), padded again => gru(x, lengths)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda m: "sequences stay padded",
    worth=lambda m: "packing, sorting and padding again",
)

__all__ = ["PADDED", "drop_orders"]
