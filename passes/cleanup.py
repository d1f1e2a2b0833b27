"""Removes what rewriting leaves behind: unused values, and attributes that are read twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from recast.rewriter import order
from recast.rewriter.ir import Graph, Node
from recast.rewriter.report.journal import Fired

from .leaf import plural

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_KNOWN = ("torch", "_operator", "builtins", "operator")


@dataclass(frozen=True)
class CleanUp:
    """unused(x) => nothing;  a = self.w, b = self.w => a

    Erases unused values without side effects, and reads each attribute only once. Calls of
    functions that are not torch's own stay, since they may have side effects.
    """

    name: ClassVar[str] = "clean-up"

    def run(self, graph: Graph, context: Context) -> int:
        """Clean ``graph``; returns 1 when anything went, else 0."""
        if context.fuel_left() == 0:
            return 0
        merged = _merge_attributes(graph)
        dead = _drop_dead(graph, context.root)
        if not merged and not dead:
            return 0
        context.burn()
        done = ((dead, "unused value", "dropped"), (merged, "second read", "of an attribute saved"))
        what = ", ".join(f"{plural(count, noun)} {verb}" for count, noun, verb in done if count)
        context.journal.fired.append(Fired(self.name, "graph", (), None, what))
        return 1


def _merge_attributes(graph: Graph) -> int:
    """Read every attribute once, where it is first read."""
    first: dict[str, Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        kept = first.setdefault(str(node.target), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
            merged += 1
    return merged


def _drop_dead(graph: Graph, root: nn.Module) -> int:
    dropped = 0
    for node in reversed(list(graph.nodes)):
        if not node.users and order.droppable(node, root) and known(node):
            graph.erase_node(node)
            dropped += 1
    return dropped


def known(node: Node) -> bool:
    """Whether ``node`` calls something of torch or python, which has no hidden effects."""
    if node.op != "call_function":
        return True
    module = getattr(node.target, "__module__", None) or ""
    return module.split(".")[0] in _KNOWN
