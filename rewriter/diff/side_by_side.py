"""Two runs side by side: the first module, or the first node, whose value or gradient differs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recast.errors import RecastError
from recast.rewriter.ir import Graph, Node, is_call, note

from .watch import Seen

# Among differences, blame first those that are beyond what a chain of operations may round.
SLACKS = (1.0, 0.1)
NOISE = 1e-6  # of the largest gradient: what is left of a true gradient of zero


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first node that differs."""

    node: str
    origin: tuple[str, ...]
    where: str | None
    rule: str | None
    side: str  # forward, gradient, update
    mode: str
    what: str  # "its value is off by 0.3"

    @property
    def place(self) -> str:
        """The user's line where known, else the module path."""
        return self.where or " ".join(self.origin) or self.node

    def __str__(self) -> str:
        of = f" ({_some(self.origin)})" if self.origin not in ((), (self.node,)) else ""
        at = f" at {self.where}" if self.where else ""
        by = f", written by {self.rule}" if self.rule else ""
        return f"first to part is {self.node}{of}{at}{by}: {self.what} ({self.side}, {self.mode})"


def _some(origin: tuple[str, ...]) -> str:
    if len(origin) <= 3:
        return " ".join(origin)
    return f"{origin[0]} {origin[1]} ... {origin[-1]}"


@dataclass
class Modules:
    """Two module trees, compared at the submodules that both call."""

    want: Seen
    got: Seen
    rtol: float
    mode: str

    def pairs(self) -> Mapping[str, str]:
        """Our names to theirs, in our order."""
        return {k: k for k in self.got.values if k in self.want.values}

    def search(self) -> Divergence | None:
        """The first name whose value differs."""
        for slack in SLACKS:
            found = self._forward(self.rtol * slack)
            if found:
                return found
        if self.got.failed is not None:
            text = f"it raises {type(self.got.error).__name__}: {self.got.error}".split("\n")[0]
            return self.name(self.got.failed, "forward", text)
        for slack in SLACKS:
            found = self._gradient(self.rtol * slack)
            if found:
                return found
        return None

    def _forward(self, rtol: float) -> Divergence | None:
        for a, b in self.pairs().items():
            if what := off(self.got.values[a], self.want.values[b], rtol):
                return self.name(self.blamed_forward(a, rtol), "forward", f"its value is {what}")
        return None

    def _gradient(self, rtol: float) -> Divergence | None:
        pairs = self.pairs()
        for a, b in pairs.items():
            if b in self.want.grads and b in self.want.needs and a not in self.got.needs:
                return self.name(a, "gradient", "no gradient goes back through it")
        grads = [*self.want.grads.values(), *self.want.parameters.values()]
        floor = NOISE * max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
        for a, b in reversed(list(pairs.items())):
            if b in self.want.grads or a in self.got.grads:
                g, h = _both(self.got.grads.get(a), self.want.grads.get(b))
                if what := off(g, h, rtol, floor):
                    guilty = self.blamed_gradient(a, rtol, floor)
                    what = f"the gradient that it gives back is {what}"
                    return self.name(guilty, "gradient", what)
        for name in dict.fromkeys([*self.want.parameters, *self.got.parameters]):
            g, h = _both(self.got.parameters.get(name), self.want.parameters.get(name))
            if what := off(g, h, rtol, floor):
                what = f"the gradient of {name} is {what}"
                return self.name(self.reader(name), "gradient", what)
        return None

    def blamed_forward(self, name: str, rtol: float) -> str:
        """The node to blame for the first value that differs."""
        return name

    def blamed_gradient(self, name: str, rtol: float, floor: float) -> str:
        """The node to blame for the first gradient that differs."""
        return name

    def reader(self, parameter: str) -> str:
        """The node that reads this parameter."""
        return parameter.rpartition(".")[0]

    def name(self, name: str, side: str, what: str) -> Divergence:
        """The result, for this name."""
        where = self.got.error.where if isinstance(self.got.error, RecastError) else None
        return Divergence(name, (name,), where, None, side, self.mode, what)


