"""Restores strides that a rewrite changed, so that ``view`` takes what it takes in the plain model.

A rewrite keeps numbers and shapes; the order in memory may be another. That shows in ``view``,
which copies nothing: it refuses to join dimensions that do not follow each other in memory. Where
such a view would work on an output of the plain model and not on ours, and where one inside forward
is refused, a copy is written into the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from . import alias
from .ir import KEY, Graph, Node, Note, annotate, is_method, note
from .order import writes

RULE = "restore-strides"


def joinable(tensor: Tensor) -> set[tuple[int, int]]:
    """The pairs of dimensions that ``view`` can join, if they are put side by side."""
    sizes, strides = tensor.shape, tensor.stride()
    wide = [d for d, size in enumerate(sizes) if size > 1]
    return {(i, j) for i, j in permutations(wide, 2) if strides[i] == strides[j] * sizes[j]}


def order_to_copy(ours: Tensor, plain: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a copy of ``ours`` is to lie in memory, the widest stride
    first; None if ``ours`` can be viewed as ``plain`` can, or no copy could.
    """
    if not ours.layout == plain.layout == torch.strided or ours.shape != plain.shape:
        return None
    wanted = joinable(plain)
    if wanted <= joinable(ours):
        return None
    strides = plain.stride()
    order = tuple(sorted(range(plain.dim()), key=lambda d: -strides[d]))
    made = torch.empty([plain.shape[d] for d in order], device="meta")
    there = joinable(made.permute(*_inverse(order)))
    return order if wanted <= there else None


def restore_outputs(
    graph: Graph, returned: Any, result: Any, pairs: Iterable[tuple[Tensor, Tensor]]
) -> bool:
    """Copy the outputs of ``graph`` that cannot be viewed as those of the plain model can; whether
    there are any. ``returned``: the nodes that gave ``result``, nested as it is; ``pairs``: each
    tensor in it, and the plain model's.
    """
    holders: dict[int, list[Node]] = {}
    for node, value in _returned(returned, result):
        holders.setdefault(id(value), []).append(node)
    done: set[Node] = set()
    for ours, plain in pairs:
        order = order_to_copy(ours, plain)
        if order is not None:
            for node in holders.get(id(ours), ()):
                if node not in done:
                    done.add(node)
                    _copy(graph, node, order, next(iter(reversed(graph.nodes))))
    return bool(done)


def restore_view(graph: Graph, node: Node | None, root: nn.Module) -> bool:
    """Copy what the ``view`` at ``node`` was refused on; whether that gives the same numbers: not
    if anything is written in place to the memory that the view would share.
    """
    if node is None or not is_method(node, "view", "view_as"):
        return False
    viewed = node.args[0]
    if not isinstance(viewed, Node) or note(viewed).rule == RULE:
        return False
    known = alias.roots(graph, root)
    if any(alias.touched(n, root, known) & known[viewed] for n in graph.nodes if writes(n, root)):
        return False
    _copy(graph, viewed, (), node)
    return True


def _copy(graph: Graph, node: Node, order: tuple[int, ...], reader: Node) -> None:
    """Let ``reader`` read a copy of ``node`` that lies in memory in this order, () being theirs."""
    calls: list[tuple[Any, ...]] = [("contiguous",)]
    if list(order) != sorted(order):
        calls = [("permute", order), *calls, ("permute", _inverse(order))]
    made, old = node, note(node)
    with graph.inserting_before(reader):
        for name, *args in calls:
            made = graph.call_method(name, (made, *args))
            made.meta[KEY] = Note(old.origin, old.where, RULE)
    annotate(made, spec=old.spec)
    reader.replace_input_with(node, made)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(d) for d in range(len(order)))


def _returned(argument: Any, value: Any) -> Iterator[tuple[Node, Tensor]]:
    """The nodes in an argument of the output node, with the tensors that they gave."""
    if isinstance(argument, Node):
        if isinstance(value, Tensor):
            yield argument, value
    elif isinstance(argument, dict):
        for key, one in argument.items():
            yield from _returned(one, value[key])
    elif isinstance(argument, (tuple, list)):
        for one, item in zip(argument, value, strict=True):
            yield from _returned(one, item)
