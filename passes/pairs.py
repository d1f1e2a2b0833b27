"""Which entries of a (B, F, F) product a model keeps, in every way of saying it.

    Z[:, li, lj]                      index tensors, lists, tril_indices, rows of a buffer
    Z[:, mask]                        and masked_select(Z, mask).view(-1, P)
    Z.view(B, F * F)[:, index]        and index_select

Indices that are pure constants are folded; those that the model holds are read at each call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from recast.rewriter.ir import Node, is_call, is_method, sole_user
from recast.rewriter.rule import Miss

from .leaf import argument, spec_of, tensor_at

Index: TypeAlias = "torch.Tensor | Node"  # folded, or read at each call


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which entries of Z are kept: two index vectors, or a mask whose nonzeros are meant."""

    nodes: tuple[Node, ...]  # the gather, and the view behind it
    rows: Index | None = None
    columns: Index | None = None
    mask: Index | None = None


def read_pairs(product: Node, root: nn.Module) -> Pairs | Miss | None:
    """Which entries of ``product`` (B, F, F) the graph goes on with; None when not plain."""
    found = [pairs for user in product.users if (pairs := _read(user, product, root)) is not None]
    if len(found) > 1:
        names = ", ".join(u.name for u in product.users)
        return Miss(
            product,
            f"the products are used more than once ({names})",
            ("gather the pairs once and use the result twice",),
        )
    return found[0] if found else None


def _read(user: Node, product: Node, root: nn.Module) -> Pairs | Miss | None:
    """The pairs that one user keeps."""
    if is_call(user, operator.getitem):
        return _indexed(user, root)
    if is_call(user, torch.masked_select) or is_method(user, "masked_select"):
        return _masked(user, product, root)
    if is_call(user, torch.reshape, torch.flatten):
        return _flat(user, product, root)
    return None


def _indexed(node: Node, root: nn.Module) -> Pairs | Miss | None:
    """``Z[:, li, lj]`` or ``Z[:, mask]``."""
    key = node.args[1]
    if not isinstance(key, (tuple, list)) or not key or key[0] not in (slice(None), Ellipsis):
        return None
    if len(key) == 2:
        mask = constant_of(key[1], root)
        if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == 2:
            return Pairs((node,), mask=mask)
        held = key[1]
        if isinstance(held, Node) and _kind(held, root) == (torch.bool, 2):
            return Pairs((node,), mask=held)
        return None
    if len(key) != 3 or any(isinstance(k, (int, slice)) for k in key[1:]):
        return None
    indices: list[Index] = []
    for k in key[1:]:
        index = read_index(k, node, root)
        if not isinstance(index, (torch.Tensor, Node)):
            return index
        indices.append(index)
    return Pairs((node,), *indices)


def read_index(value: Any, node: Node, root: nn.Module) -> Index | Miss | None:
    """One index vector: folded when constant, else as it is when an int64 vector."""
    folded = constant_of(value, root)
    if folded is not None:
        integer = not folded.is_floating_point() and folded.dtype != torch.bool
        return folded.long() if integer and folded.dim() == 1 else None
    kind = _kind(value, root)
    if kind is None or kind[1] != 1 or kind[0] == torch.bool:
        return None
    if kind[0] != torch.int64:
        return Miss(
            node, f"its index vector has dtype {kind[0]}", ("keep the index buffers as int64",)
        )
    return value if isinstance(value, Node) else None


def _masked(select: Node, product: Node, root: nn.Module) -> Pairs | Miss | None:
    """``masked_select(Z, mask).view(-1, P)``: the pairs of the mask, row by row."""
    mask = argument(select, 1, "mask")
    view = sole_user(select)
    shape = spec_of(view)
    if view is None or not is_call(view, torch.reshape) or shape is None or len(shape.shape) != 2:
        return Miss(
            select,
            "masked_select gives a flat vector that is not shaped back to one row a sample",
            ("Z[:, li, lj] with li, lj = torch.triu_indices(F, F, 1)",),
        )
    whole = spec_of(product)
    known = constant_of(mask, root)
    if known is None:
        known = tensor_at(mask, root)
    if known is None or whole is None or known.dtype != torch.bool or known.dim() != 2:
        return None
    if shape.shape[1] != int(known.sum()) or known.shape != whole.shape[1:]:
        return None
    held: Index = mask if tensor_at(mask, root) is not None and not _own(mask) else known
    return Pairs((select, view), mask=held)


