"""Sums over the rows of the batch, and those by the number of rows: means by hand."""

from __future__ import annotations

import operator
from typing import Any

import torch

from recast.rewriter.ir import Node, Spec, is_call, is_method, note

from .leaf import Einsum, einsum_of, spec_of
from .row_counts import batch_dims, counts_rows, name_of, over_rows, rows_of, size_name

_PRODUCTS = (torch.matmul, torch.mm, operator.matmul, torch.mv, torch.dot, torch.inner)


def is_mean(node: Node) -> bool:
    """Whether ``node`` is ``x.sum() / B``, by which the mean over ranks is that over the batch."""
    spec = spec_of(node)
    return spec is not None and not spec.shape and is_sum_by_rows(node)


def is_sum_by_rows(node: Node) -> bool:
    """Whether ``node`` is a sum by the number of rows, or by a multiple: ``x.sum(0) / (2 * B)``; or
    several of them added: ``(x.sum() + 0.1 * y.sum()) / B``.
    """
    if len(node.args) != 2 or node.kwargs:
        return False
    a, b = node.args
    if is_call(node, operator.mul):  # (1 / B) * x.sum()
        return (_is_part_of_rows(b) and _is_summed(a)) or (_is_part_of_rows(a) and _is_summed(b))
    divided = is_call(node, operator.truediv, torch.div) or is_method(node, "div")
    return divided and _multiple_of_rows(b) and _is_summed(a)


def is_added(node: Node) -> bool:
    """Whether ``node`` adds sums over the batch, or scales one by a number that is told."""
    numbers = [n for n in node.args if isinstance(n, (int, float))]
    if node.kwargs or len(numbers) + len(node.all_input_nodes) != len(node.args):
        return False
    name = name_of(node)
    if name in ("add", "iadd", "sub"):
        return not any(numbers) and all(map(_is_summed, node.all_input_nodes))
    scaled = name in ("mul", "neg") or (name == "truediv" and isinstance(node.args[0], Node))
    return scaled and len(numbers) == len(node.args) - 1 and _is_summed(node.all_input_nodes[0])


def _is_summed(total: Any) -> bool:
    """Whether this is a sum over the batch, or several added."""
    if not isinstance(total, Node) or not isinstance(note(total).spec, Spec):
        return False
    if not over_rows(total):
        return is_added(total)
    summed = "sum" in (name_of(total), *total.args, total.kwargs.get("reduction"))
    return summed or sums_products(total)


def _is_part_of_rows(number: Any) -> bool:
    if not isinstance(number, Node) or not is_call(number, operator.truediv):
        return False
    return not isinstance(number.args[0], Node) and _multiple_of_rows(number.args[1])


def _multiple_of_rows(number: Any) -> bool:
    """Whether this is ``B``, or ``B`` by numbers that do not depend on it."""
    if not isinstance(number, Node):
        return False
    if is_call(number, operator.mul):
        a, b = number.args
        ours, other = (a, b) if counts_rows(a) else (b, a)
        return not counts_rows(other) and spec_of(other) is None and _multiple_of_rows(ours)
    if name_of(number) in ("numel", "nelement"):
        return len(batch_dims(number.args[0])) == 1
    return size_name(number) == "B"


def sums_products(node: Node) -> bool:
    """Whether this is a product that sums over the rows of the batch, each by itself: ``x.T @ y``,
    but not ``einsum("bd,cd->d", x, y)``, of a sum by another.
    """
    made = spec_of(node)
    if made is None or rows_of(made):
        return False
    specs = [spec for n in node.all_input_nodes if (spec := spec_of(n)) is not None]
    read = einsum_of(node)
    if is_call(node, torch.ops.recast.contraction.default):
        inputs, _, output = str(node.args[2]).partition("->")
        read = Einsum(inputs.split(","), output, [*node.args[:2]])
    if read is not None:
        pairs = zip(read.terms, map(spec_of, read.operands), strict=True)
        rows = {t[d] for t, spec in pairs if spec and "." not in t for d in rows_of(spec)}
        return len(rows) == 1
    product = is_call(node, *_PRODUCTS) or is_method(node, "matmul", "mm", "mv", "dot", "inner")
    return product and all(map(rows_of, specs))
