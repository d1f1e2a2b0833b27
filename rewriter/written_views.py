"""Writes through reshapes: whether they reach what they reach in the model.

``x.reshape(...)[0] = 1`` changes ``x`` where its strides allow a view, and a copy elsewhere. A
rewrite may change strides, and so what is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import alias
from .ir import Graph, Node, note
from .order import writes

# These return a view or a copy, by the strides of their first argument.
_EITHER = (torch.reshape, torch.flatten, torch.ravel, torch.ops.aten.contiguous.default)
_EITHER_METHODS = {"view", "reshape", "reshape_as", "flatten", "ravel", "contiguous"}

Run = Callable[[Graph], Sequence[tuple[Tensor, Tensor]]]  # a graph's result for an example


def lost_write(captured: Graph, graph: Graph, root: nn.Module, run: Run) -> str | None:
    """Why a write in ``graph`` changes other values than in ``captured``, or None."""
    found = _shared(graph, root, run)
    if not found:
        return None
    before = _shared(captured, root, run)
    nodes = {node.name: node for node in graph.nodes}
    for name, (shares, where) in found.items():
        other = name in before and before[name][0] is not shares
        if other and not (shares and _only_reader(nodes[name], graph, root)):
            return f"the write through {name}{f' at {where}' if where else ''} changes other values"
    return None


def _shared(graph: Graph, root: nn.Module, run: Run) -> dict[str, tuple[bool, str | None]]:
    """The reshapes that ``graph`` writes through, by name: whether the result is a view, and the
    line.
    """
    names = list(dict.fromkeys(node.name for node in _written_through(graph, root)))
    if not names:
        return {}
    asked = copy.deepcopy(graph)  # whose output is what they read and return
    nodes = {node.name: node for node in asked.nodes}
    output = next(node for node in asked.nodes if node.op == "output")
    output.args = (tuple((nodes[name].args[0], nodes[name]) for name in names),)
    return {
        name: (a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr(), note(n).where)
        for name, (a, b) in zip(names, run(asked), strict=True)
        for n in (nodes[name],)
    }


def _only_reader(view: Node, graph: Graph, root: nn.Module) -> bool:
    """Whether nothing but ``view`` reads the memory that it is a view of, so that it might as well
    be a copy.
    """
    known = alias.roots(graph, root)
    node: Any = view.args[0]
    while isinstance(node, Node) and len(node.users) == 1:
        new = {one for one in known[node] if one is not node}
        if not new or isinstance(node.target, torch._ops.OpOverload):
            return alias.OUTSIDE not in known[node]
        node = node.args[0] if len(node.all_input_nodes) == 1 else None
    return False


def _written_through(graph: Graph, root: nn.Module) -> Iterator[Node]:
    """The reshapes whose result shares memory with what the graph writes to in place."""
    writing = [node for node in graph.nodes if writes(node, root) and node.op != "output"]
    if not writing:
        return
    known = alias.roots(graph, root)
    touched = frozenset[Any]().union(*(alias.touched(node, root, known) for node in writing))
    for node in graph.nodes:
        method = node.op == "call_method" and node.target in _EITHER_METHODS
        if (method or (node.op == "call_function" and node.target in _EITHER)) and (
            known[node] & touched
        ):
            yield node
