"""Recurrent units: whole layers of nn.GRU, and cells that models write by hand, as in DIEN.

nn.GRU(x), nn.GRU(PackedSequence(x, counts))       a call for each layer, all steps in it

r = sigmoid(x W_r + h U_r + b_r)                   products in any spelling: matmul, linear, or
z = sigmoid(x W_z + h U_z + b_z)                   chunks of one linear of three times the width
n = tanh(x W_n + r * (h U_n + c_n) + b_n)
(1 - w) * h + w * n                                w = z, or s * z with a score s for each sample
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

from recast.rewriter.ir import Graph, Node, is_call, items
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply, declare_keeps_result

from .cells import Cell, Piece, read_cell
from .leaf import argument, differs, extra, module_of, plural, put, spec_of, unpaid

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_OP = torch.ops.recast.gru.default
declare_keeps_result(_OP)
_A_STEP = 12  # calls of torch for a step of a layer, forward


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
        if layer:  # no effect now, but the user may set it later
            flags = [build.get(f"{found.path}.{name}") for name in ("dropout", "training")]
            x = build.call(F.dropout, x, *flags)
        params: list[Node | None] = [build.get(f"{found.path}.{n}_l{layer}") for n in names]
        params += [None] * (4 - len(params))
        h = None if start is None else build.call(torch.select, start, 0, layer)
        call = build.call(_OP, x, counts, None, h, params, True, name="gru")
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
    shares = [[gate.x for gate in cell.gates], [gate.h for gate in cell.gates]]
    weights = [_weight(build, [share.weight for share in part], cell.size) for part in shares]
    biases = [_bias(build, [share.bias for share in part], cell.size) for part in shares]
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


def _weight(build: Build, pieces: list[Piece], size: int) -> Node:
    """(3 H, in)."""
    whole = _whole(build, pieces)
    if whole is not None:
        return whole
    each = [_part(build, piece, size) for piece in pieces]
    if all(piece.turned for piece in pieces):
        return build.call(torch.transpose, build.call(torch.cat, each, 1), 0, 1)
    turned = [
        build.call(torch.transpose, node, 0, 1) if piece.turned else node
        for piece, node in zip(pieces, each, strict=True)
    ]
    return build.call(torch.cat, turned)


def _bias(build: Build, pieces: list[Piece | None], size: int) -> Node | None:
    """(3 H,), zeros where a gate has none."""
    whole = _whole(build, pieces)
    if whole is not None or not any(pieces):
        return whole
    each = [
        None if piece is None else build.call(torch.flatten, _part(build, piece, size))
        for piece in pieces
    ]
    first = next(node for node in each if node is not None)
    zeros = build.call(torch.zeros_like, first) if None in each else None
    return build.call(torch.cat, [zeros if node is None else node for node in each])


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
    """nn.GRU(x) => gru(x); h + w (n - h) => gru(x) of one step

    with r = sigmoid(W_r x + U_r h), n = tanh(W_n x + r U_n h) and w = s sigmoid(W_z x + U_z h) or
    1 - sigmoid(..). The weights stay the user's own parameters.
    """

    name: ClassVar[str] = "fuse-recurrence"

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse every layer and every cell of ``graph``; returns their number."""
        return apply(graph, [LAYERS, CELL], context)


__all__ = ["CELL", "LAYERS", "FuseRecurrence"]
