"""The rule language and the engine that applies it.

A rule is one equation between graphs. Given a node, it looks around it and answers ``None`` (not
mine), a :class:`Miss` (nearly, with the reason and the culprit) or a :class:`Match`; for a match it
then writes the replacement with a :class:`Build`. The engine, not the rule, guarantees that

* no value inside the match is used outside it,
* the replacement comes after all its inputs and before all users of what it replaces,
* nothing is moved across an in-place write, and random numbers are drawn in the user's order,
* every new node carries its origin, line and rule,
* fuel is counted, and a rule that raises is skipped, journaled and leaves the graph unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from recast.rewriter.capture.constants import constants
from recast.rewriter.report.journal import Fired, Missed, Raised

from . import alias, order
from .ir import KEY, Graph, Node, annotate, autocast_regions, depends, merge, note

if TYPE_CHECKING:
    from .pipeline import Context


@dataclass(frozen=True)
class Miss:
    """Nearly a match: the culprit, the reason, and what the user could change."""

    node: Node
    why: str
    tries: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """What a rule found.

    ``nodes``: every node that the rewrite replaces. ``outputs``: those of them whose values are
    used outside, in the order in which the rewrite returns replacements. ``found``: whatever the
    rule wants to pass to its rewrite.
    """

    nodes: Sequence[Node]
    outputs: Sequence[Node]
    found: Any = None


Answer: TypeAlias = Match | Miss | None


@dataclass(frozen=True)
class Rule:
    """One equation: ``match(node, root)`` reads, ``rewrite(match, build)`` writes.

    The rewrite returns one node per output of the match. For the report, ``describe(match)`` says
    what was done and ``worth(match)`` what it saves.
    """

    name: str
    equation: str
    match: Callable[[Node, nn.Module], Answer]
    rewrite: Callable[[Match, Build], Sequence[Node]]
    describe: Callable[[Match], str] = field(default=lambda m: f"{len(m.nodes)} nodes in one call")
    worth: Callable[[Match], str | None] = field(default=lambda m: None)


class Build:
    """Makes the nodes of a replacement, stamped with origin, line and rule."""

    def __init__(self, graph: Graph, root: nn.Module, match: Match, rule: str) -> None:
        self.graph = graph
        self.root = root
        self.made: list[Node] = []
        self._note = merge(match.nodes, rule)

    def _add(self, node: Node) -> Node:
        node.meta[KEY] = self._note
        self.made.append(node)
        return node

    def call(
        self, target: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> Node:
        """A call of a function or of ``torch.ops.<ns>.<op>.default``."""
        return self._add(self.graph.create_node("call_function", target, args, kwargs, name=name))

    def item(self, node: Node, index: int) -> Node:
        """``node[index]``."""
        return self._add(self.graph.call_function(operator.getitem, (node, index)))

    def get(self, path: str) -> Node:
        """The parameter, buffer or attribute (``"top.2.p"``) at ``path``, read at each call."""
        made = self._add(self.graph.create_node("get_attr", path, (), {}))
        owner, _, _ = path.rpartition(".")
        annotate(made, origin=(owner,) if owner else ())
        return made

    def constant(self, value: torch.Tensor, hint: str = "constant") -> Node:
        """A tensor that belongs to the graph: follows ``.to()``, is not in ``state_dict()``."""
        return self.get(constants(self.root).add(value, hint))


def resolve(root: nn.Module, path: str) -> Any:
    """The value at a dotted path: module, parameter, buffer or plain attribute."""
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value


def apply(graph: Graph, rules: Sequence[Rule], context: Context) -> int:
    """Try every rule once at every node, in order; return how many rewrites were made."""
    fired = 0
    for node in list(graph.nodes):
        for rule in rules:
            if _erased(node, graph) or context.fuel_left() == 0:
                break
            fired += _try(graph, rule, node, context)
    return fired


def _erased(node: Node, graph: Graph) -> bool:
    return node._erased or node.graph is not graph


def _try(graph: Graph, rule: Rule, node: Node, context: Context) -> bool:
    try:
        answer = rule.match(node, context.root)
        if answer is None:  # nearly always
            return False
        _check_answer(rule, answer)
        if isinstance(answer, Match):
            answer = legal(graph, answer, context.root) or answer
    except Exception as error:
        _raised(rule, node, error, context)
        return False
    if isinstance(answer, Miss):
        where = note(answer.node).where or note(node).where
        context.journal.miss(Missed(rule.name, answer.node.name, answer.why, where, answer.tries))
        return False
    return _commit(graph, rule, node, answer, context)


def _check_answer(rule: Rule, answer: object) -> None:
    """Raise where a match answers what no rule may, in words for who wrote it."""
    if not isinstance(answer, (Miss, Match)):
        raise TypeError(
            f"rule {rule.name}: match answered {answer!r}, which is none of None, Miss and Match"
        )
    if isinstance(answer, Match) and not (
        answer.outputs and set(answer.outputs) <= {*answer.nodes}
    ):
        raise ValueError(f"rule {rule.name}: the outputs of a Match are some of its nodes")


def _check_made(rule: Rule, match: Match, made: object) -> list[Node]:
    """What a rewrite returned, if it is one node for each output of the match."""
    nodes: list[Any] = list(made) if isinstance(made, Iterable) else [made]
    if not all(isinstance(n, Node) for n in nodes):
        raise TypeError(f"rule {rule.name}: rewrite returned {made!r}, not a list of nodes")
    if len(nodes) != len(match.outputs):
        raise ValueError(
            f"rule {rule.name}: rewrite returned {len(nodes)} nodes for {len(match.outputs)}"
            " outputs"
        )
    return nodes


def _raised(rule: Rule, node: Node, error: Exception, context: Context) -> None:
    if context.strict:
        raise error
    text = f"{type(error).__name__}: {error}"
    context.journal.raised.append(Raised(rule.name, node.name, text, note(node).where))


def legal(graph: Graph, match: Match, root: nn.Module) -> Miss | None:
    """Why this match may not be rewritten, or None."""
    inner = set(match.nodes)
    outputs = set(match.outputs)
    if len(autocast_regions(match.nodes)) > 1:
        return Miss(match.nodes[0], "torch.autocast is switched between its parts")
    for n in match.nodes:
        for user in n.users:
            if user not in inner and n not in outputs:
                return Miss(n, f"its value is also used by {user.name}")
    inputs = {i for n in match.nodes for i in n.all_input_nodes} - inner
    for i in inputs:
        if depends(i, outputs):
            return Miss(i, "an input is computed from an output of the same group")
    return _moves(graph, match, inner, inputs, root)


def _moves(
    graph: Graph, match: Match, inner: set[Node], inputs: set[Node], root: nn.Module
) -> Miss | None:
    place = order.positions(graph)
    first = min(match.nodes, key=place.__getitem__)
    last = max(match.nodes, key=place.__getitem__)
    users = [u for n in match.outputs for u in n.users if u not in inner]
    top = min([*users, _anchor(match, place, root)], key=place.__getitem__)
    moved = order.hoisted(inputs, top, place) | inner
    drawn = [place[n] for n in match.nodes if order.draws(n, root)]
    low, high = (min(*drawn, place[top]), max(drawn)) if drawn else (0, 0)
    between = [n for n in graph.nodes if place[first] < place[n] < place[last] and n not in moved]
    writing = [n for n in between if order.writes(n, root)]
    known = alias.roots(graph, root) if writing else {}
    for n in between:
        if n in writing and alias.clash(n, root, moved, known):
            return Miss(n, "writes in place between the parts, so they cannot be moved together")
        if low < place[n] < high and order.draws(n, root):
            return Miss(n, "draws random numbers between the parts, whose order must be kept")
    for n in moved - inner:
        if not order.movable(n, root):
            return Miss(n, "an input with side effects would have to move")
    return None


def _anchor(match: Match, place: dict[Node, int], root: nn.Module) -> Node:
    """The node that the replacement follows: the last that draws random numbers, else the last.

    Parts after the last draw move up to it, so that the draws of other nodes keep their order.
    """
    drawing = [n for n in match.nodes if order.draws(n, root)]
    return max(drawing or match.nodes, key=place.__getitem__)


def _commit(graph: Graph, rule: Rule, node: Node, match: Match, context: Context) -> bool:
    place = order.positions(graph)
    at = _anchor(match, place, context.root)
    build = Build(graph, context.root, match, rule.name)
    try:
        what, worth = rule.describe(match), rule.worth(match)
        with graph.inserting_before(at.next):  # keeps new nodes in the order they are made in
            made = _check_made(rule, match, rule.rewrite(match, build))
    except Exception as error:
        _undo(graph, build)
        _raised(rule, node, error, context)
        return False
    refused = _reads_a_part(match, build) or _overwritten(graph, match, build)
    if refused is not None:
        _undo(graph, build)
        where = note(refused.node).where
        context.journal.miss(Missed(rule.name, node.name, refused.why, where))
        return False
    inside = set(match.nodes)
    for old, new in zip(match.outputs, made, strict=True):
        if note(new).spec is None:
            annotate(new, spec=note(old).spec)
        if new.target is operator.getitem and new in build.made:  # one of several outputs
            annotate(new, origin=note(old).origin, where=note(old).where)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for n in sorted(match.nodes, key=place.__getitem__, reverse=True):
        graph.erase_node(n)
    order.stable_sort(graph)
    main = _principal(build, made[0] if made else node)
    context.burn()
    context.journal.fired.append(
        Fired(rule.name, main.name, note(main).origin, note(main).where, what, worth)
    )
    return True


def _undo(graph: Graph, build: Build) -> None:
    for n in reversed(build.made):
        graph.erase_node(n)


_LATER = (
    "writes in place to what the one call would read or return, which its backward may need as it"
    " was, and those of the several calls do not"
)


def _reads_a_part(match: Match, build: Build) -> Miss | None:
    """The part of the match that a new call reads, as in ``silu(s) * silu(s)``."""
    inside = set(match.nodes)
    part = next((i for n in build.made for i in n.all_input_nodes if i in inside), None)
    return None if part is None else Miss(part, f"its part {part.name} is read once more")


def _overwritten(graph: Graph, match: Match, build: Build) -> Miss | None:
    """What writes in place, behind the match, to a value made in forward that a new call keeps for
    its backward: all that it reads (a ``cat`` in its place kept nothing), of some its results too.
    """
    writing = [n for n in graph.nodes if order.writes(n, build.root) and n not in match.nodes]
    if not writing:
        return None
    known = alias.roots(graph, build.root)
    calls = [n for n in build.made if n.op != "get_attr" and n.target is not operator.getitem]
    renamed = len(calls) == len(match.nodes) == 1 and not isinstance(
        calls[0].target, torch._ops.OpOverload
    )
    kept = () if renamed else calls
    held = [i for n in kept for i in n.all_input_nodes]
    if any(n.target in _KEEPING for n in kept):
        held += match.outputs
    held_roots = frozenset[Any]().union(*(known[n] for n in held)) - {alias.OUTSIDE}
    place = order.positions(graph)
    last = max(place[n] for n in (*match.nodes, *build.made))
    for n in writing:
        behind = place[n] > last and n not in build.made
        if behind and held_roots & alias.touched(n, build.root, known):
            return Miss(n, _LATER)
    return None


_KEEPING: set[Callable[..., Any]] = set()


def declare_keeps_result(target: Callable[..., Any]) -> None:
    """State that ``target``, which a rule writes into graphs, needs its result for its backward,
    and the calls that it replaces do not.
    """
    _KEEPING.add(target)


def _principal(build: Build, main: Node) -> Node:
    """The call that does the work: the last new node that is no getitem and no attribute."""
    for n in reversed(build.made):
        if n.op != "get_attr" and n.target is not operator.getitem:
            return n
    return main
