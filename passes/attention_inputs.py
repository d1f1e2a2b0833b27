"""The first layer of an attention over a history, which reads the target next to each row.

    linear(cat([q, k, q - k, q * k], 2))          q: (B, 1, D) for all rows, k: (B, L, D)
    linear(cat([k, q * k], 2), [Wk  Wp]) + linear(q, Wq).unsqueeze(1)

with Wq, Wk and Wp the sums of the columns that belong to q, k and q * k. The target's part is
computed once per sample instead of once per row, and the wide input is half as wide: 2048 samples
of 20 rows of 16 train in half the time. Parts may be in any order, be missing, or be ``k - q``.
Where q or k is not finite, neither is the result, but it may be NaN in place of inf or vice versa.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule

from .leaf import Value, argument, device_of, human, linear_of, plural, put, rank, spec_of
from .repeated_rows import LEAST, too_few


@dataclass(frozen=True, slots=True)
class _Part:
    """How often q, k and their product are in one part of the input."""

    q: int
    k: int
    product: int


@dataclass(frozen=True, slots=True)
class Found:
    """The layer, and its input."""

    q: Node  # (B, 1, D)
    k: Node
    parts: tuple[_Part, ...]
    weight: Value
    bias: Value
    flat: bool  # the layer reads (B L, n D)


# ---------------------------------------------------------------- the parts


def _once(node: Any) -> Node | None:
    """The (B, 1, D) value that ``node`` is, or repeats for every row of a sample."""
    spec = spec_of(node)
    if spec is None or len(spec.shape) != 3 or not isinstance(node, Node):
        return None
    if spec.shape[1] == 1:
        return node
    if not is_method(node, "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave"):
        return None
    source = node.args[0]
    inner = spec_of(source)
    if inner is None or inner.shape != (spec.shape[0], 1, spec.shape[2]):
        return None
    return source if isinstance(source, Node) else None


class _Reader:
    """Reads the parts of one input; all must be of the same two values."""

    def __init__(self) -> None:
        self.q: Node | None = None
        self.k: Node | None = None
        self.nodes: list[Node] = []  # the nodes that compute the parts

    def part(self, node: Any) -> _Part | None:
        """``node`` as q, k, their difference or their product."""
        if is_call(node, operator.sub, operator.mul) and _of_both(node):
            one, two = (self._operand(a) for a in node.args)
            if one is None or two is None:
                return None
            self.nodes.append(node)
            if node.target is operator.mul:
                return _Part(0, 0, 1)
            return _Part(1, -1, 0) if one == "q" else _Part(-1, 1, 0)
        which = self._operand(node)
        return None if which is None else _Part(int(which == "q"), int(which == "k"), 0)

    def _operand(self, node: Any) -> str | None:
        if not isinstance(node, Node) or rank(node) != 3:
            return None
        once = _once(node)
        if once is not None:
            if self.q is not None and not _same(self.q, once):
                return None
            self.q = self.q or once
            self.nodes += [node] if once is not node else []
            return "q"
        if self.k is not None and self.k is not node:
            return None
        self.k = node
        return "k"


def _of_both(node: Node) -> bool:
    """Whether one operand is the same for all rows of a sample, and the other is not."""
    once = [_once(a) is not None for a in node.args]
    return sorted(once) == [False, True] and all(rank(a) == 3 for a in node.args)


def _same(a: Node, b: Node) -> bool:
    both = is_call(a, torch.unsqueeze) and is_call(b, torch.unsqueeze)
    return a is b or (both and a.args == b.args)


# ---------------------------------------------------------------- the rule


def _match(node: Node, root: nn.Module) -> Answer:
    linear = linear_of(node, root)
    if linear is None:
        return None
    source, weight, bias, miss = linear
    nodes = [node]
    flat = is_call(source, torch.reshape) and rank(source) == 2
    if flat and sole_user(source) is not None:
        nodes.append(source)
        source = argument(source, 0, "input")
    wide = spec_of(source)
    if not is_call(source, torch.cat) or wide is None or len(wide.shape) != 3:
        return None
    if argument(source, 1, "dim", 0) not in (2, -1) or sole_user(source) is None:
        return None
    if len(nodes) > 1 and not _rows(nodes[1], wide.shape):
        return None
    reader = _Reader()
    read = [reader.part(part) for part in argument(source, 0, "tensors")]
    parts = [part for part in read if part is not None]
    if len(parts) != len(read) or reader.q is None or reader.k is None:
        return None
    kinds = any(p.k for p in parts) + any(p.product for p in parts)
    if len(parts) <= kinds or not kinds or not any(p.q for p in parts):
        return None
    if not _fits(reader.q, reader.k, wide.dtype):
        return None
    if miss is not None:
        return miss
    if device_of(root) != "cpu":
        return Miss(node, "its input is not taken apart on a GPU, where that is not known to pay")
    found = Found(reader.q, reader.k, tuple(parts), weight, bias, len(nodes) > 1)
    saved = _saved(found)
    if saved is not None and saved < LEAST:
        return too_few(node, saved)
    inner = _only_here([*nodes, source], reader.nodes)
    ordered = [n for n in node.graph.nodes if n in inner]
    return Match(ordered, [node], found)


def _rows(view: Node, wide: Sequence[Any]) -> bool:
    """Whether ``view`` flattens samples and rows into rows."""
    spec = spec_of(view)
    return spec is not None and len(spec.shape) == 2 and spec.shape[1] == wide[2]


def _fits(q: Node, k: Node, dtype: torch.dtype) -> bool:
    a, b = spec_of(q), spec_of(k)
    if a is None or b is None or not a.dtype == b.dtype == dtype or not dtype.is_floating_point:
        return False
    return a.shape[0] == b.shape[0] and a.shape[2] == b.shape[2] and isinstance(a.shape[2], int)


def _saved(found: Found) -> int | None:
    """The numbers that a sample's input has less; None if its rows are not known."""
    parts = found.parts
    fewer = len(parts) - any(p.k for p in parts) - any(p.product for p in parts)
    spec = spec_of(found.k)
    size = None if spec is None else spec.at(1)
    return None if size is None else fewer * size[1] * size[2]


