"""For several ranks: dropout with the masks of the global batch, and a refusal of draws that no
pass knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter import order
from recast.rewriter.capture.opaque_calls import OpaqueCall
from recast.rewriter.ir import Graph, Node, Spec, annotate, is_call, items, note
from recast.rewriter.report.journal import Missed
from recast.runtime.layers.drawn_dropout import drawn_dropout
from recast.runtime.layers.field_attention import attention_weights, weighted
from recast.runtime.ranks.batch_of_all import batch_of_all, sizes_of_all
from recast.runtime.ranks.draws_global import (
    draw_global_,
    multinomial_global,
    random_state,
    refuse_drawn,
)
from recast.runtime.ranks.means_of_all import OF_ALL
from recast.runtime.refusal import refuse

from .batch_dimension import UNKNOWN, counts
from .chain_steps import Step, read_step
from .leaf import Attr, Value, argument, device_of, plural, spec_of
from .synchronise import MLP, NORMS, Part, Writer, fired, inner, rebuild
from .synchronise_draws import ROWS

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_RELU_DROPOUT = torch.ops.recast.relu_dropout.default
_DROPOUT = torch.ops.recast.dropout_global.default
_COLLECTIVE = (
    MLP, _DROPOUT, ROWS, draw_global_, multinomial_global, sizes_of_all, batch_of_all,
    *OF_ALL, torch.ops.recast.batch_norm_global.default,
)  # fmt: skip
_ATTENTION = torch.ops.recast.field_attention.default


# ---------------------------------------------------------------- the places


@dataclass(frozen=True, slots=True)
class Place:
    """A node that applies dropout: its input, and the flags that switch it on."""

    node: Node
    source: Node
    flags: Sequence[Value]
    found: tuple[int, int]
    drop: tuple[Value, Value] | None = None  # p and flag; None: a chain


def _place(node: Node, root: nn.Module) -> Place | None:
    """The place, if ``node`` applies dropout to something that grows with the batch; else None."""
    if is_call(node, MLP):
        steps: Any = node.args[3]
        flags: Any = iter(node.args[5])  # type: ignore[arg-type]
        by_step = [(s, next(flags)) for s in steps if s in ("dropout", "batch_norm")]
        drops = [flag for step, flag in by_step if step == "dropout"]
        return _at(node, node.args[0], drops, None, root) if drops else None
    if is_call(node, _RELU_DROPOUT, drawn_dropout):
        args: Any = node.args
        return _at(node, args[0], [args[2]], (args[1], args[2]), root)
    step = read_step(node, root)
    if not isinstance(step, Step) or step.kind != "dropout":
        return None
    if step.inplace and not _fresh(node, step.source, root):
        return None
    (p,), (training,) = step.numbers, step.training
    return _at(node, step.source, [training], (p, training), root)


def _at(
    node: Node,
    source: Any,
    flags: Sequence[Value],
    drop: tuple[Value, Value] | None,
    root: nn.Module,
) -> Place | None:
    found = counts(source, root)
    return None if found is None else Place(node, source, flags, found, drop)


def _fresh(node: Node, source: Any, root: nn.Module) -> bool:
    """Whether only ``node`` could see a write to ``source``."""
    if node.op != "call_module" or not isinstance(source, Node) or len(source.users) > 1:
        return False
    made = is_call(source, MLP, torch.ops.recast.batch_norm_global.default)
    step = read_step(source, root)
    return made or (isinstance(step, Step) and step.kind != "dropout" and not step.inplace)


# ---------------------------------------------------------------- attention


def _open(node: Node, rule: str) -> None:
    """Write an attention whose op would draw a mask as its parts, with a dropout of its own."""
    q, k, v, scale, p, training, _, *masks = node.args
    writer = Writer(node, rule)
    weights = writer.call(attention_weights, q, k, scale, *masks, name="attention_weights")
    of_q, of_k = spec_of(q), spec_of(k)
    if of_q is not None and of_k is not None:
        spec = Spec(of_q.dtype, (*of_q.shape[:-1], of_k.shape[-2]))
        annotate(weights, spec=spec)
    dropped = writer.call(drawn_dropout, weights, p, training, name="dropout")
    annotate(dropped, spec=note(weights).spec)
    out = writer.call(weighted, dropped, v, name="attention")
    for k_th, item in list(items(node)):
        annotate(out if k_th == 0 else weights, spec=note(item).spec)
        item.replace_all_uses_with(out if k_th == 0 else weights)
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _may_drop(node: Node) -> bool:
    """Whether this is an attention that draws a mask in train mode."""
    return is_call(node, _ATTENTION) and not _is_zero(node.args[4]) and node.args[5] is not False


def _is_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and value == 0


# ---------------------------------------------------------------- other draws

# functions that draw only in training: index and name of the flag, its default
_FLAGGED: dict[Any, tuple[int, str, bool]] = {
    F.dropout: (2, "training", True),
    drawn_dropout: (2, "training", True),
    torch.dropout: (2, "train", True),
    torch.dropout_: (2, "train", True),
    F.alpha_dropout: (2, "training", False),
    F.feature_alpha_dropout: (2, "training", False),
    F.dropout1d: (2, "training", True),
    F.dropout2d: (2, "training", True),
    F.dropout3d: (2, "training", True),
    F.rrelu: (3, "training", False),
}


def _drawing(node: Node, root: nn.Module) -> list[tuple[Value, Value]]:
    """``(flag, p)`` of every draw of ``node`` that is not a synchronised dropout."""
    if node.op == "call_module":
        path, module = str(node.target), root.get_submodule(str(node.target))
        return [(Attr(f"{name}.training"), 1.0) for name, m in inner(module, path) if drawing(m)]
    if not order.draws(node, root) or is_call(node, *_COLLECTIVE, torch.manual_seed):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        names = [a.name for a in node.target._schema.arguments]
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
        return [(given.get("training", True), given.get("p", 1.0))]
    if is_call(node, F.scaled_dot_product_attention):
        return [(True, argument(node, 4, "dropout_p", 0.0))]
    known = _FLAGGED.get(node.target)
    return [(True, 1.0) if known is None else (argument(node, *known), argument(node, 1, "p", 0.5))]


def drawing(module: nn.Module) -> bool:
    """Whether a call of ``module`` itself draws random numbers in train mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))


