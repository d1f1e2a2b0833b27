"""Cells that a loop of Python repeats: their steps, a call each, become one call for all of them.

The steps are calls of the op, which the rule for cells wrote, or of nn.GRUCell.

for t in range(T):                      x: (B, T, D), (T, B, D), or any T values (B, D)
    h = gru(x[:, t], h)                 states: stacked, concatenated, or read one by one

for n in counts:                        the rows of a PackedSequence
    h = gru(x[begin : begin + n], h[:n])
    out[begin : begin + n] = h          or torch.cat of the states
    begin += n
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from recast.rewriter import order
from recast.rewriter.ir import Node, depends, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule

from .gru_cells import Called, left, left_loop, parameters, read_module
from .leaf import argument, plural, rank, spec_of

_OP = torch.ops.recast.gru.default
_WHOLE = slice(None)
_OF_PARAMETERS = frozenset({
    torch.cat, torch.transpose, torch.narrow, torch.flatten, torch.zeros_like, torch.full_like,
})  # fmt: skip


class Step(NamedTuple):
    """One call for one step, of the op or of nn.GRUCell, and its new state (B, H)."""

    x: Any
    score: Any
    h: Node
    call: Node
    out: Node
    nodes: tuple[Node, ...]
    cell: Any  # its parameters and how it mixes, or the name of the module


class Joined(NamedTuple):
    """All states in one value: a dimension for the steps, or None for packed rows."""

    node: Node
    dim: int | None
    inner: tuple[Node, ...]


class Packed(NamedTuple):
    """The rows of all steps, how many each has, and their scores."""

    rows: Node
    counts: Node
    scores: Node | None


@dataclass(slots=True)
class Loop:
    """Steps that follow each other, and where their states go."""

    steps: list[Step]
    packed: Packed | None = None
    joined: list[Joined] = field(default_factory=list)

    @property
    def states(self) -> list[Node]:
        """The new state of each step."""
        return [step.out for step in self.steps]


# ---------------------------------------------------------------- the chain


def _step(call: Any, root: nn.Module) -> Step | None:
    """The step that ``call`` is: as the rule for cells writes it, or of nn.GRUCell."""
    if isinstance(call, Node) and call.op == "call_module":
        read = read_module(call, root)
        if not isinstance(read, Called):
            return None
        return Step(read.x, None, read.h, call, call, (call,), call.target)
    if not is_call(call, _OP) or len(call.args) != 6 or call.args[1] is not None:
        return None
    x, _, score, h, _, _ = call.args
    item = sole_user(call)
    out = None if item is None else sole_user(item)
    if not is_call(x, torch.unsqueeze) or x.args[1:] != (1,) or not isinstance(h, Node):
        return None
    if not is_call(item, operator.getitem) or item.args[1] != 0:
        return None
    if not is_call(out, torch.squeeze) or out.args != (item, 1):
        return None
    own = (x,) if sole_user(x) is call else ()
    return Step(x.args[0], score, h, call, out, (*own, call, item, out), call.args[4:])


def _first_rows(h: Any) -> tuple[Any, Node] | None:
    """``(state, n)`` of ``state[:n]``."""
    cut = h.args[1] if is_call(h, operator.getitem) else None
    if not isinstance(cut, slice) or cut.start not in (None, 0) or cut.step is not None:
        return None
    return (h.args[0], cut.stop) if isinstance(cut.stop, Node) else None


def _before(step: Step, root: nn.Module) -> Step | None:
    """The step of the same cell from whose state ``step`` goes on."""
    cut = _first_rows(step.h)
    out = step.h if cut is None else cut[0]
    if is_call(out, torch.squeeze) and is_call(out.args[0], operator.getitem):
        out = out.args[0].args[0]
    before = _step(out, root)
    if before is None or (before.score is None) != (step.score is None):
        return None
    return before if _alike(before.cell, step.cell) else None


def _after(last: Step, root: nn.Module) -> Step | None:
    """The one step that goes on from the state of ``last``."""
    calls = dict.fromkeys(c for user in last.out.users for c in (user, *user.users))
    steps = [step for c in calls if (step := _step(c, root)) and _before(step, root) == last]
    merged = any(is_call(c, _OP) and c.args[3] is last.out and not _step(c, root) for c in calls)
    return steps[0] if len(steps) == 1 and not merged else None


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are made of the same parameters in the same way."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if not isinstance(a, Node) or not isinstance(b, Node):
        return type(a) is type(b) and bool(a == b)
    made = a.op == "get_attr" or (a.op == "call_function" and a.target in _OF_PARAMETERS)
    same = a.op == b.op and a.target == b.target and a.kwargs == b.kwargs
    return a is b or (made and same and _alike(a.args, b.args))


def _match(node: Node, root: nn.Module) -> Answer:
    loop = _loop(node, root)
    if not isinstance(loop, Loop):
        return loop
    of_torch = node.op == "call_module"
    nodes = [n for step in loop.steps for n in step.nodes]
    if any(_first_rows(step.h) is not None for step in loop.steps[1:]):
        loop.packed = _packed(loop.steps)
        joined = None if loop.packed is None else _joined_rows(loop)
        if joined is None:
            return left(node) if of_torch else None
        loop.joined = [joined]
        nodes += [step.h for step in loop.steps[1:]]
    else:
        loop.joined = list(_stacked(loop.states)) + list(_concatenated(loop.states))
    for joined in loop.joined:
        nodes += [*joined.inner, joined.node]
    inside = set(nodes)
    outputs = [joined.node for joined in loop.joined]
    outputs += [out for out in loop.states if not set(out.users) <= inside]
    if loop.packed is not None and len(outputs) > 1:
        # a state of packed sequences, which is read by itself
        return left(node) if of_torch else None
    return Match(list(dict.fromkeys(nodes)), outputs, loop)


def _loop(node: Node, root: nn.Module) -> Loop | Miss | None:
    """The steps that follow ``node``, the first of them."""
    first = _step(node, root)
    if first is None:
        read = read_module(node, root)
        return read if isinstance(read, Miss) else None
    before = _before(first, root)
    if before is not None and _after(before, root) == first:
        return None
    loop = Loop([first])
    while (after := _after(loop.steps[-1], root)) is not None:
        loop.steps.append(after)
    of_torch = node.op == "call_module"
    if len(loop.steps) == 1:
        return left(node) if of_torch else None
    if of_torch and any(depends(step.x, set(loop.states)) for step in loop.steps):
        return left_loop(node)
    return loop


# ---------------------------------------------------------------- where the states go


def _stacked(states: list[Node]) -> list[Joined]:
    """``torch.stack(states, dim)``"""
    found = []
    for node in states[0].users:
        dim = argument(node, 1, "dim", 0) if is_call(node, torch.stack) else None
        if dim in (0, 1) and list(argument(node, 0, "tensors")) == states:
            found.append(Joined(node, dim, ()))
    return found


def _concatenated(states: list[Node]) -> list[Joined]:
    """``torch.cat([h.unsqueeze(dim) for h in states], dim)``"""
    found = []
    for one in states[0].users:
        for node in one.users if is_call(one, torch.unsqueeze) else ():
            dim = argument(node, 1, "dim", 0) if is_call(node, torch.cat) else None
            parts = list(argument(node, 0, "tensors")) if dim in (0, 1) else []
            whole = [p.args for p in parts if is_call(p, torch.unsqueeze)]
            if whole == [(state, dim) for state in states] and len(parts) == len(whole):
                own = tuple(p for p in parts if sole_user(p) is node)
                found.append(Joined(node, dim, own))
    return found


# ---------------------------------------------------------------- packed sequences


def _packed(steps: list[Step]) -> Packed | None:
    """What ``steps`` take their rows from, when they take all of a PackedSequence, in order."""
    found = set()
    for t, step in enumerate(steps):
        given = _first_rows(step.h)
        count = None if given is None else _counted(given[1])
        if count is None or count.places != (t,):
            return None
        score = None if step.score is None else _rows_at(_flat(step.score), count.counts, t)
        rows = _rows_at(step.x, count.counts, t)
        if rows is None or (score is None) != (step.score is None):
            return None
        found.add(Packed(rows, count.counts, score))
    (packed, *others) = found
    spec = spec_of(packed.counts)
    if others or spec is None or spec.shape != (len(steps),):
        return None
    made, counts = packed.rows.args[0] if packed.rows.args else None, packed.counts
    if not is_call(made, torch._VF._pack_padded_sequence):
        return None  # nothing says that the counts are those of all rows
    return packed if counts.args == (made, 1) and packed.rows.args == (made, 0) else None


class _Count(NamedTuple):
    """The sum of ``counts[k]`` for k in ``places``."""

    counts: Any
    places: tuple[int, ...]


def _counted(value: Any) -> _Count | None:
    if value is None or (type(value) is int and value == 0):
        return _Count(None, ())
    if is_call(value, operator.add, torch.add) and len(value.args) == 2:
        left, right = (_counted(side) for side in value.args)
        if left is None or right is None:
            return None
        homes = {one.counts for one in (left, right) if one.places}
        return (
            None if len(homes) > 1 else _Count(next(iter(homes), None), left.places + right.places)
        )
    if is_call(value, operator.getitem) and type(value.args[1]) is int:
        return _Count(value.args[0], (value.args[1],))
    return None


def _is_cut(cut: Any, counts: Any, t: int) -> bool:
    """Whether a slice is of the rows of step ``t``."""
    if not isinstance(cut, slice) or cut.step is not None:
        return False
    begin, end = _counted(cut.start), _counted(cut.stop)
    if begin is None or end is None or begin.counts not in (None, counts):
        return False
    return end == _Count(counts, tuple(range(t + 1))) and begin.places == end.places[:-1]


def _rows_at(node: Any, counts: Any, t: int) -> Any:
    """What ``node`` is the rows of step ``t`` of."""
    cut = is_call(node, operator.getitem) and _is_cut(node.args[1], counts, t)
    return node.args[0] if cut else None


def _flat(score: Any) -> Any:
    """The (B,) of which ``score`` is the (B, 1)."""
    shaped = is_call(score, torch.reshape) and list(argument(score, 1, "shape")) == [-1, 1]
    added = is_call(score, torch.unsqueeze) and argument(score, 1, "dim") in (1, -1)
    return argument(score, 0, "input") if shaped or added else None


def _joined_rows(loop: Loop) -> Joined | None:
    """``torch.cat(states)``, or the new value into whose rows each is written."""
    assert loop.packed is not None
    states, packed = loop.states, loop.packed
    for node in states[0].users:
        if is_call(node, torch.cat) and argument(node, 1, "dim", 0) == 0:
            parts: Any = argument(node, 0, "tensors")
            return Joined(node, None, ()) if list(parts) == states else None
    writes = [n for out in states for n in out.users if is_call(n, operator.setitem)]
    homes = {write.args[0] for write in writes}
    home: Any = next(iter(homes), None)
    if len(homes) != 1 or len(writes) != len(states) or not is_call(home, torch.zeros, torch.empty):
        return None
    for t, (write, out) in enumerate(zip(writes, states, strict=True)):
        if write.args[2] is not out or not _is_cut(write.args[1], packed.counts, t):
            return None
    size, state, made = home.args[0], spec_of(states[0]), spec_of(home)
    if not is_method(size, "size") or size.args != (packed.rows, 0) or made is None:
        return None
    if state is None or state.dtype != made.dtype or state.shape[1:] != made.shape[1:]:
        return None
    place = order.positions(home.graph)
    last = max(place[n] for n in writes)
    early = any(place[n] < last for n in home.users if n not in writes)  # sees it half written
    return None if early else Joined(home, None, tuple(writes))


# ---------------------------------------------------------------- the rewrite


def _rewrite(match: Match, build: Build) -> Sequence[Node]:
    loop: Loop = match.found
    first = loop.steps[0]
    how = first.call.args[4:]
    if first.call.op == "call_module":
        how = (parameters(build, first.call, build.root), True)
    if loop.packed is None:
        rows, counts = _sequence(build, [step.x for step in loop.steps]), None
        scores = _scores(build, [step.score for step in loop.steps])
    else:
        rows, counts, scores = loop.packed
    start = first.h
    cut = None if loop.packed is None else _first_rows(start)
    if cut is not None and _as_many(cut[0], start):
        start = cut[0]  # all sequences take part in the first step
    call = build.call(_OP, rows, counts, scores, start, *how, name="gru")
    made = {}
    for joined in loop.joined:
        value = build.item(call, 0)
        if joined.dim == 0:
            turned = build.call(torch.transpose, value, 0, 1)
            value = build.call(torch.clone, turned, memory_format=torch.contiguous_format)
        made[joined.node] = value
    return [made.get(n, one) for n, one in _states(build, call, loop, match.outputs)]


def _as_many(state: Node, first: Node) -> bool:
    known, own = spec_of(state), spec_of(first)
    return known is not None and own is not None and known.shape == own.shape


def _states(
    build: Build, call: Node, loop: Loop, outputs: Sequence[Node]
) -> list[tuple[Node, Node]]:
    """Each output with the state that it is, where it is one."""
    states = loop.states
    inner = [n for n in outputs if n in states[:-1]]
    # Each select would have a gradient of the size of all steps.
    apart = build.call(torch.unbind, build.item(call, 0), 1) if inner else call
    found = []
    for n in outputs:
        if n is states[-1]:
            found.append((n, build.item(call, 1)))
        else:
            found.append((n, build.item(apart, states.index(n)) if n in inner else n))
    return found


class _Selected(NamedTuple):
    """``source.select(dim, index)``"""

    source: Any
    dim: Any
    at: Any


def _selected(node: Any) -> _Selected | None:
    if is_call(node, torch.select) or is_method(node, "select"):
        names = ("input", "dim", "index")
        found = _Selected(*(argument(node, k, name) for k, name in enumerate(names)))
    elif is_call(node, operator.getitem):
        source: Any = node.args[0]
        key: Any = node.args[1]
        apart = is_call(source, torch.unbind) or is_method(source, "unbind")
        keys: Any = key if isinstance(key, tuple) else (key,)
        dim = next((k for k, one in enumerate(keys) if one != _WHOLE), 0)
        if any(one != _WHOLE for one in keys[dim + 1 :]):
            return None
        if apart:
            found = _Selected(argument(source, 0, "input"), argument(source, 1, "dim", 0), key)
        else:
            found = _Selected(source, dim, keys[dim])
    else:
        return None
    return found if type(found.dim) is int and type(found.at) is int else None


def _cut_of(build: Build, found: list[_Selected | None], dims: int) -> Node | None:
    """(B, T, ..) of which ``found`` are the steps, in order; None when they are not."""
    first = found[0]
    if first is None or first.dim not in (0, 1) or first.at < 0 or rank(first.source) != dims:
        return None
    if found != [first._replace(at=first.at + t) for t in range(len(found))]:
        return None
    spec = spec_of(first.source)
    assert spec is not None
    source: Node = first.source
    if first.at or spec.shape[first.dim] != len(found):
        source = build.call(torch.narrow, source, first.dim, first.at, len(found))
    return build.call(torch.transpose, source, 0, 1) if first.dim == 0 else source


def _sequence(build: Build, xs: list[Any]) -> Node:
    """(B, T, D)."""
    whole = _cut_of(build, [_selected(x) for x in xs], 3)
    return build.call(torch.stack, xs, 1) if whole is None else whole


def _scores(build: Build, scores: list[Any]) -> Node | None:
    """(B, T)."""
    if scores[0] is None:
        return None
    whole = _cut_of(build, [_selected(score) for score in scores], 3)
    if whole is not None:
        return build.call(torch.squeeze, whole, 2)
    whole = _cut_of(build, [_selected(_flat(score)) for score in scores], 2)
    if whole is None:
        whole = _cut_of(build, [_one_wide(score) for score in scores], 2)
    return build.call(torch.cat, scores, 1) if whole is None else whole


def _one_wide(score: Any) -> _Selected | None:
    """``source[:, t : t + 1]``, or ``source[:, t, None]``"""
    key = score.args[1] if is_call(score, operator.getitem) else None
    if not isinstance(key, tuple) or key[0] != _WHOLE:
        return None
    if len(key) == 3 and type(key[1]) is int and key[2] is None:
        return _Selected(score.args[0], 1, key[1])
    one = key[1] if len(key) == 2 else None
    if not isinstance(one, slice) or type(one.start) is not int or one.stop != one.start + 1:
        return None
    return _Selected(score.args[0], 1, one.start)


def _name(match: Match) -> str:
    return "nn.GRUCell" if match.found.steps[0].call.op == "call_module" else "a cell"


UNROLLED = Rule(
    name="fuse-recurrence",
    equation="h = gru(x[:, t], h) for t in range(T) => gru(x)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda m: f"{plural(len(m.found.steps), 'step')} of {_name(m)} in one call",
    worth=lambda m: plural(len(m.found.steps) - 1, "launch"),
)


__all__ = ["UNROLLED"]
