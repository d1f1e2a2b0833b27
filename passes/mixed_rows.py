"""What a node does along the rows of the batch, and whether that is a loss.

A mean that is one number, and is only added up and scaled, is a loss: the mean over ranks is that
of one process. One that rows read (``w / w.mean()``) or a function (``mse.log()``) is not, nor is
any vector, nor a mean of some rows. A sum never is, but by their number: ``l.sum() / B``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recast.rewriter import order
from recast.rewriter.capture.opaque_calls import OpaqueCall
from recast.rewriter.ir import Node, Spec, is_call
from recast.rewriter.rule import resolve
from recast.runtime.ranks.batch_of_all import (
    all_positions,
    own_block,
    own_positions,
    sizes_of_all,
)
from recast.runtime.ranks.means_of_all import OF_ALL, counted_of_all

from .across_rows import across_rows
from .chosen_rows import OF_CLASSES, chooses, chosen, finds_rows
from .leaf import argument, extra, module_of, spec_of
from .own_rows import of_other_rows, shifts_softmax, why_not_mean
from .row_counts import (
    batch_dims,
    computes_with_rows,
    finds_places,
    makes_no_rows,
    name_of,
    only_finds,
    rows_of,
    takes_for_size,
)
from .row_sums import is_added, is_sum_by_rows, sums_products

_REDUCE = frozenset({
    "mean", "sum", "var", "std", "amax", "amin", "max", "min", "median", "prod", "logsumexp",
    "norm", "argmax", "argmin", "var_mean", "std_mean", "quantile", "nanmean", "nansum",
    "nanmedian", "count_nonzero",
})  # fmt: skip
_SUMS = {"nansum": "sum", "count_nonzero": "sum"}
_AT = {"norm": 2, "quantile": 2}  # the place of ``dim``, else 1
_OF: dict[Any, str] = {getattr(torch, name): name for name in _REDUCE if hasattr(torch, name)}

_KNOWN = frozenset({"mean", "sum"})  # they may be those of all ranks
_LAYERS = nn.CrossEntropyLoss, nn.NLLLoss
_KNOWN_OPERATORS = {None, "aten", "prims", "recast", "fbgemm", "torchvision"}
_PLACES = ("arange", "zeros", "new_zeros", "full", "zeros_like", "own_positions")


@dataclass(frozen=True, slots=True)
class Mixed:
    """What a node does along the rows of the batch. ``known``: it may be done along those of all
    ranks. ``loss``: it is one number, so nothing else is of other rows where it is not. ``sizes``:
    the call that tells of each rank how many rows count; None: all of the batch. ``variance``: the
    dimensions, the correction and ``keepdim`` of one.
    """

    what: str
    known: bool = False
    loss: bool = False
    sizes: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    variance: tuple[list[int], float, bool] | None = None


def mixed_rows(node: Node, root: nn.Module) -> Mixed | None:
    """What ``node`` does along the rows of the batch; None: nothing, or it is a loss."""
    if order.communicates(node):
        return Mixed(name_of(node))
    name, made = _name(node), spec_of(node)
    if node.users and all(is_call(user, *OF_ALL) for user in node.users):
        return None  # by SynchronisePairs
    if shifts_softmax(node):
        return None
    if node.users and all(takes_own(user, node) for user in node.users):
        return None
    if across_rows(node, root):
        layer = module_of(node, root)
        return Mixed(f"layer ({type(layer).__name__})" if layer is not None else name_of(node))
    if name is None and (of_other_rows(node) or finds_rows(node)):
        return None if chooses(node) else Mixed(name_of(node))
    if is_sum_by_rows(node):
        vector = made is not None and made.shape
        return Mixed("mean", known=True) if vector else _of_number(node, "mean")
    spec = spec_of(node.args[0]) if name is not None and node.args else None
    if name is None or spec is None or not spec.shape:
        return _of_function(node, made, root) or _kept_whole(node, root)
    dims = _dims(node, name, len(spec.shape))
    if chosen(node.args[0]) and dims is not None and 0 in dims:
        sizes = (sizes_of_all, (node.args[0], 0)) if name == "mean" else None
        return Mixed(name, name in _KNOWN, made is not None and not made.shape, sizes)
    if dims is None or not rows_of(spec) & {*dims}:
        return None
    if len(rows_of(spec)) > 1:  # which are the rows?
        one = name in _KNOWN and made is not None and not made.shape
        return None if one else Mixed(f"{name}, perhaps,")
    if name in _KNOWN and made is not None and not made.shape:
        return _of_number(node, name)
    variance = _variance(node, dims) if name in ("var", "std") else None
    return Mixed(name, known=name in _KNOWN or variance is not None, variance=variance)


def takes_own(user: Node, node: Node) -> bool:
    """Whether ``user`` takes what each rank has of ``node``: as a size, or by its own rows."""
    return _by_rows(user) or takes_for_size(user, node) or is_call(user, torch._assert)


def of_places(node: Node) -> bool:
    """Whether ``node`` depends on the places or the number of rows, which is a rank's own."""
    if is_call(node, torch.arange, torch.eye) and batch_dims(node):
        # as an index, or told among those of all
        known = own_positions, all_positions, own_block
        return not (all(is_call(user, *known) for user in node.users) or only_finds(node))
    if finds_places(node):
        return not only_finds(node)
    return computes_with_rows(node) and not is_sum_by_rows(node)


def _name(node: Node) -> str | None:
    if node.op == "call_method":
        name = str(node.target) if node.target in _REDUCE else None
    else:
        aten = name_of(node) if isinstance(node.target, torch._ops.OpOverload) else None
        name = aten if aten in _REDUCE else _OF.get(node.target)
    return None if name is None else _SUMS.get(name, name)


