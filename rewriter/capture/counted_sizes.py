"""Sizes that values decide: how many places of a mask are true.

``x[mask]`` has some number of rows in either example. That both have as many, or that all rows are
taken, says nothing of other batches: the size is not known, whatever it was. Nor may it differ
between ranks, whose graphs must be the same. (What Python asks of it: ``dynamic_sizes``.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from recast.rewriter.ir import Spec

Pairs = Mapping[fx.Node, tuple[Any, Any]]
_FINDERS = {"nonzero", "argwhere", "masked_select"}


def counted(node: fx.Node, spec: Any, pairs: Pairs, known: set[fx.Node]) -> Any:
    """``spec`` of ``node``, with the first size unknown if values decide it. ``known``: the nodes
    of which that was found, to which this one is added.
    """
    name = _name(node)
    finds = name in _FINDERS or node.target in (torch.unique, torch.unique_consecutive)
    if finds or (name == "where" and len(node.args) == 1) or _mask(node, name, pairs):
        known.add(node)
        return _unknown(spec)
    asks = name in ("getattr", "size")  # the device of such rows, say
    if node in known or asks or not isinstance(spec, Spec) or not spec.shape:
        return spec
    inside = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    read = [n for n in node.all_input_nodes if n in known and (n is node.args[0] or not inside)]
    own = _sizes(pairs[node])
    if any(own in (_sizes(pairs[n]), *map(_sizes, _entries(pairs[n]))) for n in read):
        known.add(node)
        return _unknown(spec)
    return spec


def masks_of(node: fx.Node, pairs: Pairs, known: set[fx.Node]) -> set[fx.Node] | None:
    """The masks of which ``node`` has a row for each place that is true; None if something else
    decides how many it has.
    """
    if node not in known:
        return None
    size, found, seen, queue = _sizes(pairs[node]), set[fx.Node](), {node}, [node]
    while queue:
        one = queue.pop()
        mask = _mask(one, _name(one), pairs)
        if mask is not None:
            found.add(mask)
            continue
        below = [n for n in one.all_input_nodes if n in known and _sizes(pairs[n]) == size]
        if not below:
            return None
        queue += [n for n in below if n not in seen]
        seen.update(below)
    return found


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _mask(node: fx.Node, name: str, pairs: Pairs) -> fx.Node | None:
    """The mask of the first dimensions, of ``x[mask]``."""
    if name != "getitem" or len(node.args) != 2:
        return None
    key = node.args[1][0] if isinstance(node.args[1], tuple) and node.args[1] else node.args[1]
    mask = pairs[key][0] if isinstance(key, fx.Node) else None
    tensor = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.dim() > 0
    return key if tensor and isinstance(key, fx.Node) else None


def _unknown(spec: Any) -> Any:
    if isinstance(spec, tuple):
        return tuple(map(_unknown, spec))
    if not isinstance(spec, Spec) or not spec.shape:
        return spec
    return replace(spec, shape=("n", *spec.shape[1:]))


def _entries(pair: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    """Those of a tuple, as ``torch.where`` gives."""
    both = all(isinstance(one, (tuple, list)) for one in pair)
    return list(zip(*pair, strict=False)) if both else []


def _sizes(pair: tuple[Any, Any]) -> tuple[int, ...]:
    """The first size in either example."""
    tensors = [one for one in pair if isinstance(one, torch.Tensor) and one.dim()]
    return tuple(one.shape[0] for one in tensors)
