"""Lookups that are concatenated: one call writes them where they belong.

``cat`` reads what the lookups have just written and writes it again, and its backward splits the
gradient into as many pieces. On a GPU the lookups can write straight into the joined matrix, and
the row updates read its gradient in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from recast.rewriter.ir import Graph, Node, is_call, items, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .leaf import argument, extra, human, on_gpu, plural, rank, spec_of
from .overlap import place_of

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_BAGS = torch.ops.recast.embedding_bags.default
_CAT = torch.ops.recast.embedding_cat.default


@dataclass(frozen=True, slots=True)
class Found:
    """A call of lookups and the cat that reads rows of it."""

    call: Node
    cat: Node
    order: tuple[int, ...]  # of each part the number of its lookup, or -1 - i
    others: tuple[Node, ...]


def _call_of(part: Any) -> Node | None:
    """The call of lookups that ``part`` is a result of."""
    if not isinstance(part, Node) or not part.args or not is_call(part.args[0], _BAGS):
        return None
    call = part.args[0]
    return call if part in {item for _, item in items(call)} else None


def _parts(cat: Node) -> list[Any]:
    """What ``cat`` joins along the columns; empty when it does anything else."""
    if extra(cat, 2, "tensors", "dim") or argument(cat, 1, "dim", 0) not in (1, -1):
        return []
    parts = argument(cat, 0, "tensors")
    matrices = isinstance(parts, (list, tuple)) and all(rank(part) == 2 for part in parts)
    return list(parts) if matrices else []


def _matcher(everywhere: bool) -> Callable[[Node, nn.Module], Answer]:
    def match(cat: Node, root: nn.Module) -> Answer:
        if not is_call(cat, torch.cat):
            return None
        parts = _parts(cat)
        call = next((c for c in map(_call_of, parts) if c is not None), None)
        if call is None:
            return None
        if not everywhere and not on_gpu(call, root):
            return None
        number = {item: int(key) for key, item in items(call)}
        for part in parts:
            if part in number and (sole_user(part) is not cat or parts.count(part) != 1):
                names = ", ".join(u.name for u in part.users)
                return Miss(part, f"its rows are read by {names}, not by one cat alone")
        beside = place_of(call, root)
        if not isinstance(beside, Miss):
            names = ", ".join(n.name for n in beside.beside)
            return Miss(call, f"apart from {cat.name}, its lookups can run beside {names}")
        others = tuple(dict.fromkeys(part for part in parts if part not in number))
        if len(others) + sum(part in number for part in parts) != len(parts):
            return Miss(cat, "it reads one tensor twice")
        order = tuple(number[p] if p in number else -1 - others.index(p) for p in parts)
        apart = [item for _, item in sorted(items(call), key=_key) if item not in parts]
        nodes = [call, *number, cat]
        return Match(nodes, [cat, *apart], Found(call, cat, order, others))

    return match


def _key(found: tuple[Any, Node]) -> int:
    return int(found[0])


def _rewrite(match: Match, build: Build) -> list[Node]:
    found: Found = match.found
    lookups = found.call.args[:9]
    made = build.call(_CAT, *lookups, list(found.others), list(found.order), name="embedding_cat")
    apart = match.outputs[1:]
    left = sorted(set(range(len(lookups[1]))) - set(found.order))  # type: ignore[arg-type]
    places = [1 + left.index(int(item.args[1])) for item in apart]  # type: ignore[arg-type]
    return [build.item(made, 0), *(build.item(made, place) for place in places)]


def _describe(match: Match) -> str:
    found: Found = match.found
    joined = sum(place >= 0 for place in found.order)
    beside = f", beside {plural(len(found.others), 'other tensor')}" if found.others else ""
    return f"{plural(joined, 'lookup')} written into the columns of {found.cat.name}{beside}"


def _worth(match: Match) -> str | None:
    """Bytes a sample: of what was looked up, ``cat`` wrote and read everything once more."""
    found: Found = match.found
    spec, parts = spec_of(found.cat), _parts(found.cat)
    looked_up = [part for part, at in zip(parts, found.order, strict=True) if at >= 0]
    widths = [spec_of(part).shape[1] for part in looked_up]  # type: ignore[union-attr]
    if spec is None or not all(isinstance(width, int) for width in widths):
        return None
    saved = 2 * sum(int(width) for width in widths) * spec.dtype.itemsize
    return f"{human(saved)} of traffic a sample"


@cache
def join_rule(everywhere: bool) -> Rule:
    """The rule for tables on a GPU only, or for all."""
    return Rule(
        name="join-lookups",
        equation="cat([*bags(ws, xs), y], 1) => embedding_cat(ws, xs, [y], order)[0]",
        match=_matcher(everywhere),
        rewrite=_rewrite,
        describe=_describe,
        worth=_worth,
    )


@dataclass(frozen=True)
class JoinLookups:
    """cat([*bags(ws, xs), y], 1) => embedding_cat(ws, xs, [y], order)[0]

    Where only one cat along the columns reads the rows of a call, with or without other matrices,
    and there is no work that could overlap with the lookups. Only for tables on a GPU, unless
    ``everywhere``: on a CPU the copy is cheap.
    """

    name: ClassVar[str] = "join-lookups"
    everywhere: bool = False

    def run(self, graph: Graph, context: Context) -> int:
        """Join the lookups of ``graph``; returns the number of calls."""
        return apply(graph, [join_rule(self.everywhere)], context)
