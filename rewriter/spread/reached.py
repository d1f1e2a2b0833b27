"""Which parameters the outputs of a graph lead back to: those whose gradients ranks average.

A value may reach an output by a write in place into what is read later (``out[rows] = y``); one
that is detached, or of whole numbers, leads no further, but what is written into it later does.
Gradients of a parameter that this misses are refused when a backward pass comes to it
(``runtime/ranks/dense_reduce``).
"""

from __future__ import annotations

import torch
from torch import nn

from recast.rewriter import alias, order
from recast.rewriter.ir import Graph, Node, Spec, is_call, note
from recast.rewriter.rule import resolve

_ENDS = {
    "detach", "detach_", torch.detach, torch.detach_,
    # of whose argument only the shape, dtype and device count
    "new_zeros", "new_ones", "new_empty", "size", "dim", "numel",
    torch.zeros_like, torch.ones_like, torch.empty_like,
}  # fmt: skip


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
    known, place = alias.roots(graph, root), order.positions(graph)
    writing = [n for n in graph.nodes if order.writes(n, root)]
    seen: set[Node] = set()
    ends: set[Node] = set()
    left = [n for n in graph.nodes if n.op == "output"]
    while left:
        while left:
            node = left.pop()
            if _ends(node):
                ends.add(node)
            elif node not in seen:
                seen.add(node)
                left += node.all_input_nodes
        memory = frozenset[object]().union(*(known[n] for n in seen))
        for n in writing:
            if n not in seen and n not in ends:
                hit = alias.touched(n, root, known)
                if hit & memory or any(hit & known[e] and place[e] < place[n] for e in ends):
                    left.append(n)
    return seen


def _ends(node: Node) -> bool:
    """Whether no gradient goes from ``node`` to its inputs."""
    if node.op in ("call_function", "call_method") and node.target in _ENDS:  # layers have names
        return True
    if is_call(node, getattr) and node.args[1] in ("data", "shape"):
        return True
    spec = note(node).spec
    return isinstance(spec, Spec) and not (spec.dtype.is_floating_point or spec.dtype.is_complex)


def _value(root: nn.Module, path: str) -> object:
    try:
        return resolve(root, path)
    except AttributeError:
        return None
