"""The bag that pooled rows of a table become: which id it leaves out, and the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node
from recast.rewriter.rule import Build, Miss, resolve

from .embeddings import Lookup
from .leaf import Attr, put


def padding_of(lookup: Lookup, left_out: int | None, root: nn.Module) -> int | Miss | None:
    """The id that does not count, when a mask leaves out ``left_out``; None when all count."""
    held = lookup.padding_idx
    own = resolve(root, held.path) if isinstance(held, Attr) else held
    if isinstance(own, int) and own < 0:
        own += lookup.table.shape[0]
    if left_out is not None and 0 <= left_out < lookup.table.shape[0] and own in (None, left_out):
        return left_out
    if own is None:
        return None
    return Miss(
        lookup.node,
        f"row {own} of its table is read but not trained (padding_idx), and what is pooled may"
        " hold it",
        (f"mask it: (ids != {own})", "nn.EmbeddingBag, which leaves padding out"),
    )


def bag(
    build: Build, lookup: Lookup, ids: Any, weights: Node | None, mode: str, padding: int | None
) -> Node:
    """The pooled lookup of ``ids`` (bags, L) under ``weights`` (bags, L) of any dtype, or none."""
    weight = put(build, lookup.weight)
    if weights is not None:
        weights = build.call(torch.Tensor.type_as, weights, weight)
    return build.call(
        F.embedding_bag, ids, weight, mode=mode, sparse=lookup.sparse,
        per_sample_weights=weights, padding_idx=padding,
    )  # fmt: skip
