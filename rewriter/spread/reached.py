"""Which parameters the outputs of a graph lead back to: those whose gradients ranks average.

A value may reach an output by a write in place into what is read later (``out[rows] = y``); one
that is detached leads no further. Gradients of a parameter that this misses are refused when a
backward pass comes to it (``runtime/ranks/dense_reduce``).
"""

from __future__ import annotations

import torch
from torch import nn

from recast.rewriter import alias, order
from recast.rewriter.ir import Graph, Node
from recast.rewriter.rule import resolve

_ENDS = ("detach", torch.detach)  # a method, a function


def reached(graph: Graph | None, root: nn.Module) -> set[str]:
    """The names of the parameters of ``root`` that an output of ``graph`` depends on; all of them
    if there is no graph.
    """
    if graph is None:
        return {name for name, _ in root.named_parameters()}
    names = {id(p): name for name, p in root.named_parameters()}
    found: set[str] = set()
    for node in _nodes(graph, root):
        if node.op == "get_attr":
            found.add(names.get(id(_value(root, str(node.target))), ""))
        elif node.op == "call_module":
            called = root.get_submodule(str(node.target))
            found |= {names[id(p)] for p in called.parameters()}
    return found & set(names.values())


def _nodes(graph: Graph, root: nn.Module) -> set[Node]:
    """The output, and all that leads to it."""
    known = alias.roots(graph, root)
    writing = [n for n in graph.nodes if order.writes(n, root)]
    seen: set[Node] = set()
    left = [n for n in graph.nodes if n.op == "output"]
    while left:
        while left:
            node = left.pop()
            if node not in seen and node.target not in _ENDS:
                seen.add(node)
                left += node.all_input_nodes
        memory = frozenset[object]().union(*(known[n] for n in seen))
        left = [n for n in writing if n not in seen and alias.touched(n, root, known) & memory]
    return seen


def _value(root: nn.Module, path: str) -> object:
    try:
        return resolve(root, path)
    except AttributeError:
        return None
