"""What writes rows of the batch by their places: ``x[0] = 0``, ``x.index_fill(0, index, 0)``."""

from __future__ import annotations

import operator
from typing import Any

import torch

from recast.rewriter.ir import Node, is_call

from .leaf import argument, spec_of
from .row_counts import (
    SQUEEZES,
    finds_places,
    keys_of,
    name_of,
    repeats_places,
    rows_of,
    size_name,
    starts_with_rows,
    takes_each,
)

_WRITES = {
    "index_fill", "index_copy", "index_add", "index_reduce", "scatter", "scatter_add",
    "scatter_reduce", "select_scatter", "slice_scatter",
}  # fmt: skip
_AT = {"select_scatter": 2, "slice_scatter": 2}  # the place of ``dim``, else 1
_INDEX = {"select_scatter": 3, "slice_scatter": 3}  # that of the index, else 2


def writes_places(node: Node) -> bool:
    """Whether ``node`` writes rows that are told by their places in the batch, not all of them, nor
    those of a mask.
    """
    source, name = argument(node, 0, "input"), name_of(node).removesuffix("_")
    spec = spec_of(source)
    if spec is None or len(rows_of(spec)) != 1:
        return False
    (rows,) = rows_of(spec)
    if is_call(node, operator.setitem):
        return not _of_all_rows(_key_along(keys_of(node.args[1]), rows, len(spec.shape)))
    if name not in _WRITES:
        return False
    dim = argument(node, _AT.get(name, 1), "dim", 0)
    along = not isinstance(dim, int) or dim % len(spec.shape) == rows
    return along and not _of_all_rows(argument(node, _INDEX.get(name, 2), "index"))


def found_by_mask(key: Any) -> bool:
    """Whether ``key`` is a mask of the rows, or the places where one is true."""
    while isinstance(key, Node):
        spec = spec_of(key)
        if spec is not None and spec.dtype is torch.bool:
            return starts_with_rows(key)
        if finds_places(key):
            return starts_with_rows(key.args[0])
        part = is_call(key, operator.getitem) and takes_each(key)
        if not part and name_of(key) not in SQUEEZES:
            return False
        key = key.args[0]
    return False


def _key_along(keys: tuple[Any, ...], dim: int, rank: int) -> Any:
    """Which of ``keys`` is for the dimension ``dim``."""
    known = [key for key in keys if key is not None]
    if ... in known:
        at = known.index(...)
        known[at : at + 1] = [slice(None)] * (rank - len(known) + 1)
    return known[dim] if dim < len(known) else slice(None)


def _of_all_rows(key: Any) -> bool:
    """Whether ``key`` is of all rows, or of those that a mask chooses."""
    if isinstance(key, slice):
        stop = key.stop
        whole = stop is None or (isinstance(stop, Node) and size_name(stop) == "B")
        return whole and key.start in (None, 0) and key.step in (None, 1)
    return found_by_mask(key) or repeats_places(key)
