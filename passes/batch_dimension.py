"""Which dimension of a value counts the samples of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, is_method
from recast.runtime.layers.drawn_dropout import drawn_dropout

from .chain_steps import Step, read_step
from .leaf import spec_of

UNKNOWN = -1, 1
_ROW_BY_ROW = (
    torch.ops.recast.mlp.default, torch.ops.recast.relu_dropout.default,
    torch.ops.recast.dropout_global.default, torch.ops.recast.batch_norm_global.default,
    drawn_dropout,
)  # fmt: skip


def counts(source: Any, root: nn.Module) -> tuple[int, int] | None:
    """``(dimension, rows per sample)`` by which ``source`` grows with the batch; None if it does
    not. ``UNKNOWN`` if that is not known, or if its rows are not in the order of the batch.
    """
    spec = spec_of(source)
    if spec is None:
        return UNKNOWN
    symbols = [(d, size) for d, size in enumerate(spec.shape) if isinstance(size, str)]
    if not symbols:
        return None
    (dim, size), *others = symbols
    if others or not size.endswith("B"):
        return UNKNOWN
    if size == "B":
        return dim, 1
    return (0, int(size[:-2])) if dim == 0 and _in_order(source, size, root) else UNKNOWN


def inputs_read(graph: Graph) -> list[Node]:
    """The inputs that the output of ``graph`` is computed of, in their order."""
    seen, queue = set[Node](), [graph.output_node()]
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            queue += node.all_input_nodes
    return [node for node in graph.nodes if node.op == "placeholder" and node in seen]


def _in_order(node: Any, size: str, root: nn.Module) -> bool:
    """Whether the ``k*B`` rows of ``node`` are k of the first sample, k of the second, ..."""
    while isinstance(node, Node):
        if is_call(node, torch.reshape, torch.flatten) or is_method(node, "view", "reshape"):
            node = node.args[0]
            spec = spec_of(node)
            if spec is not None and spec.shape and spec.shape[0] == "B":
                return True
        elif is_call(node, *_ROW_BY_ROW):
            node = node.args[0]
        else:
            step = read_step(node, root)
            node = step.source if isinstance(step, Step) else None
        spec = spec_of(node)
        if spec is None or not spec.shape or spec.shape[0] != size:
            return False
    return False