def _dims(node: Node, name: str, rank: int) -> list[int] | None:
    """The dimensions that ``node`` works along; None: not told by numbers."""
    told: Any = argument(node, _AT.get(name, 1), "dim", node.kwargs.get("axis"))
    if told is None:
        return [*range(rank)]
    dims = told if isinstance(told, (tuple, list)) else (told,)
    return [d % rank for d in dims] if all(type(d) is int for d in dims) else None


def _variance(node: Node, dims: list[int]) -> tuple[list[int], float, bool] | None:
    """The dimensions, the correction and ``keepdim`` of a variance; None: not told by name."""
    if extra(node, 2, "dim", "axis", "correction", "unbiased", "keepdim"):
        return None
    correction = node.kwargs.get("correction", node.kwargs.get("unbiased", 1))
    keepdim = node.kwargs.get("keepdim", False)
    if not isinstance(correction, (bool, int, float)) or not isinstance(keepdim, bool):
        return None
    return dims, float(correction), keepdim


def _of_number(node: Node, name: str) -> Mixed | None:
    """Of a mean or a sum that is one number."""
    if why_not_mean(node) is not None:
        return Mixed(name, known=True, loss=True)
    return None if name == "mean" else Mixed(name, loss=True)


def _of_function(node: Node, made: Spec | None, root: nn.Module) -> Mixed | None:
    if sums_products(node):
        vector = made is not None and made.shape
        return Mixed("sum", known=True) if vector else _of_number(node, "sum")
    few = bool(node.args) and chosen(node.args[0]) and made is not None and not made.shape
    if not few and not _over_rows(node):
        return None
    if made is None or made.shape:
        return Mixed(name_of(node))
    loss = resolve(root, str(node.target)) if node.op == "call_module" else None
    reduction = _option(node, "reduction", loss, root)
    if reduction == "mean" and (is_call(node, *OF_CLASSES) or isinstance(loss, _LAYERS)):
        return _of_classes(node, loss, root)
    if reduction in _KNOWN:
        by_number = Mixed("mean", True, True, (sizes_of_all, (node.args[0], 0)))
        return by_number if few and reduction == "mean" else _of_number(node, reduction)
    by_itself = (
        _has_rows(node.all_input_nodes[0]) and reduction is None and node.op != "call_module"
    )  # as dist: no mean
    if by_itself or why_not_mean(node) is not None:
        return Mixed(name_of(node), loss=True)
    return None


def _kept_whole(node: Node, root: nn.Module) -> Mixed | None:
    """Of what nobody looked into: a function or a layer of the user, an operator of others."""
    if not any(map(_has_rows, node.all_input_nodes)):
        return None
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        name, home = type(layer).__name__, type(layer).__module__
        known = not order.foreign(layer) or home.startswith("torch.nn.utils.")  # parametrized
    else:
        known, name = _operators(node.target) in _KNOWN_OPERATORS, name_of(node)
    return None if known else Mixed(f"call of {name}, kept whole, perhaps,", loss=True)


def _operators(target: Any) -> str | None:
    """The library of an operator; ``""`` of a function of the user, None of all else."""
    if isinstance(target, OpaqueCall):
        return ""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace
    packet = isinstance(target, torch._ops.OpOverloadPacket)
    return target._qualified_op_name.partition("::")[0] if packet else None


def _of_classes(node: Node, loss: Any, root: nn.Module) -> Mixed | None:
    """Of a mean over rows whose class counts."""
    target: Any = node.args[1] if loss is not None else _given(node, "target")
    spec = spec_of(target)
    weight = _option(node, "weight", loss, root) if loss is not None else _given(node, "weight")
    if is_call(node, torch.ops.recast.linear_cross_entropy.default):
        weight = None  # it is the layer's
    if (
        spec is None
        or spec.dtype.is_floating_point
        or (weight is None and name_of(target) in _PLACES)
    ):
        return _of_number(node, "mean")
    if loss is not None and weight is not None:
        return Mixed("mean", loss=True)
    ignored = loss.ignore_index if loss is not None else _given(node, "ignore_index")
    return Mixed("mean", known=True, loss=True, sizes=(counted_of_all, (target, ignored, weight)))


def _option(node: Node, name: str, loss: Any, root: nn.Module) -> Any:
    """The option ``name`` of a loss: of the layer, or as it is given to the function."""
    if loss is not None:
        return getattr(loss, name, None)
    given = _given(node, name)
    known = isinstance(given, Node) and given.op == "get_attr"
    return resolve(root, str(given.target)) if known else given


def _given(node: Node, name: str) -> Any:
    if not isinstance(node.target, torch._ops.OpOverload):
        at = {"input": 0, "target": 1}.get(name, len(node.args))
        return argument(node, at, name, _default(node.target, name))
    given = {one.name: (at, one) for at, one in enumerate(node.target._schema.arguments)}
    if name not in given:
        return None
    at, one = given[name]
    return argument(node, at, name, one.default_value if one.has_default_value() else None)


def _default(function: Any, name: str) -> Any:
    try:
        return inspect.signature(function).parameters[name].default
    except (KeyError, TypeError, ValueError):
        return None


def _by_rows(node: Node) -> bool:
    """Whether ``node`` divides a sum by the number of rows, or adds it up for what does."""
    if is_sum_by_rows(node):
        return True
    return is_added(node) and bool(node.users) and all(map(_by_rows, node.users))


def _over_rows(node: Node) -> bool:
    """Whether ``node`` is computed over the rows of the batch, or some of each sample."""
    return makes_no_rows(node) and any(map(_has_rows, node.all_input_nodes))


def _has_rows(node: Node) -> bool:
    spec = spec_of(node)
    return spec is not None and bool(rows_of(spec))
