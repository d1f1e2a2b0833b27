"""Alias analysis: which values may share memory, so that an in-place write blocks only those moves
that it could affect.

Every value has roots: the values whose memory it may use. An operation known to allocate its result
is its own root; any other may pass on the memory of each of its inputs. Inputs of the graph,
parameters and buffers may alias each other, so they share one root, :data:`OUTSIDE`. A table whose
rows are rewritten as they are looked up (``max_norm``) is a root besides, by its id, of all that
reads it.
"""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.capture.opaque_calls import OpaqueCall

from .ir import Graph, Node, Spec, note
from .order import foreign, renormalised, writes, written

OUTSIDE = None
Roots: TypeAlias = frozenset["Node | int | None"]

_FRESH = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.neg, operator.matmul, operator.eq, operator.ne, operator.lt, operator.le,
    operator.gt, operator.ge, operator.and_, operator.or_, operator.invert,
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.matmul, torch.bmm, torch.mm,
    torch.addmm, torch.cat, torch.concat, torch.stack, torch.hstack, torch.sum, torch.mean,
    torch.relu, torch.sigmoid, torch.tanh, torch.softmax, torch.exp, torch.log, torch.sqrt,
    torch.square, torch.abs, torch.clamp, torch.where, torch.zeros, torch.ones, torch.full,
    torch.zeros_like, torch.ones_like, torch.rand, torch.randn, torch.rand_like, torch.tensor,
    torch.empty, torch.empty_like, torch.full_like,
    torch.arange, torch.tensordot, torch.clone, F.linear, F.relu, F.softmax, F.embedding,
    F.embedding_bag, F.leaky_relu, F.gelu, F.silu, F.elu, F.layer_norm, F.batch_norm,
}  # fmt: skip
_FRESH_METHODS = {
    "add", "sub", "mul", "div", "pow", "matmul", "bmm", "sum", "mean", "relu", "sigmoid", "tanh",
    "softmax", "exp", "log", "sqrt", "square", "abs", "clamp", "clone", "new_zeros", "new_ones",
    "new_tensor", "new_full", "repeat", "eq", "ne", "lt", "gt", "le", "ge",
}  # fmt: skip
_FRESH_MODULES = (
    nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.modules.batchnorm._BatchNorm, nn.LayerNorm,
    nn.Conv1d, nn.Conv2d, nn.ReLU, nn.PReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid,
    nn.Tanh, nn.Softmax, nn.RNNBase, nn.MultiheadAttention,
)  # fmt: skip


def roots(graph: Graph, root: nn.Module) -> dict[Node, Roots]:
    """The roots of every value of ``graph``."""
    found: dict[Node, Roots] = {}
    tables = {id(t) for n in graph.nodes if (t := renormalised(n, root)) is not None}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            found[node] = frozenset((OUTSIDE,)) | _read(node, root, tables)
        elif fresh(node, root):
            found[node] = frozenset((node,)) | _read(node, root, tables)
        else:
            inputs = [found[n] for n in node.all_input_nodes if n in found]
            found[node] = frozenset((node,)).union(*inputs) | _read(node, root, tables)
    return found


def _read(node: Node, root: nn.Module, tables: set[int]) -> Roots:
    """Those of ``tables`` that ``node`` is, or that the module which it calls holds."""
    if not tables or node.op not in ("get_attr", "call_module"):
        return frozenset()
    held = operator.attrgetter(str(node.target))(root)
    parameters = held.parameters() if isinstance(held, nn.Module) else (held,)
    return frozenset(tables & set(map(id, parameters)))


def fresh(node: Node, root: nn.Module) -> bool:
    """Whether ``node`` is known to allocate its result."""
    if node.op == "output" or (writes(node, root) and renormalised(node, root) is None):
        return False
    if node.op == "call_method":
        return node.target in _FRESH_METHODS
    if node.op == "call_module":
        return isinstance(root.get_submodule(str(node.target)), _FRESH_MODULES)
    if isinstance(node.target, torch._ops.OpOverload):
        return all(r.alias_info is None for r in node.target._schema.returns)
    if node.target in (operator.add, operator.mul) and not isinstance(note(node).spec, Spec):
        return False  # these may be lists, whose entries live on
    return node.target in _FRESH


def touched(node: Node, root: nn.Module, known: dict[Node, Roots]) -> Roots:
    """The roots of the memory that ``node``, which writes in place, may write to."""
    table = renormalised(node, root)
    if table is not None:
        return frozenset((id(table),))
    unknown = node.op == "call_module" and foreign(root.get_submodule(str(node.target)))
    if unknown or isinstance(node.target, OpaqueCall):
        return frozenset((OUTSIDE,)).union(*(known[n] for n in node.all_input_nodes))
    if isinstance(node.target, torch._ops.OpOverload):
        targets: Any = list(written(node))
    else:
        first = node.args[0] if node.args else node.kwargs.get("input")
        targets = [n for n in (first, node.kwargs.get("out")) if isinstance(n, Node)]
        targets = targets or node.all_input_nodes
    return frozenset[Any]().union(*(known[n] for n in targets))


def clash(node: Node, root: nn.Module, moved: set[Node], known: dict[Node, Roots]) -> bool:
    """Whether any of ``moved`` may see what ``node`` writes, so that they must not cross it."""
    hit = touched(node, root, known)
    return any(hit & known[n] or any(hit & known[i] for i in n.all_input_nodes) for n in moved)


def unwritten(graph: Graph, root: nn.Module) -> set[Node]:
    """The nodes that neither read nor return memory that is written in place."""
    known = roots(graph, root)
    writing = [node for node in graph.nodes if writes(node, root)]
    hit = frozenset[Any]().union(*(touched(node, root, known) for node in writing))
    return {
        node
        for node in graph.nodes
        if not any(hit & known[n] for n in (node, *node.all_input_nodes))
    }


def hidden(graph: Graph, root: nn.Module) -> set[Node]:
    """The nodes whose memory is neither written in place nor returned: they may be views of others
    where the user's are not.
    """
    known = roots(graph, root)
    got = {r for n in graph.output_node().all_input_nodes for r in known[n]}
    return {node for node in unwritten(graph, root) if node not in got}
