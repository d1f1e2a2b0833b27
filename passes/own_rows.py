"""For several ranks: which values of one rank are its rows of what one process computes for all.

The rows of a tower are, each made of the same row of the inputs. What is made of other rows of the
batch, of their places or of their number, is not: ``x - x.mean(0)``, ``x.flip(0)``, ``x / B``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch

from recast.rewriter.ir import Node, Spec, is_call, is_method, note

from .leaf import argument, spec_of
from .place_writes import writes_places
from .row_counts import (
    MAKERS,
    batch_dims,
    computes_with_rows,
    counts_places,
    keys_of,
    name_of,
    over_rows,
    rows_of,
)
from .row_order import reorders
from .row_sums import is_mean

# what makes rows of other rows, along a dimension that is told, and which one by default
ALONG: dict[str, int | None] = {
    "cumsum": None, "cumprod": None, "logcumsumexp": None, "cummax": None, "cummin": None,
    "flip": None, "softmax": None, "log_softmax": None, "sort": -1, "argsort": -1, "diff": -1,
    "roll": None, "topk": -1, "kthvalue": -1, "max": None, "min": None, "median": None,
    "normalize": 1, "softmin": None, "unfold": None, "_softmax": None, "_log_softmax": None,
    "gradient": None, "cumulative_trapezoid": -1,
    "fft_fft": -1, "fft_ifft": -1, "fft_rfft": -1, "fft_irfft": -1,
}  # fmt: skip
_AT = {"gradient": 9, "cumulative_trapezoid": 9}  # the place of ``dim``, else 1
_AT |= dict.fromkeys(("roll", "diff", "topk", "kthvalue", "normalize"), 2)
_AT |= dict.fromkeys(("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"), 2)
_ALONG_TWO = {
    "tril", "triu", "diag", "diagonal", "renorm", "rot90", "linalg_pinv", "pinverse", "linalg_qr",
    "linalg_svd", "svd", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2",
}  # fmt: skip
# what takes some of them
_PARTS = {"getitem", "pad", "narrow", "chunk", "split", "tensor_split", "unbind"}
_OF_ALL = {
    "unique", "bincount", "fliplr", "flipud", "msort", "combinations", "cartesian_prod", "kron",
}  # fmt: skip
# a mean of such values of all ranks is one of the means
_LINEAR = {
    "add", "sub", "neg", "mul", "truediv", "div", "iadd", "isub", "sum", "mean", "stack", "cat",
    "reshape", "view", "squeeze", "unsqueeze", "to", "float", "double", "type_as", "clone",
    "detach", "getitem", "output",
}  # fmt: skip


# ---------------------------------------------------------------- what is made of other rows


def why_not_own(x: Node, known: Collection[Node], left: Collection[Node]) -> str | None:
    """Why the rows of ``x`` are not those of one process; None if they are. ``known`` are as there,
    those ``left`` are not.
    """
    seen, queue = set[Node](), [x]
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in left:
            return "rows that each rank pairs by itself"
        if is_call(node, torch.arange, torch.eye) and batch_dims(node):
            return "a value that depends on the places of rows in the batch"
        if computes_with_rows(node) and not is_mean(node):
            return "a value that depends on the number of rows"
        if shifts_softmax(node):
            continue
        if over_rows(node) or (node not in known and of_other_rows(node)):
            return "a value over the batch"
        if node in known or name_of(node) in MAKERS:
            continue
        # What each sample finds by its place, as rows[arange(B), last], is its own.
        found = is_call(node, operator.getitem) and bool(batch_dims(node.args[0]))
        queue += [n for n in node.all_input_nodes if not (found and counts_places(n))]
    return None


def shifts_softmax(node: Node) -> bool:
    """Whether the number ``node`` changes nothing: ``softmax(x - x.max())``, which has no greater
    exponents so.
    """
    spec = spec_of(node)
    if spec is None or spec.shape or not node.users:
        return False
    return all(
        shifts_softmax(user)
        if is_method(user, "detach")
        else name_of(user) in ("sub", "isub")
        and user.args[1:] == (node,)
        and {name_of(one) for one in user.users} <= {"softmax", "log_softmax"}
        for user in node.users
    )


def _row_dims(node: Any) -> list[int]:
    spec = spec_of(node)
    return [] if spec is None else sorted(rows_of(spec))


def _has_rows(node: Node) -> bool:
    """Whether a tensor that ``node`` returns, or one of several, has as many rows as the batch."""
    spec = note(node).spec
    specs = spec if isinstance(spec, tuple) else (spec,)
    return any(isinstance(one, Spec) and bool(rows_of(one)) for one in specs)


def of_other_rows(node: Node) -> bool:
    """Whether a row of ``node`` is made of other rows of its inputs."""
    read = [n for n in node.all_input_nodes if _row_dims(n)]
    name = name_of(node).removesuffix("_")
    if not read:  # parameter[:B]
        part = name in ("getitem", "narrow", "cat", "concat") and bool(batch_dims(node))
        return part and any(spec_of(n) is not None for n in node.all_input_nodes)
    if name in _OF_ALL or writes_places(node) or reorders(node):
        return True
    if name in ALONG:
        return _along_rows(node, name)
    if name in _ALONG_TWO:
        return _along_two(node, name)
    if name == "isin":
        return bool(_row_dims(argument(node, 1, "test_elements")))
    if name == "embedding":
        return bool(_row_dims(argument(node, 1, "weight")))
    source = node.args[0] if node.args else None
    if source not in read:
        return False
    if name in _PARTS and not _has_rows(node):
        return True
    rows = _row_dims(source)[0]
    if is_call(node, operator.getitem):
        keys = keys_of(node.args[1])
        key = keys[rows] if len(keys) > rows and None not in keys and ... not in keys else None
        return isinstance(key, Node) and spec_of(key) is not None and not counts_places(key)
    if name in ("index_select", "gather", "take_along_dim"):
        dim = argument(node, 1 if name != "take_along_dim" else 2, "dim")
        return not isinstance(dim, int) or dim % len(spec_of(source).shape) == rows  # type: ignore[union-attr]
    return False


def told_dim(node: Node, name: str) -> Any:
    """The dimension, or several, along which ``node`` works, which is one of ``ALONG``."""
    return argument(
        node, _AT.get(name, 1), "dims" if name in ("flip", "roll") else "dim", ALONG[name]
    )


def _along_rows(node: Node, name: str) -> bool:
    source = argument(node, 0, "input")
    rows, spec = _row_dims(source), spec_of(source)
    dims = told_dim(node, name)
    if is_method(node, "flip"):
        dims = node.args[1:] if len(node.args) > 1 else dims
    if isinstance(dims, int):
        dims = [dims]
    if isinstance(dims, Node):  # torch.max(a, b)
        return False
    while isinstance(dims, (list, tuple)) and len(dims) == 1 and isinstance(dims[0], (list, tuple)):
        dims = dims[0]
    if spec is None or not isinstance(dims, (list, tuple)):
        return True
    return any(not isinstance(d, int) or d % len(spec.shape) in rows for d in dims)


def _along_two(node: Node, name: str) -> bool:
    """Whether ``node`` works along the rows by the places of another dimension; ``renorm`` along
    all but one.
    """
    source = argument(node, 0, "input")
    rows, spec = _row_dims(source), spec_of(source)
    if spec is None or len(spec.shape) == 1 or len(rows) != 1:
        return False  # it makes or reads pairs of rows
    rank = len(spec.shape)
    dims: tuple[Any, ...] = (rank - 2, rank - 1)
    if name == "diagonal":
        dims = argument(node, 2, "dim1", 0), argument(node, 3, "dim2", 1)
    elif name == "rot90":
        dims = tuple(argument(node, 2, "dims", (0, 1)))
    elif name == "renorm":
        kept = argument(node, 2, "dim")
        dims = tuple(d for d in range(rank) if not isinstance(kept, int) or d != kept % rank)
    return any(not isinstance(d, int) or d % rank in rows for d in dims)


# ---------------------------------------------------------------- what reads it


def why_not_mean(made: Node, of_all: bool = False) -> str | None:
    """Why what is computed of ``made``, of this rank's rows beside those of all, is not what one
    process computes: the mean over ranks of a value that is no mean. None if it is. ``of_all``: it
    is that of all ranks, so any function of it is.
    """
    spec = None if of_all else spec_of(made)
    scalar = spec is not None and not any(isinstance(size, str) for size in spec.shape)
    seen, queue = set[Node](), [made]
    while queue:
        node = queue.pop()
        for user in node.users:
            if computes_with_rows(user) and not is_mean(user):
                return "a value that depends on the number of rows"
            if scalar and not is_mean(user) and not _is_linear(user, node):
                return f"{name_of(user)} of a mean over the batch"
            if user not in seen:
                seen.add(user)
                queue.append(user)
    return None


def _is_linear(user: Node, of: Node) -> bool:
    name = name_of(user)
    if name not in _LINEAR or batch_dims(user):
        return False
    if name not in ("mul", "truediv", "div"):
        return True
    a, b = user.args if len(user.args) == 2 and not user.kwargs else (of, of)
    return (a is of or name == "mul") and not _of_inputs(b if a is of else a)


def _of_inputs(node: Any) -> bool:
    """Whether ``node`` depends on an input of the graph."""
    seen, queue = set[Node](), [node] if isinstance(node, Node) else []
    while queue:
        one = queue.pop()
        if one.op == "placeholder":
            return True
        queue += [n for n in one.all_input_nodes if n not in seen]
        seen.update(one.all_input_nodes)
    return False
