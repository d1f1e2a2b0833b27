"""Computes once what a model computes twice.

    a = f(x), b = f(x) => a

Models that loop over pairs of features call the same layer on the same vector once per pair. Only
calls without effects are shared: no random numbers, no state, no hooks; and nothing in memory that
the graph writes in place, where two equal values may differ later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from recast.rewriter import alias, order
from recast.rewriter.ir import Graph, Node, annotate, note
from recast.rewriter.report.journal import Fired

from .cleanup import known
from .leaf import plural

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class ShareValues:
    """a = f(x), b = f(x) => a

    Attributes are left to clean-up. Outputs of the model stay separate tensors.
    """

    name: ClassVar[str] = "share-values"

    def run(self, graph: Graph, context: Context) -> int:
        """Share the repeated values of ``graph``; returns how many went."""
        root = context.root
        safe = alias.unwritten(graph, root)
        first: dict[Any, Node] = {}
        gone: list[Node] = []
        for node in list(graph.nodes):
            if context.fuel_left() == 0 or node not in safe or not _pure(node, root):
                continue
            kept = first.setdefault(_key(node), node)
            if kept is node or _returned(node) or _returned(kept):
                continue
            node.replace_all_uses_with(kept)
            annotate(kept, rule=self.name)
            graph.erase_node(node)
            gone.append(kept)
        if gone:
            context.burn()
            main = max(gone, key=gone.count)
            what = f"{plural(len(gone), 'repeated value')} computed once"
            told = note(main)
            context.journal.fired.append(Fired(self.name, main.name, told.origin, told.where, what))
        return len(gone)


def _pure(node: Node, root: nn.Module) -> bool:
    if node.op not in ("call_function", "call_method", "call_module") or not known(node):
        return False
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if any(getattr(module, hooks) for hooks in _BACKWARD):
            return False
    return order.droppable(node, root)


def _returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _key(node: Node) -> Any:
    return node.op, node.target, _frozen(node.args), _frozen(node.kwargs), note(node).autocast


def _frozen(value: Any) -> Any:
    """``value`` as a key: 1, 1.0 and True are three values."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", _frozen((value.start, value.stop, value.step))
    return value if isinstance(value, Node) else (type(value), value)
