"""Slices of columns that a model cuts, and casts to ids, one by one.

    x[:, 0:1], x[:, 1:2], x[:, 2:7] ...      =>   split(x, [1, 1, 5 ...], 1)
    x[:, 0:1].long(), x[:, 1:2].long() ...   =>   split(x.long(), [1, 1 ...], 1)
    x[:, 0].long(), x[:, 1].long() ...       =>   unbind(x.long(), 1)

Models that are given one matrix of all features do so, as those of DeepCTR-Torch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from recast.rewriter import alias
from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Rule

from .leaf import plural, spec_of

LEAST = 4  # columns from which one call is faster
_CASTS = ("long", "int", "to", "type")


class Slice(NamedTuple):
    """``source[:, first:past]``, or ``source[:, first]`` if it drops the dimension."""

    source: Node
    first: int
    past: int
    drops: bool

    def of(self, start: int) -> tuple[Any, ...]:
        """Its key in ``source[:, start:]``."""
        first, past = self.first - start, self.past - start
        return slice(None), first if self.drops else slice(first, past)


def read(node: Any) -> Slice | None:
    """What ``node`` cuts from a matrix, within its width."""
    source: Any = None
    key: Any = None
    if is_call(node, operator.getitem):
        source, key = node.args
    spec = spec_of(source)
    if spec is None or len(spec.shape) != 2 or not isinstance(spec.shape[1], int):
        return None
    if not isinstance(key, tuple) or len(key) != 2 or key[0] != slice(None):
        return None
    width, at = spec.shape[1], key[1]
    if type(at) is int and 0 <= at < width:
        return Slice(source, at, at + 1, drops=True)
    if not isinstance(at, slice) or at.step not in (None, 1):
        return None
    first, past = 0 if at.start is None else at.start, at.stop
    if type(first) is not int or type(past) is not int or not 0 <= first < past <= width:
        return None
    return Slice(source, first, past, drops=False)


def _within(cuts: Sequence[Slice]) -> tuple[int, int]:
    """The first column that is cut, and the one behind the last."""
    return min(cut.first for cut in cuts), max(cut.past for cut in cuts)


def _cut(source: Node, build: Build, first: int, past: int) -> Node:
    """``source[:, first:past]``: of a wider matrix, too, no more than the model reads."""
    return build.call(operator.getitem, source, (slice(None), slice(first, past)))


def _dense(cuts: Sequence[Slice]) -> bool:
    """Whether most of the columns from the first to the last one are cut."""
    first, past = _within(cuts)
    return 2 * sum(cut.past - cut.first for cut in cuts) >= past - first


def _apart(cuts: Sequence[Slice]) -> bool:
    """Whether no two slices share a column."""
    ordered = sorted(cuts, key=lambda cut: cut.first)
    return all(one.past <= two.first for one, two in pairwise(ordered))


def _taken(whole: Node, start: int, cuts: Sequence[Slice], build: Build) -> list[Node]:
    """The ``cuts`` of ``whole``, whose first column is ``start``; in one call, where there is one
    for them.
    """
    if all(cut.drops for cut in cuts):
        columns = build.call(torch.unbind, whole, 1, name="columns")
        return [build.item(columns, cut.first - start) for cut in cuts]
    if any(cut.drops for cut in cuts) or not _apart(cuts):
        return [build.call(operator.getitem, whole, cut.of(start)) for cut in cuts]
    sizes: list[int] = []
    places: dict[Slice, int] = {}
    at = start
    for cut in sorted(cuts, key=lambda cut: cut.first):
        sizes += [cut.first - at] if cut.first > at else []  # columns between two slices
        places[cut] = len(sizes)
        sizes.append(cut.past - cut.first)
        at = cut.past
    columns = build.call(torch.split, whole, sizes, 1, name="columns")
    return [build.item(columns, places[cut]) for cut in cuts]


# ---------------------------------------------------------------- casts


class Cast(NamedTuple):
    """A cast to integers, which alone reads a slice."""

    node: Node
    cut: Slice
    dtype: torch.dtype


def _cast(node: Node) -> Cast | None:
    cut, user = read(node), sole_user(node)
    if cut is None or not is_method(user, *_CASTS) or user.args[0] is not node or user.kwargs:
        return None
    spec = spec_of(user)
    plain = all(isinstance(a, torch.dtype) for a in user.args[1:])
    if spec is None or spec.dtype not in (torch.int64, torch.int32) or not plain:
        return None
    return Cast(user, cut, spec.dtype)


def _match_casts(node: Node, root: nn.Module) -> Answer:
    first = _cast(node)
    if first is None or len(first.cut.source.users) < LEAST:
        return None
    hidden = alias.hidden(node.graph, root)
    found = {
        user: one
        for user in first.cut.source.users
        if (one := _cast(user)) is not None and one.dtype == first.dtype and one.node in hidden
    }
    casts = [*found.values()]
    if len(casts) < LEAST or next(iter(found)) is not node or not _dense([c.cut for c in casts]):
        return None
    outputs = [cast.node for cast in casts]
    return Match([*found, *outputs], outputs, casts)


def _rewrite_casts(match: Match, build: Build) -> list[Node]:
    casts: Sequence[Cast] = match.found
    cuts = [cast.cut for cast in casts]
    start, past = _within(cuts)
    source = _cut(cuts[0].source, build, start, past)
    whole = build.call(torch.Tensor.to, source, casts[0].dtype)
    return _taken(whole, start, cuts, build)


CASTS = Rule(
    name="split-columns",
    equation="x[:, 0].long(), x[:, 1].long() ... => unbind(x.long(), 1)",
    match=_match_casts,
    rewrite=_rewrite_casts,
    describe=lambda m: (
        f"{plural(len(m.found), 'cast')} of {m.found[0].cut.source.name} in one call"
    ),
)


# ---------------------------------------------------------------- slices


def _match_slices(node: Node, root: nn.Module) -> Answer:
    first = read(node)
    if first is None or first.drops or len(first.source.users) < LEAST:
        return None
    hidden = alias.hidden(node.graph, root)
    cuts = {
        user: one
        for user in first.source.users
        if (one := read(user)) is not None and not one.drops and user in hidden
    }
    found = [*cuts.values()]
    if len(found) < LEAST or next(iter(cuts)) is not node or not _dense(found):
        return None
    return Match([*cuts], [*cuts], found) if _apart(found) else None


def _rewrite_slices(match: Match, build: Build) -> list[Node]:
    cuts: Sequence[Slice] = match.found
    start, past = _within(cuts)
    return _taken(_cut(cuts[0].source, build, start, past), start, cuts, build)


SLICES = Rule(
    name="split-columns",
    equation="x[:, 0:1], x[:, 1:2], x[:, 2:7] ... => split(x, [1, 1, 5 ...], 1)",
    match=_match_slices,
    rewrite=_rewrite_slices,
    describe=lambda m: f"{plural(len(m.nodes), 'slice')} of columns in one call",
)