def _only_here(core: Sequence[Node], parts: Sequence[Node]) -> set[Node]:
    """``core``, and those of ``parts`` that have no other use."""
    inside = {*core, *parts}
    while out := {n for n in inside.difference(core) if set(n.users) - inside}:
        inside -= out
    return inside


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    weight, bias = put(build, found.weight), put(build, found.bias)
    chunks = build.call(torch.chunk, weight, len(found.parts), 1)
    columns = [build.item(chunks, i) for i in range(len(found.parts))]

    def summed(kind: str) -> Node | None:
        """The columns of ``kind``, those that are subtracted last."""
        signs = [getattr(part, kind) for part in found.parts]
        total: Node | None = None
        for sign in (1, -1):
            for own in (c for c, s in zip(columns, signs, strict=True) if s == sign):
                if total is not None:
                    total = build.call(operator.add if sign > 0 else operator.sub, total, own)
                else:
                    total = own if sign > 0 else build.call(operator.neg, own)
        return total

    once = build.call(F.linear, build.call(torch.squeeze, found.q, 1), summed("q"), bias)
    inputs, weights = [], []
    for kind, value in (("k", found.k), ("product", None)):
        own = summed(kind)
        if own is not None:
            inputs.append(build.call(operator.mul, found.k, found.q) if value is None else value)
            weights.append(own)
    joined = len(inputs) > 1
    rows = build.call(
        F.linear,
        build.call(torch.cat, inputs, 2) if joined else inputs[0],
        build.call(torch.cat, weights, 1) if joined else weights[0],
    )
    out = build.call(operator.add, rows, build.call(torch.unsqueeze, once, 1))
    return [build.call(torch.flatten, out, 0, 1) if found.flat else out]


def _worth(match: Match) -> str:
    found: Found = match.found
    saved, spec = _saved(found), spec_of(found.k)
    if spec is None or saved is None:
        return plural(1, "product")
    return f"{human(4 * saved * spec.dtype.itemsize)} of traffic a sample"


ATTENTION: Rule = Rule(
    name="contract-attention-inputs",
    equation="linear(cat([q, k, q - k, q * k])) => linear(cat([k, q * k])) + linear(q)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda match: "the target's part of an attention, once a sample instead of once a row",
    worth=_worth,
)
