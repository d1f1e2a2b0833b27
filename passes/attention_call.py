"""The call that an attention becomes, and where it is worth making."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recast.rewriter.ir import Node
from recast.rewriter.rule import Build, Match, Miss, resolve

from .leaf import Attr, Value, bytes_of, device_of, human, plural, put, rank

MOST = 128  # places, and elements of a head: for more, torch's own products are as fast
_DROPPED = 256  # places, on a CPU, if weights are dropped: 200 take half of torch's time


_WIDE = 64  # on a CPU, without dropout: of as many places, longer vectors gain nothing


def too_large(places: int, elements: int, p: Value, root: nn.Module) -> bool:
    """Whether torch's own products are as fast for heads of ``places`` with vectors of
    ``elements``, and a dropout of ``p``.
    """
    held = resolve(root, p.path) if isinstance(p, Attr) else p
    cpu = device_of(root) == "cpu"
    if elements > MOST or places > (_DROPPED if held and cpu else MOST):
        return True
    return cpu and not held and places >= _WIDE and elements > _WIDE


def masked_elsewhere(node: Node, root: nn.Module) -> Miss | None:
    """Why a masked attention is not fused on this model's device, or None when it is."""
    if device_of(root) == "cpu":
        return None
    return Miss(
        node, "its attention is masked, which is fused on a CPU only",
        ("field attention without a mask is fused",),
    )  # fmt: skip


def attention(
    q: Node, k: Node, v: Node, scale: float, p: Value, training: Value, weights: bool,
    build: Build, masks: Sequence[Any] = (),
) -> Node:  # fmt: skip
    """The call of the op on values of 4 dimensions; ``masks``: its arguments after ``weights``."""
    return build.call(
        torch.ops.recast.field_attention.default,
        q, k, v, scale, put(build, p), put(build, training), weights, *masks,
        name="field_attention",
    )  # fmt: skip


def worth(match: Match) -> str:
    launches = plural(max(len(match.nodes) - 1, 1), "launch")
    size = bytes_of(next((n for n in match.nodes if (rank(n) or 0) > 2), None))
    return launches if size is None else f"{launches}, {human(4 * size)} of traffic a sample"


__all__ = ["MOST", "attention", "masked_elsewhere", "too_large", "worth"]
