"""Joins Linear layers that read the same value into one product.

Experts, gates and towers begin with a Linear on the same input. The chains after them stay where
they are, so random numbers are drawn in the user's order; only the products are moved, to the first
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter import alias, order
from recast.rewriter.ir import KEY, Graph, Node, annotate, is_call, merge, note
from recast.rewriter.report.journal import Fired, Missed
from recast.rewriter.rule import resolve
from recast.runtime.mlp.linears import ROWS, one_product

from .chain_steps import Step, read_step
from .leaf import Attr, plural, spec_of, unpaid

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_MLP = torch.ops.recast.mlp.default
_LINEARS = torch.ops.recast.linears.default


@dataclass(frozen=True, slots=True)
class _Layer:
    """A Linear alone, or the first of a chain."""

    node: Node
    source: Node
    params: tuple[Any, ...]  # weight and bias: an Attr, a node or None
    width: int


def _layer(node: Node, root: nn.Module) -> _Layer | None:
    """The layer that ``node`` begins with; None if it begins with none that can be joined."""
    if is_call(node, _MLP):
        args: tuple[Any, ...] = node.args
        source, params, _, steps = args[:4]
        found: Any = tuple(params[:2]) if steps[0] == "linear" else None
    else:
        step = read_step(node, root)
        plain = isinstance(step, Step) and step.kind == "linear"
        source, found = (step.source, step.params) if plain else (None, None)  # type: ignore[union-attr]
    if not isinstance(source, Node) or found is None:
        return None
    if any(isinstance(p, Node) and p.op != "get_attr" for p in found):
        return None  # computed: it may come after the first layer
    weight = found[0]
    path = weight.path if isinstance(weight, Attr) else str(weight.target)
    table = resolve(root, path)
    if not isinstance(table, torch.Tensor) or table.dim() != 2:
        return None
    return _Layer(node, source, found, table.shape[0])


def _families(graph: Graph, root: nn.Module) -> list[list[_Layer]]:
    found: dict[Any, list[_Layer]] = {}
    live = _live(graph)
    for node in graph.nodes:
        layer = _layer(node, root) if node in live else None
        if layer is not None:
            found.setdefault((layer.source, note(node).autocast), []).append(layer)
    return [family for family in found.values() if len(family) > 1]


def _live(graph: Graph) -> set[Node]:
    """The nodes that the output depends on: only their parameters get gradients."""
    live: set[Node] = set()
    stack = [n for n in graph.nodes if n.op == "output"]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def _written(family: Sequence[_Layer], graph: Graph, root: nn.Module) -> Node | None:
    """A node between the first layer and the last that writes to their input or to a weight."""
    place = order.positions(graph)
    first, last = place[family[0].node], place[family[-1].node]
    between = [n for n in graph.nodes if first <= place[n] < last and order.writes(n, root)]
    if not between:
        return None
    held = {family[0].source}
    held |= {p for layer in family for p in layer.params if isinstance(p, Node)}
    known = alias.roots(graph, root)
    return next((n for n in between if alias.clash(n, root, held, known)), None)


def _slower(family: Sequence[_Layer], root: nn.Module) -> str | None:
    """Why the layers are faster one by one, if they are; else None."""
    spec = spec_of(family[0].source)
    width = None if spec is None else spec.shape[-1]
    results = [layer.width for layer in family]
    if not isinstance(width, int) or one_product(width, results):
        return None
    return (
        f"{len(family)} layers read the {width} numbers of {family[0].source} and give"
        f" {sum(results)}: one product would read the input once, but has to write its results side"
        " by side, which costs more where they are so wide"
    )


def _join(family: Sequence[_Layer], graph: Graph, name: str) -> Node:
    """Put the product before the first layer; chains continue from their part of it."""
    first = family[0].node
    origin = merge([layer.node for layer in family], name)
    with graph.inserting_before(first):
        params = [_put(graph, p, origin) for layer in family for p in layer.params]
        call = graph.create_node(
            "call_function", _LINEARS, (family[0].source, params), {}, name="linears"
        )
        call.meta[KEY] = origin
        parts = [graph.call_function(getitem, (call, k)) for k in range(len(family))]
    source = spec_of(family[0].source)
    for layer, part in zip(family, parts, strict=True):
        part.meta[KEY] = merge([layer.node], name)
        if source is not None:
            annotate(part, spec=type(source)(source.dtype, (*source.shape[:-1], layer.width)))
        if is_call(layer.node, _MLP):
            args: tuple[Any, ...] = layer.node.args
            layer.node.args = (part, args[1][2:], args[2], args[3][1:], *args[4:])
        else:
            layer.node.replace_all_uses_with(part)
            graph.erase_node(layer.node)
    annotate(call, spec=tuple(note(part).spec for part in parts))
    return call


def _put(graph: Graph, value: Any, origin: Any) -> Node | None:
    """``value`` as an argument of a call at this point."""
    if value is None:
        return None
    path = value.path if isinstance(value, Attr) else str(value.target)
    made = graph.create_node("get_attr", path, (), {})
    made.meta[KEY] = origin
    annotate(made, origin=(path.rpartition(".")[0],), spec=None)
    return made


@dataclass(frozen=True)
class JoinLinears:
    """linear(x, w1), linear(x, w2) ... => linears(x, [w1, w2 ...])

    Also the first layers of chains. The weights stay the user's own parameters.
    """

    name: ClassVar[str] = "join-linears"

    def run(self, graph: Graph, context: Context) -> int:
        """Join the sibling layers of ``graph``; returns the number of families."""
        fired = 0
        for family in _families(graph, context.root):
            if context.fuel_left() == 0:
                break
            told = note(family[0].node)
            refused = unpaid("linears", family[0].node, context.root)
            if refused is not None:
                missed = Missed(self.name, refused.node.name, refused.why, told.where)
                context.journal.miss(missed)
                continue
            writes = _written(family, graph, context.root)
            if writes is not None:
                why = f"{writes.name} writes in place to what the layers of {family[0].source} read"
                context.journal.miss(Missed(self.name, writes.name, why, told.where))
                continue
            slower = _slower(family, context.root)
            if slower is not None:
                name = family[0].node.name
                context.journal.miss(Missed(self.name, name, slower, told.where))
                continue
            call = _join(family, graph, self.name)
            widths = ", ".join(str(layer.width) for layer in family)
            what = f"{plural(len(family), 'layer')} of one input, to {widths}, as one product"
            what += f" in batches of {ROWS} rows or more"
            spare = len(family) - 1
            saves = f"{plural(spare, 'launch')}, {spare} sums of the gradient of its input a step"
            context.burn()
            context.journal.fired.append(
                Fired(self.name, call.name, note(call).origin, told.where, what, saves)
            )
            fired += 1
        return fired
