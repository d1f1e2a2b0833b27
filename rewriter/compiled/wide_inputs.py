"""Inputs of a wider dtype than the model's, in graphs where a rule casts what is made of them.

The weights of a pooled sum are cast to the dtype of its table. That changes nothing in the example,
and widens what autocast has narrowed. Of weights in float64, or complex ones, torch would make a
result of their dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, note

_CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int"})


def cast_inputs(graph: Graph) -> tuple[int, ...]:
    """The flat inputs whose dtype a rule's cast hides."""
    left = [
        node.args[0]
        for node in graph.nodes
        if _name(node) == "type_as" and note(node).rule is not None
    ]
    reached = set[Any](left)
    while left:
        node = left.pop()
        if not isinstance(node, Node) or _name(node) in _CASTS or not _is_number(node):
            continue
        left += [given for given in node.all_input_nodes if given not in reached]
        reached.update(node.all_input_nodes)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return tuple(k for k, node in enumerate(inputs) if node in reached)


def too_wide(
    leaves: Sequence[Any], places: Iterable[int], labels: Sequence[str], root: nn.Module
) -> str | None:
    """Which of the flat inputs at ``places`` has numbers that the model's dtype does not hold."""
    own = next((p.dtype for p in root.parameters() if p.is_floating_point()), None)
    for k in places:
        if own is not None and torch.promote_types(leaves[k].dtype, own) != own:
            return f"{labels[k]} is {leaves[k].dtype}, and the model {own}"
    return None


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is_number(node: Node) -> bool:
    """Whether ``node`` may have a dtype that says how exact it is: not a mask, nor ids."""
    dtype = getattr(note(node).spec, "dtype", None)
    return dtype is None or dtype.is_floating_point or dtype.is_complex
