"""Takes stacked feature vectors apart again, so that an op can read them where they are.

stack([v_1, v_2 ...], 1)                   cat([v_1.unsqueeze(1), t ...], 1), nested ones too
cat([v_1, w ...], 1).view(B, F, D)         w holds several vectors side by side
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from recast.rewriter.ir import Node, is_call, sole_user
from recast.rewriter.rule import Build

from .leaf import argument, spec_of

Piece: TypeAlias = tuple[Node, int]  # (value, columns): 0 as it is, D: split its columns by D


def features(pieces: Iterable[Piece], build: Build) -> list[Node]:
    """The nodes to pass to an op: (B, D) or (B, f, D) each."""
    return [
        build.call(torch.unflatten, value, 1, (-1, columns)) if columns else value
        for value, columns in pieces
    ]


def pieces_of(stack: Node) -> tuple[tuple[Piece, ...], tuple[Node, ...]]:
    """``(pieces, nodes)``: what T is stacked from, and the nodes that stack it. T itself if its
    parts are not certain, or if T is used elsewhere and so exists anyway.
    """
    whole: tuple[tuple[Piece, ...], tuple[Node, ...]] = (((stack, 0),), ())
    unpacked = _unpack_view(stack) if is_call(stack, torch.reshape) else _unpack_cat(stack)
    if unpacked is None or not _one_dtype(stack, unpacked[0]):
        return whole
    return unpacked


def _one_dtype(stack: Node, pieces: Sequence[Piece]) -> bool:
    """Whether stacking promotes no part to another dtype, as far as is known."""
    specs = [spec_of(stack), *(spec_of(piece) for piece, _ in pieces)]
    return len({spec.dtype for spec in specs if spec is not None}) <= 1


def _unpack_cat(node: Node) -> tuple[tuple[Piece, ...], tuple[Node, ...]] | None:
    """Parts of a 3-D ``stack`` or ``cat`` along the features, nested ones too."""
    if is_call(node, torch.stack) and argument(node, 1, "dim", 0) in (1, -2):
        return tuple((n, 0) for n in argument(node, 0, "tensors")), (node,)
    if is_call(node, torch.unsqueeze) and argument(node, 1, "dim") in (1, -2):
        return ((argument(node, 0, "input"), 0),), (node,)
    if not is_call(node, torch.cat) or argument(node, 1, "dim", 0) not in (1, -2):
        return None
    pieces: list[Piece] = []
    nodes = [node]
    for part in argument(node, 0, "tensors"):
        inner = _unpack_cat(part) if sole_user(part) is node else None
        if inner is None:
            pieces.append((part, 0))
        else:
            pieces.extend(inner[0])
            nodes.extend(inner[1])
    return tuple(pieces), tuple(nodes)


def _unpack_view(view: Node) -> tuple[tuple[Piece, ...], tuple[Node, ...]] | None:
    """Parts of ``cat([(B, f1 D), (B, f2 D) ...], 1).view(B, F, D)``."""
    row = argument(view, 0, "input")
    spec, whole = spec_of(view), spec_of(row)
    if not is_call(row, torch.cat) or sole_user(row) is not view or spec is None or whole is None:
        return None
    if argument(row, 1, "dim", 0) not in (1, -1) or len(whole.shape) != 2:
        return None
    if len(spec.shape) != 3:
        return None
    _, count, width = spec.shape
    if not isinstance(count, int) or not isinstance(width, int) or count * width != whole.shape[1]:
        return None  # rows would not stay rows
    pieces: list[Piece] = []
    for part in argument(row, 0, "tensors"):
        known = spec_of(part)
        columns = known.shape[1] if known is not None and len(known.shape) == 2 else None
        if not isinstance(columns, int) or not width or columns % width:
            return None
        pieces.append((part, 0 if columns == width else width))
    return tuple(pieces), (view, row)