class Graphs(Modules):
    """Two graphs, compared at the nodes that correspond."""

    def __init__(
        self, before: Graph, after: Graph, want: Seen, got: Seen, rtol: float, mode: str
    ) -> None:
        super().__init__(want, got, rtol, mode)
        self.old = {n.name: n for n in before.nodes}
        self.new = {n.name: n for n in after.nodes}
        self.twins = corresponding(before, after)
        self.likes = {n.name: like for n in after.nodes if (like := self._like(n))}

    def pairs(self) -> Mapping[str, str]:
        held = {a: self.twins.get(a) or self.likes.get(a) for a in self.got.values}
        return {a: b for a, b in held.items() if b is not None and b in self.want.values}

    def _like(self, node: Node) -> str | None:
        """For a node without a counterpart: the captured node of the same origin with its value."""
        value: Any = self.got.values.get(node.name)
        if node.name in self.twins or not _floats(value):
            return None
        origin = set(note(node).origin)
        for n in self.old.values():
            theirs: Any = self.want.values.get(n.name)
            if not _floats(theirs) or theirs.shape != value.shape:
                continue
            if not origin or origin & set(note(n).origin):
                same = off(value, theirs, self.rtol * SLACKS[-1]) is None
                if same:
                    return n.name
        return None

    def blamed_forward(self, name: str, rtol: float) -> str:
        """The first node that leads to ``name`` and has no counterpart, not even one with its
        value.
        """
        fresh = self._fresh(self.new[name])
        wrong = (n for n in self.new.values() if n in fresh and n.name not in self.likes)
        return next((n.name for n in wrong if _floats(self.got.values.get(n.name))), name)

    def _fresh(self, node: Node) -> set[Node]:
        """Calls that lead to ``node`` through nodes without a counterpart only."""
        found: set[Node] = set()
        stack = list(node.all_input_nodes)
        while stack:
            n = stack.pop()
            if n.name in self.twins or n in found or n.op in ("get_attr", "placeholder"):
                continue
            found.add(n)
            stack.extend(n.all_input_nodes)
        return found

    def blamed_gradient(self, name: str, rtol: float, floor: float) -> str:
        """The rewritten user whose backward gave it, if there is one."""
        users = [u for u in self._users(self.new[name]) if u.op != "output"]
        rewritten = [u for u in users if note(u).rule]
        return (rewritten or [self.new[name]])[0].name

    def _users(self, node: Node) -> list[Node]:
        found = []
        for u in node.users:
            found += [u, *self._users(u)] if is_call(u, operator.getitem) else [u]
        return found

    def reader(self, parameter: str) -> str:
        for n in self.new.values():
            if n.op == "get_attr" and n.target == parameter:
                # a call that reads only this one is a likelier culprit than one that reads many
                users = sorted(n.users, key=lambda u: len(note(u).origin))
                rewritten = [u for u in users if note(u).rule]
                return ((rewritten or users) or [n])[0].name
            if n.op == "call_module" and parameter.rpartition(".")[0] == n.target:
                return n.name
        return parameter.rpartition(".")[0]

    def name(self, name: str, side: str, what: str) -> Divergence:
        node = self.new.get(name)
        if node is None:
            return super().name(name, side, what)
        n, rule = note(node), note(node).rule
        source = node.args[0] if is_call(node, operator.getitem) else None
        if isinstance(source, Node) and note(source).rule:  # one result of a rewritten call
            name, rule = source.name, note(source).rule
        return Divergence(name, n.origin, n.where, rule, side, self.mode, what)


# ---------------------------------------------------------------- what corresponds


def corresponding(before: Graph, after: Graph) -> dict[str, str]:
    """Names of rewritten nodes to names of the captured nodes whose values they should have."""
    old = {n.name: n for n in before.nodes}
    pairs: dict[str, str] = {}
    stack: list[tuple[Node, Node]] = []
    for n in after.nodes:
        twin = old.get(n.name)
        if twin is not None and twin.op == n.op and twin.target == n.target:
            pairs[n.name] = twin.name
            stack.append((n, twin))
    while stack:
        new, theirs = stack.pop()
        a, b = (_arguments(x) for x in (new, theirs))
        if len(a) != len(b):
            continue
        for x, y in zip(a, b, strict=True):
            if isinstance(x, Node) and isinstance(y, Node) and x.name not in pairs:
                pairs[x.name] = y.name
                if x.op == y.op and x.target == y.target:
                    stack.append((x, y))
    return pairs


def _arguments(node: Node) -> list[Any]:
    return list(_flat((node.args, node.kwargs)))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Iterable) and not isinstance(value, (str, Node)):
        for v in value:
            yield from _flat(v)
    else:
        yield value


# ---------------------------------------------------------------- two values


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _both(ours: Tensor | None, theirs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two gradients; a missing one is zero."""
    some = ours if ours is not None else theirs
    assert some is not None
    zero = torch.zeros_like(some)
    return ours if ours is not None else zero, theirs if theirs is not None else zero


def off(ours: Any, plain: Any, rtol: float, floor: float = 0.0) -> str | None:
    """How ``ours`` differs from ``plain``, in words; None when it does not."""
    if not isinstance(ours, Tensor) or not isinstance(plain, Tensor):
        return None
    if ours.shape != plain.shape:
        return f"of shape {tuple(ours.shape)} instead of {tuple(plain.shape)}"
    if not plain.numel():
        return None
    both = (ours.detach(), plain.detach())
    wide = torch.complex128 if any(t.is_complex() for t in both) else torch.float64
    a, b = (t.to(wide) for t in both)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    far = torch.where(same, 0.0, (a - b).abs())
    far = torch.where(torch.isnan(far), float("inf"), far)
    finite = torch.where(torch.isfinite(b), b, 0.0)
    worst = int(far.reshape(-1).argmax())
    size = float(far.reshape(-1)[worst])
    if size <= rtol * float(finite.abs().max()) + floor:
        return None
    at = [int(i) for i in torch.unravel_index(torch.tensor(worst), b.shape)]
    return f"off by {size:.2g}" + (f" at {at}" if at else "")
