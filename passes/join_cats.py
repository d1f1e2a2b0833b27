"""Concatenations of concatenations, as a loop writes them that appends one tensor at a time.

cat([cat([a, b], 1), c], 1)  =>  cat([a, b, c], 1)

A loop over 26 columns copies the first of them 25 times. One or two inside another stay: rows that
are looked up and concatenated by themselves are written side by side, which costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule, apply

from .leaf import argument, bytes_of, human, plural, rank

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_LEAST = 3  # inner ones


def _dim(node: Any) -> int | None:
    """Along which dimension ``node`` concatenates, counted from the front."""
    dims, dim = rank(node), argument(node, 1, "dim", 0) if is_call(node, torch.cat) else None
    return None if dims is None or not isinstance(dim, int) else dim % dims


def _match(node: Node, root: nn.Module) -> Answer:
    dim = _dim(node)
    if dim is None or _inside(sole_user(node), node, dim):
        return None  # the rule looks at the outermost one
    parts: list[Node] = []
    inner: list[Node] = []

    def take_apart(cat: Node) -> None:
        for part in argument(cat, 0, "tensors"):
            if isinstance(part, Node) and _inside(cat, part, dim):
                inner.append(part)
                take_apart(part)
            else:
                parts.append(part)

    take_apart(node)
    return Match([*inner, node], [node], (parts, dim)) if len(inner) >= _LEAST else None


def _inside(outer: Any, node: Node, dim: int) -> bool:
    """Whether ``node`` is a concatenation for ``outer`` alone, along the same dimension."""
    return _dim(outer) == dim == _dim(node) and sole_user(node) is outer


def _rewrite(match: Match, build: Build) -> list[Node]:
    parts, dim = match.found
    return [build.call(torch.cat, parts, dim)]


def _worth(match: Match) -> str | None:
    sizes = [bytes_of(node) for node in match.nodes[:-1]]
    known = [size for size in sizes if size is not None]
    return f"{human(2 * sum(known))} of traffic a sample" if len(known) == len(sizes) else None


CATS = Rule(
    name="join-cats",
    equation="cat([cat([a, b], 1), c], 1) => cat([a, b, c], 1)",
    match=_match,
    rewrite=_rewrite,
    describe=lambda m: f"{plural(len(m.nodes), 'cat')} of {len(m.found[0])} tensors in one call",
    worth=_worth,
)


@dataclass(frozen=True)
class JoinCats:
    """cat([cat([a, b], 1), c], 1) => cat([a, b, c], 1)

    Of three inner ones or more, which nothing else reads.
    """

    name: ClassVar[str] = "join-cats"

    def run(self, graph: Graph, context: Context) -> int:
        """Join the concatenations of ``graph``; returns how many remain of them."""
        return apply(graph, [CATS], context)