def batchwise(module: nn.Module) -> bool:
    """Whether ``module`` computes on the batch as a whole: statistics, or random draws."""
    return drawing(module) or isinstance(module, NORMS)


@dataclass(frozen=True)
class SynchroniseDropout:
    """dropout(x, p) => dropout_global(x, global_rows(x), p)

    In modules, functions and chains, for more than one rank: each rank draws the masks of the
    global batch and uses its own rows (``runtime.mlp.mask_draws`` says what the others' cost). If
    it is not known which dimension counts samples, ranks draw masks of their own, independent of
    each other, and the report says so; with ``exact=False`` they always do. What does not grow with
    the batch is dropped alike on all ranks. An attention that drops weights is written as its parts
    for that. Other draws raise at run time, when they would happen; a function or layer of the
    user's runs, and raises if it has drawn.
    """

    name: ClassVar[str] = "synchronise-dropout"
    exact: bool = True

    def run(self, graph: Graph, context: Context) -> int:
        """Replace the dropouts of ``graph``; returns how many nodes were rewritten."""
        root = context.root
        for node in [n for n in graph.nodes if _may_drop(n)][: context.fuel_left()]:
            _open(node, self.name)
        found = [_place(node, root) for node in graph.nodes]
        places = [p for p in found if p is not None][: context.fuel_left()]
        if not self.exact:
            places = [replace(p, found=UNKNOWN) for p in places]
        if places:
            rows = self._rows(places)
            for place in places:
                self._one(place, rows if place.found != UNKNOWN else None, context)
        return len(places) + self._others(graph, context)

    def _rows(self, places: Sequence[Place]) -> Node:
        """The node that returns the sizes of all batches, before the first dropout."""
        counted = next((p for p in places if p.found != UNKNOWN), places[0])
        before = takewhile(lambda n: n is not counted.node, counted.node.graph.nodes)
        known = next((n for n in before if is_call(n, ROWS) and n.args[1] != -1), None)
        if known is not None:  # from draws before it
            return known
        writer = Writer(counted.node, self.name)
        # Read again: the node that reads the flag for a later dropout may come after this one.
        flags = {Attr(str(f.target)) if isinstance(f, Node) else f for p in places for f in p.flags}
        given = [writer.put(flag) for flag in sorted(flags, key=str)]
        rows = writer.call(ROWS, counted.source, *counted.found, given, name="global_rows")
        annotate(rows, spec=Spec(torch.int64, ("n",)))
        return rows

    def _one(self, place: Place, rows: Node | None, context: Context) -> None:
        node = place.node
        if place.drop is None:
            made = rebuild(node, "dropout", self.name, partial(_step, rows, place.found))
        else:
            writer = Writer(node, self.name)
            x = argument(node, 0, "input")  # perhaps another node by now
            if is_call(node, _RELU_DROPOUT):
                x = writer.call(torch.relu, x)
            drop = (writer.put(v) for v in place.drop)
            made = [writer.call(_DROPOUT, x, rows, *drop, *place.found, name="dropout_global")]
            writer.replace(made[0])
        what = f"{plural(len(made), 'mask')} of the global batch"
        if place.found == UNKNOWN:
            what = f"{plural(len(made), 'mask')} that each rank draws for itself"
        if place.found == UNKNOWN and self.exact:
            why = "which dimension counts the samples is not known: ranks draw masks of their own"
            tries = ("example=[batch_a, batch_b] of different sizes", "dropout on (batch, ...)")
            where = note(made[0]).where
            context.journal.miss(Missed(self.name, made[0].name, why, where, tries))
        fired(made[0], what, self.name, context)

    def _others(self, graph: Graph, context: Context) -> int:
        """Refuse what each rank would draw for itself; returns the number of refusals."""
        count = 0
        on_cpu = device_of(context.root) == "cpu"
        for node in list(graph.nodes):
            if on_cpu and _kept(node, context.root) and context.fuel_left() != 0:
                self._watch(node, context)
                count += 1
            for flag, p in _drawing(node, context.root):
                if flag is False or p == 0 or context.fuel_left() == 0:
                    continue
                if _alike(node, context.root):
                    continue
                if isinstance(node.target, OpaqueCall) and on_cpu:
                    self._watch(node, context)
                    count += 1
                    continue
                writer, rule = Writer(node, self.name), note(node).rule
                tries = ["nn.Dropout", "numbers drawn outside, as an input"]
                made = writer.call(
                    refuse,
                    writer.put(flag),
                    f"{node.name} draws random numbers in forward, on several ranks",
                    "each would draw for its own batch, and none what one process would",
                    tries if rule is None else ["dropout of 0", f'passes="default,-{rule}"'],
                    writer.put(p),
                )
                fired(made, f"{node.name} is refused where it draws", self.name, context)
                count += 1
        return count

    def _watch(self, node: Node, context: Context) -> None:
        """Let a function or layer of the user, of which nothing is known, run as long as it draws
        nothing: each rank would draw for its own batch.
        """
        writer = Writer(node, self.name)
        before = writer.call(random_state, name="random_state")
        told = (
            f"{node.name} draws random numbers in forward, on several ranks",
            "each would draw for its own batch, and none what one process would",
            ["numbers drawn outside, as an input", "torch.randn and its like, in forward itself"],
        )
        with node.graph.inserting_after(node):
            made = node.graph.create_node("call_function", refuse_drawn, (before, *told), {})
        fired(writer.stamped(made), f"{node.name} is refused if it draws", self.name, context)


def _alike(node: Node, root: nn.Module) -> bool:
    """Whether all ranks draw the same: dropout of what does not grow with the batch."""
    if is_call(node, drawn_dropout):
        return counts(node.args[0], root) is None
    step = read_step(node, root)
    return isinstance(step, Step) and step.kind == "dropout" and counts(step.source, root) is None


def _kept(node: Node, root: nn.Module) -> bool:
    """Whether this is a layer of the user that runs as it is, without any part that has a graph,
    as that would draw for the global batch.
    """
    if node.op != "call_module":
        return False
    module = root.get_submodule(str(node.target))
    return order.foreign(module) and not any("forward" in vars(m) for m in module.modules())


def _step(rows: Node | None, found: tuple[int, int], writer: Writer, x: Node, part: Part) -> Node:
    (p,), (training,) = part.numbers, part.training
    return writer.call(_DROPOUT, x, rows, p, training, *found, name="dropout_global")
