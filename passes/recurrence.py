"""Recurrent units: whole layers of nn.GRU, and cells that models write by hand, as in DIEN.

nn.GRU(x), nn.GRU(PackedSequence(x, counts))       a call for each layer, all steps in it
the cell                                           a call for each step
a loop over it, or over nn.GRUCell(x, h)           a call for all steps: see unrolled

r = sigmoid(x W_r + h U_r + b_r)                   products in any spelling: matmul, linear, or
z = sigmoid(x W_z + h U_z + b_z)                   chunks of one linear of three times the width
n = tanh(x W_n + r * (h U_n + c_n) + b_n)
(1 - w) * h + w * n                                w = z, or with a score s for each sample s * z
                                                   (AUGRU) or s alone (AGRU)
(1 - z) * n + z * h,  n + z * (h - n)              as torch's own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from recast.rewriter import order
from recast.rewriter.ir import Graph, Node, is_call, items, note
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply, declare_keeps_result

from .cells import Cell, Piece, read_cell
from .leaf import argument, differs, extra, module_of, plural, put, spec_of, unpaid
from .padded import PADDED, drop_orders
from .unrolled import UNROLLED

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_OP = torch.ops.recast.gru.default
declare_keeps_result(_OP)
_A_STEP = 12  # calls of torch for a step of a layer, forward
# Torch's own kernels. Its LSTM does a third more than its GRU in 0.65 to 0.8 of the time without
# gradients, as long as our GRU takes; with them the two take about as long (a Xeon, one thread).
_TORCHS = (nn.LSTM, nn.RNN, nn.LSTMCell, nn.RNNCell)


# ---------------------------------------------------------------- layers


@dataclass(frozen=True, slots=True)
class Layers:
    """A call of nn.GRU."""

    path: str
    module: nn.GRU
    x: Node
    packed: tuple[Any, ...] | None  # batch sizes, sorted and unsorted indices
    start: Node | None
    parts: tuple[tuple[tuple[Any, ...], Node], ...]  # where in the result, and who reads that


def _match_layers(node: Node, root: nn.Module) -> Answer:
    module = module_of(node, root)
    if isinstance(module, _TORCHS):
        return _torchs(node, module)
    if not isinstance(module, nn.GRU) or extra(node, 2, "input", "hx"):
        return None
    refused = differs(node, module, nn.GRU) or _unlike(node, module) or unpaid("gru", node, root)
    if refused is not None:
        return refused
    x, start = argument(node, 0, "input"), argument(node, 1, "hx")
    packed = None
    if is_call(x, PackedSequence):
        if len(x.args) != 4:
            return None
        x, *fields = x.args
        packed = tuple(fields)
    spec = spec_of(x)
    if spec is None or len(spec.shape) != (3 if packed is None else 2):
        return Miss(node, "its input is not known to be a batch of sequences")
    parts: list[tuple[tuple[Any, ...], Node]] = []
    inner = [node]
    for key, part in items(node):
        if packed is not None and key == 0:
            inner.append(part)
            parts += [((0, k), n) for k, n in items(part)]
            whole = len(part.users) != len(list(items(part)))
        else:
            parts.append(((key,), part))
            whole = key not in (0, 1)
        if whole:
            return Miss(node, "its packed result is used whole", ("pad_packed_sequence() at once",))
    if len(node.users) != len(list(items(node))) or not parts:
        return Miss(node, "its result is used whole", ("unpack it: out, last = gru(x)",))
    inner += [n for _, n in parts]
    found = Layers(str(node.target), module, x, packed, start, tuple(parts))
    return Match(inner, [n for _, n in parts], found)


def _torchs(node: Node, module: nn.Module) -> Miss:
    name = next(kind.__name__ for kind in _TORCHS if isinstance(module, kind))
    if isinstance(module, nn.RNNCellBase):
        whole = f"nn.{name.removesuffix('Cell')} over all steps"
        return Miss(node, f"nn.{name} is left to torch, a call for each step", (whole,))
    return Miss(node, f"nn.{name} is left to torch, whose own kernels run all steps")


def _unlike(node: Node, module: nn.GRU) -> Miss | None:
    if module.bidirectional:
        return Miss(node, "it runs in both directions", ("two nn.GRU, one over x.flip(1)",))
    if module.dropout and module.num_layers > 1:
        return Miss(
            node,
            "its dropout draws between its layers, in torch's own order",
            ("dropout=0",),
        )
    return None


def _rewrite_layers(match: Match, build: Build) -> list[Node]:
    found: Layers = match.found
    module, x = found.module, found.x
    turned = found.packed is None and not module.batch_first
    counts, ordered, back = found.packed or (None, None, None)
    if turned:
        x = build.call(torch.transpose, x, 0, 1)
    start = found.start
    if start is not None and ordered is not None:
        start = build.call(torch.index_select, start, 1, ordered)
    names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else [])]
    lasts = []
    for layer in range(module.num_layers):
        if layer:  # the layers may draw here, though with 0.0 they do not
            x = build.call(F.dropout, x, 0.0, build.get(f"{found.path}.training"))
        params: list[Node | None] = [build.get(f"{found.path}.{n}_l{layer}") for n in names]
        params += [None] * (4 - len(params))
        h = None if start is None else build.call(torch.select, start, 0, layer)
        # in memory as torch has it: step by step
        stepwise = turned or (layer == module.num_layers - 1 and _returned(found))
        how = (None, False, 0.0, True) if stepwise else ()
        call = build.call(_OP, x, counts, None, h, params, True, *how, name="gru")
        x = build.item(call, 0)
        lasts.append(build.item(call, 1))
    made: dict[tuple[Any, ...], Any] = {}
    for key, _ in found.parts:
        if key in made:
            continue
        if key == (1,):
            last = build.call(torch.stack, lasts)
            made[key] = last if back is None else build.call(torch.index_select, last, 1, back)
        elif key == (0,):
            made[key] = build.call(torch.transpose, x, 0, 1) if turned else x
        else:
            made[key] = (x, *(found.packed or ()))[key[1]]
    return [made[key] for key, _ in found.parts]


def _returned(found: Layers) -> bool:
    """Whether the model returns all states of dense sequences, and so their order in memory."""
    alls = [part for key, part in found.parts if key == (0,)]
    return found.packed is None and any(user.op == "output" for n in alls for user in n.users)


def _worth_of_layers(match: Match) -> str:
    found: Layers = match.found
    spec = spec_of(found.x)
    steps = None
    if found.packed is None and spec is not None:
        steps = spec.shape[1 if found.module.batch_first else 0]
    calls = _A_STEP * found.module.num_layers
    return f"some {calls} launches a step" + (
        f", {calls * steps} in all" if isinstance(steps, int) else ""
    )


LAYERS = Rule(
    name="fuse-recurrence",
    equation="nn.GRU(x) => gru(x), a call for each layer",
    match=_match_layers,
    rewrite=_rewrite_layers,
    describe=lambda m: f"{plural(m.found.module.num_layers, 'layer')} of nn.GRU in one call",
    worth=_worth_of_layers,
)


# ---------------------------------------------------------------- cells


def _match_cell(node: Node, root: nn.Module) -> Answer:
    cell = read_cell(node, root)
    if not isinstance(cell, Cell):
        return cell
    refused = unpaid("gru", node, root)
    return refused or Match(cell.nodes, [node], cell)


def _rewrite_cell(match: Match, build: Build) -> list[Node]:
    cell: Cell = match.found
    of_x = [None if gate is None else gate.x for gate in cell.gates]
    of_h = [None if gate is None else gate.h for gate in cell.gates]
    weights = [
        _weight(build, [None if s is None else s.weight for s in part], cell.size)
        for part in (of_x, of_h)
    ]
    biases = [
        _bias(build, [None if s is None else s.bias for s in part], cell.size)
        for part in (of_x, of_h)
    ]
    if cell.gates[1] is None:
        biases[0] = _open(build, biases[0], weights[0], cell.size)
    x = build.call(torch.unsqueeze, cell.x, 1)
    params = [*weights, *biases]
    call = build.call(_OP, x, None, cell.score, cell.h, params, cell.keeps, name="gru")
    return [build.call(torch.squeeze, build.item(call, 0), 1)]


def _whole(build: Build, pieces: Sequence[Piece | None]) -> Node | None:
    """The value of which ``pieces`` are the three thirds, in order."""
    first = pieces[0]
    if first is None or [p and p.third for p in pieces] != [0, 1, 2]:
        return None
    return put(build, first.value) if all(p and p.value == first.value for p in pieces) else None


def _weight(build: Build, pieces: list[Piece | None], size: int) -> Node:
    """(3 H, in), zeros for a gate that the cell has not."""
    whole = _whole(build, pieces)
    if whole is not None:
        return whole
    each = [None if piece is None else _part(build, piece, size) for piece in pieces]
    if all(piece is None or piece.turned for piece in pieces):
        return build.call(torch.transpose, build.call(torch.cat, _filled(build, each), 1), 0, 1)
    turned = [
        build.call(torch.transpose, node, 0, 1) if piece is not None and piece.turned else node
        for piece, node in zip(pieces, each, strict=True)
    ]
    return build.call(torch.cat, _filled(build, turned))


def _filled(build: Build, each: list[Node | None]) -> list[Node]:
    """``each``, zeros like its first value for None."""
    first = next(node for node in each if node is not None)
    zeros = build.call(torch.zeros_like, first) if None in each else first
    return [zeros if node is None else node for node in each]


def _open(build: Build, bias: Node | None, weight: Node, size: int) -> Node:
    """``bias`` (3 H,) with 100 for z: its sigmoid is 1 in every dtype, with no gradient."""
    whole = build.call(torch.narrow, weight, 1, 0, 1)
    whole = build.call(torch.flatten, whole)
    shift = build.call(torch.full_like, build.call(torch.narrow, whole, 0, 0, size), 100.0)
    if bias is None:
        outer = build.call(torch.zeros_like, shift)
        return build.call(torch.cat, [outer, shift, outer])
    ends = [build.call(torch.narrow, bias, 0, third * size, size) for third in (0, 2)]
    return build.call(torch.cat, [ends[0], shift, ends[1]])


def _bias(build: Build, pieces: list[Piece | None], size: int) -> Node | None:
    """(3 H,), zeros where a gate has none."""
    whole = _whole(build, pieces)
    if whole is not None or not any(pieces):
        return whole
    each = [
        None if piece is None else build.call(torch.flatten, _part(build, piece, size))
        for piece in pieces
    ]
    return build.call(torch.cat, _filled(build, each))


def _part(build: Build, piece: Piece, size: int) -> Node:
    node: Node = put(build, piece.value)
    if piece.third is None:
        return node
    return build.call(torch.narrow, node, 0, piece.third * size, size)


CELL = Rule(
    name="fuse-recurrence",
    equation="h + w (n - h), n = tanh(W x + r U h), r = sigmoid(..), w = s sigmoid(..) => gru(x)",
    match=_match_cell,
    rewrite=_rewrite_cell,
    describe=lambda m: "a recurrent cell" + (" under a score" if m.found.score is not None else ""),
    worth=lambda m: plural(len(m.nodes) - 1, "launch") + " each time it is called",
)


@dataclass(frozen=True)
class FuseRecurrence:
    """nn.GRU(x) => gru(x); h + w (n - h) => gru(x) of one step; those of a loop => one gru(x)

    with r = sigmoid(W_r x + U_r h), n = tanh(W_n x + r U_n h) and w = s sigmoid(W_z x + U_z h), a
    score s alone, or 1 - sigmoid(..). The weights stay the user's own parameters.
    """

    name: ClassVar[str] = "fuse-recurrence"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse every layer, cell and loop of ``graph``; returns their number."""
        found = apply(graph, [LAYERS, CELL], context)
        found += apply(graph, [UNROLLED], context)
        counts = (n.args[1] for n in graph.nodes if is_call(n, _OP))
        packed = {n.name for n in counts if isinstance(n, Node)}
        padded = apply(graph, [PADDED], context)
        if padded:
            drop_orders(graph)
        context.whole |= (packed & context.loops.keys()) - _left(graph, context)
        return found + padded


def _left(graph: Graph, context: Context) -> set[str]:
    """The loops over steps of which anything is left but what this pass wrote."""
    live = order.live(graph, context.root) if context.loops else set()
    wheres = {note(n).where for n in live if n.op != "get_attr" and note(n).rule != CELL.name}
    return {name for name, lines in context.loops.items() if lines & wheres}


__all__ = ["CELL", "LAYERS", "FuseRecurrence"]
