"""Masks of attention by hand, between the scores and their softmax.

scores.masked_fill(mask, c), torch.where(mask, scores, c)    a number in place of some scores; also
                                                             as full_like(scores, c)
scores + bias, scores - bias                                 floats that are added, as 0 and -10000
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch

from recast.rewriter.ir import Node, is_call, is_method
from recast.rewriter.rule import Build

from .leaf import argument, extra, rank, spec_of


@dataclass(frozen=True, slots=True)
class Masks:
    """``scores`` with a bias, then with places filled; None where there is no such mask."""

    scores: Node
    nodes: tuple[Node, ...] = ()  # those that apply the masks, the first one first
    bias: Node | None = None
    minus: bool = False  # the bias is subtracted
    filled: Node | None = None
    kept: bool = False  # `filled` is of the places that are not filled
    fill: float = 0.0


def read_masks(node: Node) -> Masks:
    """``node``, the input of a softmax, as masked scores; without a mask if it is none."""
    inner, filled, kept, fill, nodes = _filled(node) or (node, None, False, 0.0, [])
    scores, bias, minus = _biased(inner) or (inner, None, False)
    nodes = [inner, *nodes] if bias is not None else nodes
    return Masks(scores, tuple(nodes), bias, minus, filled, kept, fill)


def filled_in_place(node: Node) -> bool:
    """Whether ``node`` is ``scores.masked_fill_(..)``, and something else sees the scores: then no
    pass may take away the write.
    """
    return is_method(node, "masked_fill_") and _is_scores(node.args[0]) and not _alone(node)


def _alone(node: Node) -> bool:
    """Whether ``node`` writes to scores that are made for it, and that nothing else reads."""
    scores: Any = node.args[0]
    return _is_scores(scores) and set(scores.users) == {node}


def _filled(node: Node) -> tuple[Node, Node, bool, float, list[Node]] | None:
    """``(scores, mask, whether it is of the others, number, nodes)``."""
    in_place = is_method(node, "masked_fill_") and _alone(node)
    if in_place or is_call(node, torch.masked_fill) or is_method(node, "masked_fill"):
        if extra(node, 3, "input", "mask", "value"):
            return None
        source, mask, value = (
            argument(node, i, name) for i, name in enumerate(("input", "mask", "value"))
        )
        kept = False
    elif is_call(node, torch.where) and len(node.args) == 3 and not node.kwargs:
        mask, source, value = node.args
        kept = isinstance(source, Node) and _spread_number(source, value) is None
        source, value = (source, value) if kept else (value, source)
    else:
        return None
    spec = spec_of(mask)
    value, spread = _spread_number(value, source) or (value, ())
    number = type(value) in (int, float) and not math.isnan(value)
    if not number or spec is None or spec.dtype != torch.bool or not _keeps(node, source, mask):
        return None
    return source, mask, kept, float(value), [*spread, node]


def _spread_number(node: Any, scores: Any) -> tuple[float, tuple[Node, ...]] | None:
    """``(c, nodes)`` of ``full_like(scores, c)`` or ``ones_like(scores) * c``."""
    if is_call(node, torch.full_like) and not extra(node, 2, "input", "fill_value"):
        value = argument(node, 1, "fill_value")
        return (value, (node,)) if argument(node, 0, "input") is scores else None
    if not is_call(node, operator.mul):
        return None
    ones = next((a for a in node.args if is_call(a, torch.ones_like)), None)
    value = next((a for a in node.args if type(a) in (int, float)), None)
    alone = ones is not None and ones.args == (scores,) and not ones.kwargs
    return (value, (ones, node)) if alone and value is not None else None  # type: ignore[return-value]


def _biased(node: Node) -> tuple[Node, Node, bool] | None:
    """``(scores, bias, whether it is subtracted)``; of a sum, the scores are what is computed from
    more.
    """
    if not is_call(node, operator.add, operator.sub, operator.iadd, operator.isub):
        return None
    first: Any = node.args[0]
    second: Any = node.args[1]
    minus = node.target in (operator.sub, operator.isub)
    for scores, bias in ((first, second), (second, first))[: 1 if minus else 2]:
        spec, own = spec_of(bias), spec_of(node)
        alike = spec is not None and own is not None and spec.dtype == own.dtype
        if alike and _is_scores(scores) and _keeps(node, scores, bias):
            return scores, bias, minus
    return None


def _is_scores(node: Any) -> bool:
    """Whether ``node`` may be a scaled product of queries and keys."""
    while is_call(node, operator.mul, operator.imul, operator.truediv, operator.itruediv):
        node = next((a for a in node.args if isinstance(a, Node)), None)
    return is_call(node, torch.bmm, torch.matmul, operator.matmul, torch.einsum)


def _keeps(node: Node, scores: Any, mask: Any) -> bool:
    """Whether the mask broadcasts to the scores, and not they to it."""
    own, spec, other = spec_of(node), spec_of(scores), spec_of(mask)
    if own is None or spec is None or other is None:
        return False
    return (
        own.shape == spec.shape and own.dtype == spec.dtype and len(other.shape) <= len(own.shape)
    )


def write_masks(masks: Masks, flat: bool, build: Build) -> tuple[Node | None, Node | None]:
    """The bias and the mask of filled places for ``recast::field_attention``; ``flat``: of scores
    without heads.
    """

    def placed(mask: Node | None, change: Any) -> Node | None:
        if mask is None:
            return None
        whole = rank(mask) == 3 and flat
        mask = mask if change is None else build.call(change, mask)
        return build.call(torch.unsqueeze, mask, 1) if whole else mask

    bias = placed(masks.bias, operator.neg if masks.minus else None)
    return bias, placed(masks.filled, torch.logical_not if masks.kept else None)


__all__ = ["Masks", "filled_in_place", "read_masks", "write_masks"]
