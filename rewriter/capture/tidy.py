"""Tidies the graph of a trace: few in-place writes, none that is lost, constants folded, no unused
reads, no tensors that torch has yet to negate.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import KEY, Graph, Node, depends, note
from recast.rewriter.order import asserts, draws, droppable, writes

from .calls import OUT_OF_PLACE
from .constants import constants
from .guards import target
from .layers import runs_users_code
from .no_grad import OF_THE_TENSOR
from .opaque_calls import OpaqueCall
from .refused import refusal
from .tracer import Tracer

# These return a view, or their very argument, or a copy.
_EITHER = (torch.reshape, torch.flatten, torch.ravel)
_EITHER_METHODS = {
    "reshape", "reshape_as", "flatten", "ravel", "contiguous", "to", "type", "type_as", "float",
    "double", "half", "bfloat16", "cpu", "cuda",
}  # fmt: skip
_FOLD = 1 << 20  # constants of at most so many entries are kept rather than computed at each call


def functional(tracer: Tracer) -> None:
    """``a += b`` becomes ``a = a + b`` where the difference cannot be seen."""
    place = {node: k for k, node in enumerate(tracer.graph.nodes)}
    owners, sharing = _owners(tracer), _sharing(tracer)
    for node in tracer.graph.nodes:
        plain = OUT_OF_PLACE.get(node.target) if callable(node.target) else None
        if node.op != "call_function" or plain is None:
            continue
        storage: Any = tracer.storages.get(node)
        if storage is None:  # a python number
            node.target = plain
            continue
        old = node.args[0]
        if not isinstance(old, Node) or not _fresh(old) or not _same_type(tracer, node):
            continue
        after = [n for n in owners[storage] if depends(n, {node})]
        # Besides ``old``: a layer may hand on what it got, as dropout does in eval mode.
        before = [n for n in owners[storage] if n not in after]
        seen = before + _elsewhere(before, node, tracer, owners, sharing)
        if old not in before or not all(_fresh(n) and _last(n, node, place) for n in seen):
            continue
        node.target = plain
        tracer.overwritten.update(before)  # in the examples, where it was done in place
        node._rename(plain.__name__.rstrip("_"))
        for n in after:  # what follows lives in the new tensor
            tracer.storages[n] = -place[node]
        owners[storage] = before
        owners[-place[node]] = after
    targets = (target(n, tracer) for n in tracer.graph.nodes)
    written = (tracer.storages.get(t) for t in targets if t is not None)
    tracer.written = {storage for storage in written if storage is not None} | tracer.outs


def drop_lost(tracer: Tracer) -> None:
    """Drop writes in place that nobody reads, once all questions are asked: a graph would keep them
    for their effect, and with them all that they are computed from. One through ``x.data`` or
    ``set_`` stays: what torch saved for backward sees it. So does one to what code of the user's
    was given, which may have kept it.
    """
    if not tracer.written:
        return
    place = {node: k for k, node in enumerate(tracer.graph.nodes)}
    owners, sharing = _owners(tracer), _sharing(tracer)
    unread: set[Node] = set()
    for node in reversed(list(tracer.graph.nodes)):
        if not unread.issuperset(node.users):
            continue
        if droppable(node, tracer.root):
            unread.add(node)
            continue
        old = target(node, tracer)
        storage = None if old is None else tracer.storages.get(old)
        random = draws(node, tracer.root) and node.target is not F.dropout
        if storage is None or storage in tracer.outs or random or asserts(node):
            continue
        held = [n for n in owners[storage] if n is not node]
        held += _elsewhere(held, node, tracer, owners, sharing)
        seen = any(place[u] > place[node] for n in held for u in n.users if u not in unread)
        past = any("data" in n.args[1:] or any(_keeps(u, tracer) for u in n.users) for n in held)
        kept = bool(node.users) and node.target in OF_THE_TENSOR  # another shape to its users
        if seen or past or kept or not all(map(_fresh, held)):
            continue
        if node.target is F.dropout:  # draws all the same
            node.args = node.args[:3]
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
            continue
        node.replace_all_uses_with(old)
        tracer.graph.erase_node(node)


def _owners(tracer: Tracer) -> dict[int, list[Node]]:
    """The nodes in each piece of memory."""
    found: dict[int, list[Node]] = {}
    for node, held in tracer.storages.items():
        found.setdefault(held, []).append(node)
    return found


def _keeps(node: Node, tracer: Tracer) -> bool:
    """Whether a call may keep a tensor that it is given: as the memory of another, or in code of
    the user's.
    """
    if node.op == "call_module":
        return runs_users_code(tracer.root.get_submodule(str(node.target)))
    name = str(getattr(node.target, "__name__", node.target))
    return isinstance(node.target, OpaqueCall) or name.partition(".")[0] == "set_"


def _fresh(node: Node) -> bool:
    """Whether a call allocates its result, so that only its users can see it."""
    return node.op not in ("placeholder", "get_attr")


def _sharing(tracer: Tracer) -> dict[Node, list[Node]]:
    """The nodes that share memory, or not, by the sizes, strides and dtypes of the batch and of the
    model, each with those at the other end: a view, or its very argument, or else a copy.
    """
    found: dict[Node, list[Node]] = {}
    for node in tracer.storages:
        given = node.args[0] if node.args else None
        method = node.op == "call_method" and node.target in _EITHER_METHODS
        layer = tracer.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not method and node.target not in _EITHER and not isinstance(layer, nn.Flatten):
            continue
        if not isinstance(given, Node) or given not in tracer.storages:
            continue
        kinds = [tracer.pairs[n][0].is_floating_point() for n in (node, given)]
        if kinds[0] == kinds[1]:
            found.setdefault(given, []).append(node)
            found.setdefault(node, []).append(given)
    return found


def _elsewhere(
    nodes: list[Node], by: Node, tracer: Tracer, owners: dict[int, list[Node]],
    sharing: dict[Node, list[Node]],
) -> list[Node]:  # fmt: skip
    """What else may share memory with ``nodes``, in other batches, when ``by`` writes to it."""
    found: list[Node] = []
    left = [*nodes]
    while left:
        for end in sharing.get(left.pop(), ()):
            for n in owners[tracer.storages[end]]:
                if n not in nodes and n not in found and not depends(n, {by}):
                    found.append(n)
                    left.append(n)
    return found


def _last(node: Node, by: Node, place: dict[Node, int]) -> bool:
    """Whether nothing reads ``node`` after ``by`` has written to its memory."""
    return all(place[user] <= place[by] for user in node.users)


def _same_type(tracer: Tracer, node: Node) -> bool:
    """Whether the out-of-place result has the dtype and shape of what would be written."""
    made, (a, b) = tracer.pairs[node][0], node.args
    values: list[Any] = [tracer.pairs[v][0] if isinstance(v, Node) else v for v in (a, b)]
    if not all(isinstance(v, (torch.Tensor, int, float, bool)) for v in values):
        return False
    if torch.result_type(*values) != made.dtype and node.target is not operator.itruediv:
        return False
    shapes = [tracer.shapes.get(v, torch.Size()) if isinstance(v, Node) else () for v in (a, b)]
    return bool(torch.broadcast_shapes(*shapes) == tracer.shapes[node])


def fold(tracer: Tracer) -> bool:
    """Keep what depends on no input as a constant, if something else uses it; whether one may be of
    torch's default dtype because it is.
    """
    graph = tracer.graph
    frozen = tracer.static
    default = False
    for node in list(graph.nodes):
        if node not in frozen or node.op == "get_attr":
            continue
        value = tracer.pairs[node][0]
        users = [u for u in node.users if u not in frozen]
        if not users or any(u.op == "output" for u in users) or not isinstance(value, torch.Tensor):
            continue
        if tracer.storages.get(node) in tracer.written or node in tracer.overwritten:
            continue
        if value.numel() > _FOLD:
            continue
        default = default or (value.dtype == torch.get_default_dtype() and _made(node))
        path = constants(tracer.root).hold(value.detach().clone(), node.name)
        with graph.inserting_before(node):
            kept = graph.create_node("get_attr", path, (), {})
        kept.meta[KEY] = note(node)
        for user in users:
            user.replace_input_with(node, kept)
    for node in reversed(list(graph.nodes)):
        if node in frozen and not node.users and not writes(node, tracer.root):
            graph.erase_node(node)
    return default


def _made(node: Node) -> bool:
    """Whether ``node`` depends on a tensor that is made in forward, as by ``torch.ones``."""
    if node.op == "get_attr":
        return False
    return not node.all_input_nodes or any(map(_made, node.all_input_nodes))


def prune(graph: Graph) -> None:
    """Drop unused reads that the tracer itself made: sizes, items, attributes."""
    quiet = (getattr, operator.getitem)
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        reads = node.op == "get_attr" or (node.op == "call_function" and node.target in quiet)
        if reads or (node.op == "call_method" and node.target in ("size", "dim")):
            graph.erase_node(node)


def negated(tracer: Tracer) -> Iterator[Node]:
    """The nodes that make a tensor that torch has yet to negate, such as ``x.conj().imag``, out of
    one that it has not. Refuses one that is written to, of which a copy would not see it.
    """

    def is_negated(node: Node) -> bool:
        if node.op == "get_attr":  # its values in the examples are copies, and plain
            return holds_negated(tracer.root, node)
        return _is_negated(tracer.pairs.get(node, (None,))[0])

    for node in tracer.graph.nodes:
        if not is_negated(node) or any(map(is_negated, node.all_input_nodes)):
            continue
        if tracer.storages.get(node) in tracer.written:
            why = "writes in place to a tensor that torch has yet to negate"
            raise refusal(why, note(node).where, "")
        yield node


def holds_negated(root: nn.Module, node: Node) -> bool:
    """Whether ``node`` reads such a tensor from the model."""
    return node.op == "get_attr" and _is_negated(attrgetter(str(node.target))(root))


def _is_negated(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_complex() and value.is_neg()


def resolve_negated(graph: Graph, nodes: list[Node]) -> None:
    """Negate what ``nodes`` make: torch does so where it reads such a tensor, and our kernels read
    memory as it is. Outputs stay as the model gives them.
    """
    for node in nodes:
        users = [user for user in node.users if user.op != "output"]
        with graph.inserting_after(node):
            made = graph.create_node("call_method", "resolve_neg", (node,), {})
        made.meta[KEY] = note(node)
        for user in users:
            user.replace_input_with(node, made)
