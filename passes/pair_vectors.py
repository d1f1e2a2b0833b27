"""Which feature vectors an operand is made of, in every way of picking them.

    x[:, i]  x[:, i, :]  x[:, i:i+1]  x[:, i, j]  select(x, 1, i)
    split(x, 1, 1)[i]  unbind(x, 1)[i]  chunk(x, F, 1)[i]
    cat([v, w ...], 1)  stack([v, w ...], 1)  x[:, [0, 0, 1]]  index_select(x, 1, index)

with x (B, F, D) or (B, F, G, D), and a vector v (B, D) or (B, 1, D).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from recast.rewriter.ir import Node, is_call, is_method
from recast.rewriter.rule import Build, Miss

from .leaf import argument, rank, spec_of
from .pairs import Index, read_index
from .stacks import features, pieces_of

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Vector:
    """Vector ``index`` of ``source``, which holds vectors of one length."""

    source: Node
    index: int


@dataclass(frozen=True, slots=True)
class Side:
    """One operand of the products: vectors one by one, or all of one source by an index."""

    nodes: tuple[Node, ...]  # what picks them, outermost first
    vectors: tuple[Vector, ...] = ()
    source: Node | None = None
    index: Node | None = None  # read at each call


def count_of(source: Node) -> int | None:
    """How many vectors ``source`` holds: all dimensions but the first and the last."""
    spec = spec_of(source)
    if spec is None or len(spec.shape) < 2:
        return None
    inner = spec.shape[1:-1]
    return torch.Size(d for d in inner if isinstance(d, int)).numel() if _plain(inner) else None


def _plain(dims: Iterable[Any]) -> bool:
    return all(isinstance(d, int) for d in dims)


# ---------------------------------------------------------------- one vector


def vector(node: Node) -> tuple[Vector, tuple[Node, ...]] | None:
    """``(vector, nodes)``: the vector that ``node`` is, and the nodes that pick it."""
    spec = spec_of(node)
    if spec is None or len(spec.shape) not in (2, 3) or not spec.dtype.is_floating_point:
        return None
    if len(spec.shape) == 3 and spec.shape[1] != 1:
        return None
    return _picked(node) or (Vector(node, 0), ())


def _picked(node: Node) -> tuple[Vector, tuple[Node, ...]] | None:
    if is_call(node, operator.getitem):
        return _item(node)
    if is_call(node, torch.select) or is_method(node, "select"):
        source = argument(node, 0, "input")
        return _at(node, source, argument(node, 1, "dim"), argument(node, 2, "index"))
    if is_call(node, torch.unsqueeze, torch.squeeze):
        source = argument(node, 0, "input")
        inner = vector(source) if argument(node, 1, "dim") in (1, -2) else None
        return (inner[0], (node, *inner[1])) if inner is not None else None
    return None


def _at(node: Node, source: Any, dim: Any, index: Any) -> tuple[Vector, tuple[Node, ...]] | None:
    spec = spec_of(source)
    if spec is None or len(spec.shape) != 3 or dim not in (1, -2) or not isinstance(index, int):
        return None
    size = spec.shape[1]
    return (Vector(source, index % size), (node,)) if isinstance(size, int) else None


def _item(node: Node) -> tuple[Vector, tuple[Node, ...]] | None:
    source, key = node.args
    if isinstance(key, int):
        return _part(node)
    spec = spec_of(source)
    if not isinstance(key, tuple) or spec is None or not isinstance(source, Node):
        return None
    if not key or key[0] != _ALL or len(key) > len(spec.shape) or not _plain(spec.shape[1:]):
        return None
    dims = len(spec.shape)
    keys = [*key[1:], *[_ALL] * (dims - len(key))]
    if dims not in (3, 4) or keys[-1] != _ALL:
        return None
    places = [one_place(k, size) for k, size in zip(keys[:-1], spec.shape[1:-1], strict=True)]
    if None in places:
        return None
    flat = 0
    for place, size in zip(places, spec.shape[1:-1], strict=True):
        assert place is not None and isinstance(size, int)
        flat = flat * size + place
    return Vector(source, flat), (node,)


def one_place(key: Any, size: Any) -> int | None:
    """The one place that ``key`` picks out of ``size``."""
    if isinstance(key, int) and not isinstance(key, bool) and -size <= key < size:
        return int(key % size)
    if isinstance(key, slice) and all(k is None or isinstance(k, int)
                                      for k in (key.start, key.stop, key.step)):  # fmt: skip
        found = range(*key.indices(size))
        return found[0] if len(found) == 1 else None
    return None


def _part(node: Node) -> tuple[Vector, tuple[Node, ...]] | None:
    found = part(node)
    if found is None or found.dim != 1 or rank(found.source) != 3:
        return None
    return Vector(found.source, found.place), found.nodes


class Part(NamedTuple):
    """The slice of size 1 at ``place`` of dimension ``dim`` of ``source``."""

    source: Node
    dim: int
    place: int
    nodes: tuple[Node, ...]


def part(node: Any) -> Part | None:
    """``split(x, 1, d)[k]``, ``chunk(x, F, d)[k]``, ``unbind(x, d)[k]``"""
    parts, k = node.args if is_call(node, operator.getitem) else (None, None)
    if is_call(parts, torch.unbind) or is_method(parts, "unbind"):
        at = 1
    elif is_call(parts, torch.split, torch.chunk) or is_method(parts, "split", "chunk"):
        at = 2
    else:
        return None
    source = argument(parts, 0, "input", parts.kwargs.get("tensor"))
    dim, spec = argument(parts, at, "dim", 0), spec_of(source)
    if spec is None or type(dim) is not int or type(k) is not int:
        return None
    dim %= len(spec.shape)
    size = spec.shape[dim]
    if not isinstance(size, int):
        return None
    if at == 2:  # all parts before it hold one slice, too
        sizes = argument(parts, 1, "split_size_or_sections", parts.kwargs.get("split_size"))
        sizes = argument(parts, 1, "chunks", sizes)
        ones = sizes == 1 or (isinstance(sizes, (list, tuple)) and {*sizes} == {1})
        chunked = is_call(parts, torch.chunk) or is_method(parts, "chunk")
        if not (sizes == size if chunked else ones):
            return None
    return Part(source, dim, k % size, (node, parts))


# ---------------------------------------------------------------- an operand (B, P, D)


def side(node: Node, root: nn.Module) -> Side | Miss | None:
    """What an operand (B, P, D) of a product is gathered from; None when it is gathered."""
    if is_call(node, torch.cat, torch.stack) and argument(node, 1, "dim", 0) in (1, -2):
        return _listed(node)
    if is_call(node, torch.index_select) and argument(node, 1, "dim") in (1, -2):
        return _indexed(node, argument(node, 0, "input"), argument(node, 2, "index"), root)
    if is_call(node, operator.getitem):
        source, key = node.args
        if not isinstance(key, tuple) or len(key) not in (2, 3) or key[0] != _ALL:
            return None
        if key[2:] not in ((), (_ALL,)) or isinstance(key[1], (int, slice)):
            return None
        return _indexed(node, source, key[1], root)
    return None


def _listed(node: Node) -> Side | None:
    parts = argument(node, 0, "tensors")
    rank = 2 if node.target is torch.stack else 3
    vectors: list[Vector] = []
    nodes = [node]
    for part in parts if isinstance(parts, (list, tuple)) else ():
        spec = spec_of(part)
        if spec is None or len(spec.shape) != rank:
            return None
        found = vector(part)
        if found is None:
            count = count_of(part)
            if count is None:
                return None
            vectors.extend(Vector(part, k) for k in range(count))
        else:
            vectors.append(found[0])
            nodes.extend(found[1])
    return Side(tuple(dict.fromkeys(nodes)), tuple(vectors)) if vectors else None


def _indexed(node: Node, source: Any, key: Any, root: nn.Module) -> Side | Miss | None:
    spec = spec_of(source)
    if spec is None or len(spec.shape) != 3 or not isinstance(source, Node):
        return None
    index: Index | Miss | None = read_index(key, node, root)
    if index is None or isinstance(index, Miss):
        return index
    if isinstance(index, Node):
        return Side((node,), source=source, index=index)
    size = spec.shape[1]
    places = index.tolist()
    if not isinstance(size, int) or not all(-size <= k < size for k in places):
        return None
    return Side((node,), tuple(Vector(source, k % size) for k in places))


def itself(node: Node) -> Side | None:
    """The vectors of ``node`` (B, P, D), one after the other."""
    count = count_of(node)
    if count is None:
        return None
    return Side((), tuple(Vector(node, k) for k in range(count)))


def closed(core: Sequence[Node], optional: Sequence[Node]) -> set[Node]:
    """``core``, and those of ``optional`` that nobody else uses."""
    inside = {*core, *optional}
    while True:
        out = {n for n in inside.difference(core) if set(n.users) - inside}
        if not out:
            return inside
        inside -= out


# ---------------------------------------------------------------- to the op


@dataclass(frozen=True, slots=True)
class Operands:
    """The arguments ``left, right, li, lj`` of an op on pairs."""

    left: tuple[Node, ...]
    right: tuple[Node, ...]  # none: those of the left
    li: torch.Tensor | Node
    lj: torch.Tensor | Node


def operands(left: Side, right: Side) -> Operands:
    """The arguments for pairs of two sides; vectors that both have are handed over once."""
    if left.index is not None or right.index is not None:
        first, li = _whole(left)
        second, lj = _whole(right)
        return Operands(first, () if first == second else second, li, lj)
    first = tuple(dict.fromkeys(v.source for v in left.vectors))
    second = tuple(dict.fromkeys(v.source for v in right.vectors))
    if set(first) & set(second):
        first, second = tuple(dict.fromkeys([*first, *second])), ()
    return Operands(
        first, second, places_of(left.vectors, first), places_of(right.vectors, second or first)
    )


def _whole(one: Side) -> tuple[tuple[Node, ...], torch.Tensor | Node]:
    if one.source is not None and one.index is not None:
        return (one.source,), one.index
    sources = tuple(dict.fromkeys(v.source for v in one.vectors))
    return sources, places_of(one.vectors, sources)


def places_of(vectors: Sequence[Vector], sources: Sequence[Node]) -> torch.Tensor:
    """Where each vector is among those of ``sources``, stacked."""
    start: dict[Node, int] = {}
    total = 0
    for source in sources:
        start[source] = total
        total += count_of(source) or 1
    return torch.tensor([start[v.source] + v.index for v in vectors], dtype=torch.int64)


def given(found: Operands, inner: set[Node], build: Build) -> tuple[Any, ...]:
    """``left, right, li, lj`` as nodes of the call; stacks of its own are taken apart."""
    lists = [
        [node for source in sources for node in _feature(source, inner, build)]
        for sources in (found.left, found.right)
    ]
    indices = [
        index if isinstance(index, Node) else build.constant(index, hint)
        for index, hint in ((found.li, "rows"), (found.lj, "columns"))
    ]
    return (*lists, *indices)


def _feature(source: Node, inner: set[Node], build: Build) -> list[Node]:
    spec = spec_of(source)
    assert spec is not None
    if len(spec.shape) == 4:
        return [build.call(torch.flatten, source, 1, 2)]
    if source in inner:
        return features(pieces_of(source)[0], build)
    return [source]


def stacks(found: Operands, outside: Callable[[Node], bool]) -> list[Node]:
    """The nodes that only stack vectors for these pairs: the call reads the vectors themselves."""
    nodes: list[Node] = []
    for source in (*found.left, *found.right):
        spec = spec_of(source)
        if spec is None or len(spec.shape) != 3 or outside(source):
            continue
        pieces, inner = pieces_of(source)
        if inner and all(spec_of(piece) is not None for piece, _ in pieces):
            nodes.extend(inner)
    return nodes
