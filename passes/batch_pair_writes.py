"""Whether pairs of rows can be made anew where they are read, past the writes of a graph."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from recast.rewriter import alias
from recast.rewriter.alias import Roots
from recast.rewriter.ir import Graph, Node, is_call, is_method
from recast.rewriter.order import writes

from .batch_pairs import OUT_OF_PLACE, is_pairs, turned_places
from .leaf import spec_of


def written_to(graph: Graph, root: nn.Module) -> Node | None:
    """A write that the pairs, made anew at the place of what reads them, would see in another
    order: to what they are made of, or to pairs that others see, by another name or as a view.
    """
    writing = [n for n in graph.nodes if writes(n, root)]
    if not writing or not any(map(is_pairs, graph.nodes)):
        return None
    known = alias.roots(graph, root)
    above = above_of(graph, set(filter(is_pairs, graph.nodes)))
    for node in writing:
        touched = alias.touched(node, root, known)
        if not any(map(is_pairs, node.all_input_nodes)):
            if _read_before(node, touched, known, above):
                return node
            continue
        source = node.args[0] if node.args else None
        in_place = is_method(node, "fill_diagonal_", *OUT_OF_PLACE) and is_pairs(source)
        if not in_place or not isinstance(source, Node) or turned_places(source) is not None:
            return node
        if any(user is not node and not only_asks(user) for user in source.users):
            return node
        if _seen_after(node, touched, known, above):
            return node
    return None


def above_of(graph: Graph, chosen: set[Node]) -> dict[Node, set[Node]]:
    """For each node those of ``chosen`` that it is computed of."""
    found: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        read = node.all_input_nodes
        found[node] = (chosen & {*read}).union(*(found[n] for n in read))
    return found


def _read_before(
    node: Node, touched: Roots, known: Mapping[Node, Roots], above: Mapping[Node, set[Node]]
) -> bool:
    """Whether ``node`` writes to what pairs were made of before it, that are read after it."""
    order = list(node.graph.nodes)
    at = order.index(node)
    made = {n for n in order[:at] if is_pairs(n) and _touches(n, touched, known)}
    return any(made & above[n] for n in order[at + 1 :] if not is_pairs(n))


def _touches(node: Node, touched: Roots, known: Mapping[Node, Roots]) -> bool:
    return any(touched & known[n] for n in node.all_input_nodes if spec_of(n) is not None)


def _seen_after(
    node: Node, touched: Roots, known: Mapping[Node, Roots], above: Mapping[Node, set[Node]]
) -> bool:
    """Whether pairs, or a part of them, that ``node`` writes to are read later by another name."""
    order = list(node.graph.nodes)
    below = {node}
    for after in order[order.index(node) + 1 :]:
        if below & {*after.all_input_nodes}:
            below.add(after)
        for one in after.all_input_nodes:
            of_pairs = is_pairs(one) or bool(above[one])
            if one not in below and of_pairs and not only_asks(after) and touched & known[one]:
                return True
    return False


def only_asks(node: Node) -> bool:
    """Whether ``node`` only asks for a size, a dtype or a device."""
    return is_call(node, getattr) or is_method(node, "size", "dim", "numel")
