"""Reads a recurrent cell that is written out by hand: its gates, weights and biases."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recast.rewriter.ir import Node, is_call, is_method
from recast.rewriter.rule import Miss

from .leaf import Attr, argument, differs, linear_of, module_of, spec_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A weight or a bias of one gate."""

    value: Attr | Node
    third: int | None = None  # of one for all three gates
    turned: bool = False  # (in, H), where a linear has (H, in)


@dataclass(frozen=True, slots=True)
class Share:
    """What one product adds to a gate."""

    weight: Piece
    bias: Piece | None


@dataclass(frozen=True, slots=True)
class Gate:
    """x W + b and h U + c, which a gate is made of."""

    x: Share
    h: Share


@dataclass(frozen=True, slots=True)
class Cell:
    """A recurrent cell, from its products to its next state."""

    x: Node
    h: Node
    size: int
    score: Node | None
    keeps: bool
    gates: tuple[Gate, Gate | None, Gate]  # r, z, n; without z, the score is the whole weight
    nodes: tuple[Node, ...]


def read_cell(node: Node, root: nn.Module) -> Cell | Miss | None:
    """The cell whose next state is ``node``; a Miss when all but a part of it fits."""
    for mixture in _mixtures(node):
        n = _inside(mixture.n, root, torch.tanh, nn.Tanh)
        if n is None:
            continue
        score, z = _scored(mixture, root)
        reset = _reset(n, root)
        if reset is None:
            continue
        try:
            return _cell(mixture, score, z, reset, root)
        except _UnlikeError as why:
            return Miss(node, f"a recurrent cell, but {why}", ("use nn.GRU, or nn.GRUCell's form",))
    return None


class _UnlikeError(Exception):
    """The value looks like a cell up to here, but is not one that can be read."""


def _inside(
    node: Any, root: nn.Module, function: Callable[..., Any], kind: type[nn.Module]
) -> Node | None:
    """x when ``node`` is function(x)."""
    if not isinstance(node, Node):
        return None
    module = module_of(node, root)
    if module is None:
        named = is_call(node, function) or is_method(node, function.__name__)
    else:
        named = type(module) is kind and differs(node, module, kind) is None
    source = argument(node, 0, "input") if named else None
    return source if isinstance(source, Node) else None


# ---------------------------------------------------------------- the mixture of old and new


@dataclass(frozen=True, slots=True)
class _Mixture:
    """h + w (n - h), or with ``keeps`` h + (1 - w) (n - h)."""

    h: Node
    n: Node
    w: Node
    keeps: bool
    nodes: tuple[Node, ...]


def _mixtures(node: Node) -> Iterator[_Mixture]:
    """Every reading of ``node`` as (1 - w) a + w b, or as a + w (b - a)."""
    if not is_call(node, operator.add) or len(node.args) != 2:
        return
    for a, b in _ways(node):
        if not is_call(b, operator.mul) or not isinstance(a, Node):
            continue
        for w, q in _ways(b):
            if not isinstance(w, Node) or not isinstance(q, Node):
                continue
            if is_call(q, operator.sub) and q.args[1] is a and isinstance(q.args[0], Node):
                yield from _both(a, q.args[0], w, (node, b, q))
            for rest, old in _ways(a) if is_call(a, operator.mul) else ():
                inverse = is_call(rest, operator.sub) and rest.args[0] in (1, 1.0)
                if inverse and rest.args[1] is w and isinstance(old, Node):
                    yield from _both(old, q, w, (node, a, b, rest))


def _ways(node: Any) -> Iterator[tuple[Any, Any]]:
    """The two operands of a sum or a product, either first."""
    if len(node.args) == 2:
        yield node.args
        yield node.args[::-1]


def _both(a: Node, b: Node, w: Node, nodes: tuple[Node, ...]) -> Iterator[_Mixture]:
    """a + w (b - a), in which either may be the new one."""
    yield _Mixture(a, b, w, False, nodes)
    yield _Mixture(b, a, w, True, nodes)


def _scored(mixture: _Mixture, root: nn.Module) -> tuple[Node | None, Node | None]:
    """``(score, z)`` of w = z, a sigmoid, or z times a score; else all of w is the score (AGRU)."""
    w = mixture.w
    if not _one_wide(w) or _one_wide(mixture.h):
        if _inside(w, root, torch.sigmoid, nn.Sigmoid) is not None:
            return None, w
        for score, z in _ways(w) if is_call(w, operator.mul) else ():
            if _inside(z, root, torch.sigmoid, nn.Sigmoid) is not None and isinstance(score, Node):
                return score, z
    return w, None


def _one_wide(node: Node) -> bool:
    spec = spec_of(node)
    return spec is not None and len(spec.shape) == 2 and spec.shape[1] == 1


@dataclass(frozen=True, slots=True)
class _Reset:
    """The argument of tanh: outer + r (inner)."""

    r: Node
    product: Node
    inner: Any
    outer: list[Node]


def _reset(n: Node, root: nn.Module) -> _Reset | None:
    leaves = list(_leaves(n))
    for leaf in leaves:
        for r, inner in _ways(leaf) if is_call(leaf, operator.mul) else ():
            if _inside(r, root, torch.sigmoid, nn.Sigmoid) is not None:
                return _Reset(r, leaf, inner, [other for other in leaves if other is not leaf])
    return None


def _leaves(node: Any) -> Iterator[Any]:
    """The terms of the sum ``node``, and the inner sums; each of those before its own terms."""
    yield node
    if is_call(node, operator.add):
        for side in node.args:
            yield from _leaves(side)


