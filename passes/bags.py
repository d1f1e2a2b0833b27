"""The bag that pooled rows of a table become: which id it leaves out, and the call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node
from recast.rewriter.rule import Build, resolve
from recast.runtime.embedding.sum_of_rows import sum_of_rows

from .embeddings import Lookup
from .leaf import Attr, Value, put


class Padding(NamedTuple):
    """The padding_idx of a bag, which is left out, or ``counts``: it is summed and not trained."""

    row: Value
    counts: bool = False


def padding_of(lookup: Lookup, left_out: int | None, root: nn.Module) -> Padding:
    """The padding of a bag whose mask leaves out the id ``left_out``, or whose ids all count."""
    held = lookup.padding_idx
    own = resolve(root, held.path) if isinstance(held, Attr) else held
    if isinstance(own, int) and own < 0:
        own += lookup.table.shape[0]
    if left_out is not None and 0 <= left_out < lookup.table.shape[0] and own in (None, left_out):
        return Padding(left_out)
    return Padding(None) if own is None else Padding(held, counts=True)


def told_of(padding: Padding, mask: Node | None) -> str:
    """What the report says of the ids that do not count."""
    if not padding.counts and padding.row is not None:
        return f" without {padding.row}"
    return " under a mask" if mask is not None else ""


def bag(
    build: Build, lookup: Lookup, ids: Any, weights: Node | None, mode: str, padding: Padding
) -> Node:
    """The pooled lookup of ``ids`` (bags, L) under ``weights`` (bags, L) of any dtype, or none.

    Where the padding counts, ``mode`` is "sum".
    """
    weight = put(build, lookup.weight)
    if weights is not None:
        weights = build.call(torch.Tensor.type_as, weights, weight)
    index = put(build, padding.row)
    if padding.counts:
        return build.call(sum_of_rows, ids, weight, weights, index, lookup.sparse)
    return build.call(
        F.embedding_bag, ids, weight, mode=mode, sparse=lookup.sparse,
        per_sample_weights=weights, padding_idx=index,
    )  # fmt: skip
