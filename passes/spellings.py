"""Which calls have other spellings, and the form of each: the tables of :mod:`.normalize`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import Node

from . import shape_forms as shapes
from .form import Form, Reader, call
from .leaf import argument, arguments, extra, rank, spec_of

# ---------------------------------------------------------------- one argument


def _unary(function: Callable[..., Any]) -> Reader:
    """``f(x)`` in any spelling; None when it works in place or has more arguments."""

    def read(node: Node) -> Form | None:
        source = argument(node, 0, "input")
        inplace = argument(node, 1, "inplace", False)
        if extra(node, 2, "input", "inplace") or inplace is not False:
            return None
        return call(function, source)

    return read


def _binary(function: Callable[..., Any]) -> Reader:
    """``f(a, b)`` without alpha, out or rounding."""

    def read(node: Node) -> Form | None:
        if extra(node, 2, "input", "other", "mat2", "tensor2"):
            return None
        names = [k for k in ("other", "mat2", "tensor2") if k in node.kwargs]
        first = argument(node, 0, "input")
        second = argument(node, 1, names[0] if names else "other")
        return None if first is None or second is None else call(function, first, second)

    return read


def _matmul(node: Node) -> Form | None:
    """``a @ b``; bmm where both are known to be batches of matrices of one size."""
    form = _binary(torch.matmul)(node)
    if form is None:
        return None
    a, b = (spec_of(x) for x in form.args)
    if a is None or b is None or len(a.shape) != 3 or len(b.shape) != 3:
        return form
    same = a.shape[0] == b.shape[0] and a.shape[0] != "n"
    return call(torch.bmm, *form.args) if same else form


# ---------------------------------------------------------------- lists of tensors


def _listed(function: Callable[..., Any]) -> Reader:
    """``cat`` and ``stack``: a list of tensors and a dimension, both by position."""

    def read(node: Node) -> Form | None:
        tensors = argument(node, 0, "tensors")
        if not isinstance(tensors, (list, tuple)) or extra(node, 2, "tensors", "dim", "axis"):
            return None
        dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
        return call(function, tensors, dim) if isinstance(dim, int) else None

    return read


def _hstack(node: Node) -> Form | None:
    """``hstack`` of matrices or more joins along dimension 1, of vectors along 0."""
    tensors = argument(node, 0, "tensors")
    if not isinstance(tensors, (list, tuple)) or extra(node, 1, "tensors"):
        return None
    ranks = {rank(t) for t in tensors}
    if len(ranks) != 1 or None in ranks:
        return None
    only = ranks.pop()
    return call(torch.cat, list(tensors), 0 if only == 1 else 1) if only else None


# ---------------------------------------------------------------- dtypes

_CASTS = {torch.int64: "long", torch.int32: "int", torch.float32: "float"}


def _cast(node: Node) -> Form | None:
    """``x.to(torch.int64)``, ``x.type(torch.int64)``: ``x.long()``."""
    dtype = argument(node, 1, "dtype")
    named = _CASTS.get(dtype) if isinstance(dtype, torch.dtype) else None
    return None if named is None or extra(node, 2, "dtype") else call(named, node.args[0])


def _where(node: Node) -> Form | None:
    """``x.where(condition, other)``"""
    condition, other = argument(node, 1, "condition"), argument(node, 2, "other")
    if condition is None or other is None or extra(node, 3, "condition", "other"):
        return None
    return call(torch.where, condition, node.args[0], other)


# ---------------------------------------------------------------- dropout, embedding


def _dropout(node: Node) -> Form | None:
    """``F.dropout`` with p and its flag by name; None when it works in place."""
    flag = "train" if node.target is torch.dropout else "training"
    if extra(node, 4, "input", "p", flag, "inplace"):
        return None
    source, p, training, inplace = arguments(
        node, (("input", None), ("p", 0.5), (flag, True), ("inplace", False))
    )
    return call(F.dropout, source, p=p, training=training) if inplace is False else None


_EMBEDDING = (
    ("weight", None), ("indices", None), ("padding_idx", -1), ("scale_grad_by_freq", False),
    ("sparse", False),
)  # fmt: skip


def _embedding(node: Node) -> Form | None:
    """``torch.embedding(weight, ids)``: the same call in the order of ``F.embedding``."""
    if extra(node, 5, *dict(_EMBEDDING)):
        return None
    weight, ids, padding, scale, sparse = arguments(node, _EMBEDDING)
    if not isinstance(padding, int):
        return None
    padding_idx = None if padding < 0 else padding
    return call(F.embedding, ids, weight, padding_idx, None, 2.0, scale, sparse)


# ---------------------------------------------------------------- the tables

FUNCTIONS: Mapping[Callable[..., Any], Reader] = {
    F.relu: _unary(torch.relu),
    F.sigmoid: _unary(torch.sigmoid),
    torch.special.expit: _unary(torch.sigmoid),
    F.tanh: _unary(torch.tanh),
    torch.add: _binary(operator.add),
    torch.sub: _binary(operator.sub),
    torch.subtract: _binary(operator.sub),
    torch.mul: _binary(operator.mul),
    torch.multiply: _binary(operator.mul),
    torch.div: _binary(operator.truediv),
    torch.true_divide: _binary(operator.truediv),
    torch.matmul: _matmul,
    operator.matmul: _matmul,
    torch.cat: _listed(torch.cat),
    torch.concat: _listed(torch.cat),
    torch.concatenate: _listed(torch.cat),
    torch.stack: _listed(torch.stack),
    torch.hstack: _hstack,
    torch.transpose: shapes.transpose,
    torch.swapaxes: shapes.transpose,
    torch.swapdims: shapes.transpose,
    torch.permute: shapes.permute,
    torch.t: shapes.t,
    torch.reshape: shapes.reshape,
    torch.flatten: shapes.flatten,
    torch.unsqueeze: shapes.along(torch.unsqueeze),
    torch.squeeze: shapes.along(torch.squeeze),
    operator.getitem: shapes.item,
    getattr: shapes.attribute,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.embedding: _embedding,
}
METHODS: Mapping[str, Reader] = {
    "relu": _unary(torch.relu),
    "sigmoid": _unary(torch.sigmoid),
    "tanh": _unary(torch.tanh),
    "add": _binary(operator.add),
    "sub": _binary(operator.sub),
    "mul": _binary(operator.mul),
    "multiply": _binary(operator.mul),
    "div": _binary(operator.truediv),
    "matmul": _matmul,
    "__matmul__": _matmul,
    "bmm": _binary(torch.bmm),
    "transpose": shapes.transpose,
    "swapaxes": shapes.transpose,
    "swapdims": shapes.transpose,
    "permute": shapes.permute,
    "t": shapes.t,
    "view": shapes.reshape,
    "reshape": shapes.reshape,
    "flatten": shapes.flatten,
    "unsqueeze": shapes.along(torch.unsqueeze),
    "squeeze": shapes.along(torch.squeeze),
    "size": shapes.size,
    "to": _cast,
    "type": _cast,
    "where": _where,
}
MODULES: Mapping[type[nn.Module], Callable[[Any, Any], Form | None]] = {
    nn.ReLU: lambda x, m: call(torch.relu, x) if not m.inplace else None,
    nn.Sigmoid: lambda x, m: call(torch.sigmoid, x),
    nn.Tanh: lambda x, m: call(torch.tanh, x),
    nn.Flatten: lambda x, m: shapes.flattened(x, m.start_dim, m.end_dim),
}