# ---------------------------------------------------------------- the gates


@dataclass(frozen=True, slots=True)
class _Product:
    """``source`` times a weight."""

    source: Node
    share: Share
    nodes: tuple[Node, ...]


def _cell(m: _Mixture, score: Node | None, z: Node | None, reset: _Reset, root: nn.Module) -> Cell:
    spec = spec_of(m.h)
    if spec is None or len(spec.shape) != 2 or not isinstance(spec.shape[1], int):
        raise _UnlikeError("its state is no matrix of a known width")
    if score is not None:
        given = spec_of(score)
        if given is None or given.shape != (spec.shape[0], 1):
            raise _UnlikeError("its score is not one number a sample")
        if m.keeps:
            raise _UnlikeError("its score weighs the state it keeps, not the new one")
    reader = _Reader(m.h, spec.shape[1], root)
    r = reader.gate(argument(reset.r, 0, "input"), None)
    update = None if z is None else reader.gate(argument(z, 0, "input"), None)
    candidate = reader.gate(reset.outer, reset.inner)
    weight = [] if z is None else [m.w, z]
    nodes = dict.fromkeys([*m.nodes, *weight, reset.r, m.n, reset.product, *reader.nodes])
    assert reader.x is not None
    gates = (r, update, candidate)
    return Cell(reader.x, m.h, reader.size, score, m.keeps, gates, tuple(nodes))


class _Reader:
    """Reads gates of one cell; collects the nodes they are made of."""

    def __init__(self, h: Node, size: int, root: nn.Module) -> None:
        self.h, self.size, self.root = h, size, root
        self.x: Node | None = None
        self.nodes: list[Node] = []

    def gate(self, outer: Any, inner: Any) -> Gate:
        """The gate that ``outer`` adds up, besides what the reset gate multiplies."""
        products, biases = self._read(outer if isinstance(outer, list) else list(_leaves(outer)))
        shifts: list[Node] = []
        if inner is not None:
            more, shifts = self._read(list(_leaves(inner)))
            products += more
        of_x = [p for p in products if p.source is not self.h]
        of_h = [p for p in products if p.source is self.h]
        if len(of_x) != 1 or len(of_h) != 1 or (inner is not None and products[-1] is of_x[0]):
            raise _UnlikeError("a gate is no product of its input plus one of its state")
        if self.x is not None and of_x[0].source is not self.x:
            raise _UnlikeError("its gates read several inputs")
        self.x = of_x[0].source
        return Gate(_with(of_x[0].share, biases), _with(of_h[0].share, shifts))

    def _read(self, leaves: list[Any]) -> tuple[list[_Product], list[Node]]:
        products, biases = [], []
        for leaf in leaves:
            if is_call(leaf, operator.add):
                self.nodes.append(leaf)
                continue
            product = self._product(leaf) if isinstance(leaf, Node) else None
            if product is not None:
                products.append(product)
                self.nodes += product.nodes
                continue
            spec = spec_of(leaf)
            known = spec is not None and spec.shape in ((self.size,), (1, self.size))
            if not known or leaf.op != "get_attr":
                raise _UnlikeError(f"{leaf} is added to a gate")
            biases.append(leaf)
        return products, biases

    def _product(self, node: Node) -> _Product | None:
        """x W, or a linear of x, or a third of one."""
        if is_call(node, torch.matmul, operator.matmul, torch.mm):
            source, weight = argument(node, 0, "input"), argument(node, 1, "other")
            spec = spec_of(weight)
            if not isinstance(source, Node) or not isinstance(weight, Node) or spec is None:
                return None
            if weight.op != "get_attr" or len(spec.shape) != 2 or spec.shape[1] != self.size:
                return None
            return _Product(source, Share(Piece(weight, turned=True), None), (node,))
        if is_call(node, operator.getitem) and isinstance(node.args[0], Node):
            return self._third(node, node.args[0])
        return self._linear(node, None)

    def _third(self, node: Node, parts: Node) -> _Product | None:
        """One of the three parts of a linear."""
        by = {"chunk": 3, "split": self.size}
        name = next(
            (n for n in by if is_call(parts, getattr(torch, n)) or is_method(parts, n)), None
        )
        whole, third = argument(parts, 0, "input"), node.args[1]
        if name is None or not isinstance(whole, Node) or third not in (0, 1, 2):
            return None
        count = argument(parts, 1, "chunks" if name == "chunk" else "split_size_or_sections")
        spec = spec_of(whole)
        if count != by[name] or argument(parts, 2, "dim", 0) not in (1, -1) or spec is None:
            return None
        if len(spec.shape) != 2 or spec.shape[1] != 3 * self.size:
            return None
        found = self._linear(whole, third)  # type: ignore[arg-type]
        return found and _Product(found.source, found.share, (node, parts, *found.nodes))

    def _linear(self, node: Node, third: int | None) -> _Product | None:
        linear = linear_of(node, self.root)
        if linear is None:
            return None
        source, weight, bias, miss = linear
        if miss is not None:
            raise _UnlikeError(miss.why)
        if not isinstance(source, Node) or weight is None:
            return None
        share = Share(Piece(weight, third), None if bias is None else Piece(bias, third))
        return _Product(source, share, (node,))


def _with(share: Share, biases: list[Node]) -> Share:
    """``share`` and what else is added."""
    if not biases:
        return share
    if share.bias is not None or len(biases) > 1:
        raise _UnlikeError("several biases are added to a gate")
    return Share(share.weight, Piece(biases[0]))
