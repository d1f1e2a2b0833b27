"""The invariants of a pass: what must hold before and after each, as a table of predicates."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.errors import VerifyError
from recast.rewriter.capture.constants import Constants
from recast.rewriter.capture.opaque_calls import OpaqueCall

from . import alias, order
from .ir import KEY, Graph, Node, Note, Spec, is_call, note, sole_user
from .rule import resolve


@dataclass(frozen=True)
class Write:
    """What writes in place, and the name of what it writes to."""

    origin: tuple[str, ...]
    home: str | None = field(compare=False)


@dataclass(frozen=True)
class Facts:
    """What no pass may change in a graph, and enough to tell whether it changed at all."""

    nodes: tuple[tuple[Any, ...], ...]
    inputs: tuple[str, ...]
    output: Any  # the structure of the output, with dtype and rank for each tensor
    reaching: frozenset[str]  # parameters, buffers and inputs that the outputs depend on
    random: tuple[tuple[str, ...], ...]  # origins of the nodes that draw random numbers, in order
    writes: tuple[Write, ...]  # in order
    held: tuple[Any, ...] = field(default=(), compare=False)  # the objects of the graph


def still(before: Facts, graph: Graph) -> bool:
    """Whether ``graph`` consists of the same objects as when ``before`` was read.

    Arguments and notes are never modified, only replaced, so such a graph has the same facts.
    """
    now = _held(graph)
    return len(now) == len(before.held) and all(map(operator.is_, now, before.held))


def _held(graph: Graph) -> tuple[Any, ...]:
    parts = ((n, n.op, n.name, n.target, n.args, n.kwargs, n.meta.get(KEY)) for n in graph.nodes)
    return tuple(chain.from_iterable(parts))


def facts(graph: Graph, root: nn.Module, name: str = "capture") -> Facts:
    """Read the facts of ``graph`` as pass ``name`` left it.

    Raises VerifyError when a node reads a path that the model does not have.
    """
    for n in graph.nodes:
        if n.op in ("get_attr", "call_module"):
            try:
                resolve(root, str(n.target))
            except AttributeError as error:
                what = f"{n.name} reads {n.target}, which the model does not have"
                text = f"pass {name} broke an invariant: {what}"
                raise broken(name, text, "every path exists in the model") from error
    nodes = tuple((n.op, n.name, n.target, str(n.args), str(n.kwargs)) for n in graph.nodes)
    output = next(n for n in graph.nodes if n.op == "output")
    names: dict[int, str] = {}  # a Parameter with two paths counts once
    for path, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), path)
    return Facts(
        nodes=nodes,
        inputs=tuple(n.name for n in graph.nodes if n.op == "placeholder"),
        output=_specs(output.args[0]),
        reaching=frozenset().union(*(_reads(n, root, names) for n in order.live(graph, root))),
        random=tuple(note(n).origin for n in graph.nodes if order.draws(n, root)),
        writes=tuple(
            Write(note(n).origin or (n.name,), _home(n, root))
            for n in graph.nodes
            if order.writes(n, root) and n.op != "call_module" and note(n).rule is None
        ),
        held=_held(graph),
    )


def _home(node: Node, root: nn.Module) -> str | None:
    """The new tensor of this graph that ``node`` writes to: empty, or read by nothing else."""
    home = node.args[0] if node.args else None
    elsewhere = isinstance(node.target, OpaqueCall) or node.kwargs.get("out") is not None
    elsewhere = elsewhere or order.renormalised(node, root) is not None
    if not isinstance(home, Node) or elsewhere or order.asserts(node):
        return None
    alone = _alone(home, node, root) or is_call(home, torch.zeros, torch.empty)
    return home.name if alone else None


def _alone(value: Node, user: Node, root: nn.Module) -> bool:
    """Whether ``user`` alone sees the memory of ``value``: new, or handed on from a value of this
    kind by dropout or a write.
    """
    if sole_user(value) is not user:
        return False
    if alias.fresh(value, root):
        return True
    source = value.args[0] if value.args else None
    layer = root.get_submodule(str(value.target)) if value.op == "call_module" else None
    passes = is_call(value, F.dropout) or isinstance(layer, nn.Dropout)
    own = layer is not None or isinstance(value.target, OpaqueCall)  # may hand on any memory
    passes = passes or (order.writes(value, root) and not own)
    return passes and isinstance(source, Node) and _alone(source, value, root)


def _reads(node: Node, root: nn.Module, names: dict[int, str]) -> frozenset[str]:
    path = str(node.target)
    if node.op == "placeholder":
        return frozenset({path})
    if node.op == "get_attr":
        return (
            frozenset() if path.startswith(Constants.ATTRIBUTE) else _parameter(path, root, names)
        )
    if node.op == "call_module":
        module = root.get_submodule(path)
        return frozenset(
            names.get(id(p), f"{path}.{name}") for name, p in module.named_parameters()
        )
    return frozenset()


def _parameter(path: str, root: nn.Module, names: dict[int, str]) -> frozenset[str]:
    """The Parameter at ``path``, or the one that an attribute belongs to ("emb.weight.packed")."""
    value: Any = root
    parts = path.split(".")
    for k, part in enumerate(parts):
        value = getattr(value, part)
        if isinstance(value, nn.Parameter):
            return frozenset({names.get(id(value), ".".join(parts[: k + 1]))})
    return frozenset()


def _specs(value: Any) -> Any:
    if isinstance(value, Node):
        spec = note(value).spec
        return (str(spec.dtype), len(spec.shape)) if isinstance(spec, Spec) else None
    if isinstance(value, dict):
        return {k: _specs(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_specs(v) for v in value)
    return value


# ---------------------------------------------------------------- the table


def _inputs_first(b: Facts, a: Facts, graph: Graph, root: nn.Module) -> str | None:
    seen: set[Node] = set()
    for n in graph.nodes:
        for i in n.all_input_nodes:
            if i not in seen:
                return f"{n.name} uses {i.name} before it is computed"
        seen.add(n)
    return None


def _noted(b: Facts, a: Facts, graph: Graph, root: nn.Module) -> str | None:
    bad = next((n for n in graph.nodes if not isinstance(n.meta.get(KEY), Note)), None)
    return f"{bad.name} carries no note of its origin" if bad else None


def _same_inputs(b: Facts, a: Facts, graph: Graph, root: nn.Module) -> str | None:
    return None if a.inputs == b.inputs else f"inputs changed from {b.inputs} to {a.inputs}"


def _same_output(b: Facts, a: Facts, graph: Graph, root: nn.Module) -> str | None:
    return None if _fits(b.output, a.output) else f"outputs changed from {b.output} to {a.output}"


def _fits(before: Any, after: Any) -> bool:
    if before is None or after is None:
        return True
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_fits(before[k], after[k]) for k in before)
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(
            _fits(x, y) for x, y in zip(before, after, strict=True)
        )
    return bool(before == after)


def _same_reach(b: Facts, a: Facts, graph: Graph, root: nn.Module) -> str | None:
    lost, new = sorted(b.reaching - a.reaching), sorted(a.reaching - b.reaching)
    if lost:
        return f"{lost[0]} no longer reaches the output"
    return f"{new[0]} reaches the output and did not before" if new else None


def _same_random(b: Facts, a: Facts, graph: Graph, root: nn.Module) -> str | None:
    at = 0  # several draws may now be one node, and one module may draw several times
    for origins in filter(None, b.random):  # a draw outside any module cannot be identified
        holders = [k for k, o in enumerate(a.random) if set(origins) <= set(o)]
        if not holders:
            return f"the random draw of {' '.join(origins)} is gone"
        if holders[-1] < at:
            return f"the random draw of {' '.join(origins)} comes earlier than in the model"
        at = next(k for k in holders if k >= at)
    return None


def _same_writes(b: Facts, a: Facts, graph: Graph, root: nn.Module) -> str | None:
    names = {name for _, name, *_ in a.nodes}
    left = list(a.writes)
    if left == [w for w in b.writes if w.home is None or w.home in names]:
        return None  # all that are gone went with what they wrote to
    for write in b.writes:
        if left and left[0] == write:
            left.pop(0)
        elif write.home is None or write.home in names:  # gone with what it wrote to: no loss
            return "a write in place was moved, added or dropped"
    return "a write in place was moved, added or dropped" if left else None


Predicate = Callable[[Facts, Facts, Graph, nn.Module], str | None]
INVARIANTS: tuple[tuple[str, Predicate], ...] = (
    ("inputs come before users", _inputs_first),
    ("every node carries a note", _noted),
    ("inputs stay", _same_inputs),
    ("outputs keep structure, dtype and rank", _same_output),
    ("the same parameters and inputs reach the outputs", _same_reach),
    ("random numbers are drawn in the model's order", _same_random),
    ("writes in place stay, in order", _same_writes),
)


def check(before: Facts, after: Facts, graph: Graph, root: nn.Module, name: str) -> None:
    """Raise VerifyError, naming the pass, when the graph breaks an invariant."""
    for invariant, predicate in INVARIANTS:
        wrong = predicate(before, after, graph, root)
        if wrong:
            raise broken(name, f"pass {name} broke an invariant: {wrong}", invariant)


def broken(name: str, what: str, why: str) -> VerifyError:
    """The error for what pass ``name`` did wrong."""
    error = VerifyError(what, why=why, tries=(f"--without {name}",))
    error.culprit = name
    return error