def _flat(view: Node, product: Node, root: nn.Module) -> Pairs | Miss | None:
    """``Z.view(B, F * F)[:, index]``, with an index that is constant."""
    gather = sole_user(view)
    whole, flat = spec_of(product), spec_of(view)
    if whole is None or flat is None or len(flat.shape) != 2:
        return None
    features = whole.shape[2]
    if not isinstance(features, int) or flat.shape[1] != features**2:
        return None
    if is_call(gather, torch.index_select) and argument(gather, 1, "dim") in (1, -1):
        key = argument(gather, 2, "index")
    elif is_call(gather, operator.getitem) and isinstance(gather.args[1], (tuple, list)):
        if len(gather.args[1]) != 2 or gather.args[1][0] != slice(None):
            return None
        key = gather.args[1][1]
    else:
        return Miss(view, "every pair is kept, so nothing is saved by not computing some")
    index = read_index(key, view, root) if not isinstance(key, slice) else None
    if not isinstance(index, torch.Tensor):
        return None
    rows = torch.div(index, features, rounding_mode="floor")
    return Pairs((view, gather), rows, index % features)


# ---------------------------------------------------------------- constants


def _kind(value: Any, root: nn.Module) -> tuple[torch.dtype, int] | None:
    """Dtype and number of dimensions of an index, where known."""
    held = tensor_at(value, root)
    if held is not None:
        return held.dtype, held.dim()
    spec = spec_of(value)
    if spec is not None:
        return spec.dtype, len(spec.shape)
    if is_call(value, operator.getitem) and isinstance(value.args[1], int):
        kind = _kind(value.args[0], root)
        return None if kind is None else (kind[0], kind[1] - 1)
    return None


def _own(node: Any) -> bool:
    """Whether a ``get_attr`` reads a constant that tracing made, which nobody can change."""
    name = str(node.target).rpartition(".")[2] if isinstance(node, Node) else ""
    return name.startswith("_tensor_constant") or "_recast_constants" in str(node.target)


_PURE = {
    torch.tensor, torch.as_tensor, torch.tril_indices, torch.triu_indices, torch.arange,
    torch.ones, torch.zeros, torch.full, torch.eye, torch.triu, torch.tril, torch.stack, torch.cat,
    torch.reshape, torch.flatten, torch.transpose, torch.unsqueeze, torch.combinations,
    torch.nonzero, torch.squeeze, operator.getitem, operator.add, operator.sub, operator.mul,
    operator.floordiv, operator.mod, operator.eq, operator.ne, operator.gt, operator.lt,
    operator.ge, operator.le, torch.ones_like, torch.zeros_like,
}  # fmt: skip
_PURE_METHODS = {
    "long",
    "int",
    "bool",
    "t",
    "triu",
    "tril",
    "nonzero",
    "unbind",
    "squeeze",
    "to",
    "cpu",
    "cuda",
}


def constant_of(value: Any, root: nn.Module) -> torch.Tensor | None:
    """The tensor that ``value`` always is, or None when it may change between calls."""
    try:
        held = _fold(value, root, 0)
    except _NotConstantError:
        return None
    if isinstance(held, (list, tuple, range)) and all(isinstance(k, int) for k in held):
        held = torch.tensor(list(held), dtype=torch.int64)
    return held if isinstance(held, torch.Tensor) and held.numel() else None


class _NotConstantError(Exception):
    """A value that may change between calls."""


def _fold(value: Any, root: nn.Module, depth: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_fold(v, root, depth) for v in value)
    if not isinstance(value, Node):
        return value
    if depth > 16:
        raise _NotConstantError
    if value.op == "get_attr" and _own(value):
        held = tensor_at(value, root)
        return held if held is None else held.detach().cpu()
    known = value.op == "call_function" and value.target in _PURE
    known = known or (value.op == "call_method" and value.target in _PURE_METHODS)
    if not known:
        raise _NotConstantError
    kwargs = {
        k: _fold(v, root, depth + 1)
        for k, v in value.kwargs.items()
        if k not in ("device", "pin_memory", "requires_grad", "non_blocking", "copy")
    }
    if is_method(value, "to", "cuda", "cpu"):
        return _fold_to(value, root, depth, kwargs)
    args = [_fold(a, root, depth + 1) for a in value.args]
    if value.op == "call_method":
        return getattr(args[0], str(value.target))(*args[1:], **kwargs)
    function: Callable[..., Any] = value.target  # type: ignore[assignment]
    with torch.no_grad():
        return function(*args, **kwargs)


def _fold_to(node: Node, root: nn.Module, depth: int, kwargs: dict[str, Any]) -> Any:
    """A cast of a constant; where it goes does not matter to an index."""
    if any(spec_of(a) is not None for a in node.args[1:]):
        raise _NotConstantError  # to the dtype of some tensor
    dtypes = [a for a in node.args[1:] if isinstance(a, torch.dtype)] + list(kwargs.values())
    held = _fold(node.args[0], root, depth + 1)
    return held.to(dtypes[0]) if dtypes else held
