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

from .leaf import Einsum, argument, einsum_of, spec_of

# of vectors that count rows, what still does
_COUNTING = {"to", "long", "int", "float", "double", "unsqueeze", "type_as"}
# what takes the number of rows for a size of its result
_MAKERS = {
    "arange", "eye", "ones", "zeros", "full", "empty", "rand", "randn", "randint", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_tensor", "zeros_like", "ones_like", "full_like",
    "empty_like",
}  # fmt: skip
_SHAPED = {
    *_MAKERS, "view", "reshape", "expand", "expand_as", "broadcast_to", "repeat", "tile",
    "unflatten", "narrow", "split", "chunk", "getitem", "repeat_interleave", "getattr", "size",
}  # fmt: skip
_PRODUCTS = (torch.matmul, torch.mm, operator.matmul, torch.mv, torch.dot, torch.inner)
# what reads no values of some of its inputs
LIKE = {*_MAKERS, "to", "type_as", "view_as", "reshape_as", "getattr", "size", "setattr"}
# what makes rows of other rows, along a dimension that is told, and which one by default
ALONG: dict[str, int | None] = {
    "cumsum": None, "cumprod": None, "logcumsumexp": None, "cummax": None, "cummin": None,
    "flip": None, "softmax": None, "log_softmax": None, "sort": -1, "argsort": -1, "diff": -1,
    "roll": None, "topk": -1, "kthvalue": -1, "max": None, "min": None, "median": None,
    "normalize": 1, "softmin": None,
}  # fmt: skip
# what takes some of them
_PARTS = {"getitem", "narrow", "chunk", "split", "tensor_split", "unbind"}
_OF_ALL = {"unique", "bincount", "fliplr", "flipud", "msort"}
# a mean of such values of all ranks is one of the means
_LINEAR = {
    "add", "sub", "neg", "mul", "truediv", "div", "iadd", "isub", "sum", "mean", "stack", "cat",
    "reshape", "view", "squeeze", "unsqueeze", "to", "float", "double", "type_as", "clone",
    "detach", "getitem", "output",
}  # fmt: skip


def batch_dims(node: Any) -> list[int]:
    """The dimensions of the batch; where it is a multiple of it, there are none that we know."""
    spec = spec_of(node)
    return [] if spec is None else [d for d, size in enumerate(spec.shape) if size == "B"]


def name_of(node: Node) -> str:
    """``"sum"``, of the function as of the method."""
    return str(getattr(node.target, "__name__", node.target))


# ---------------------------------------------------------------- places


def counts_places(x: Any) -> bool:
    """Whether ``x`` counts the rows of the batch: ``arange(B)``, cast or with more dimensions."""
    while isinstance(x, Node) and len(batch_dims(x)) == 1:
        if is_call(x, torch.arange):
            return len(x.args) == 1 or x.args[:1] + x.args[2:] in ((0,), (0, 1))
        if not (is_method(x, *_COUNTING) or is_call(x, torch.unsqueeze, operator.getitem)):
            return False
        if is_call(x, operator.getitem) and not _only_adds_dimensions(x.args[1]):
            return False
        x = x.args[0]
    return False


def _only_adds_dimensions(key: Any) -> bool:
    return all(one is None or one == slice(None) for one in _keys(key))


def _keys(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


# ---------------------------------------------------------------- the number of rows


def counts_rows(node: Any) -> bool:
    """Whether ``node`` is a number that depends on how many rows the batch has, or made of it."""
    if not isinstance(node, Node) or node.op in ("placeholder", "get_attr"):
        return False
    size, spec = _size(node), note(node).spec
    if size is not None:
        return size.endswith("B")
    if name_of(node) in ("numel", "nelement", "len"):
        return bool(batch_dims(node.args[0]))
    if isinstance(spec, Spec) and (name_of(node) in _MAKERS or batch_dims(node)):
        return False
    if isinstance(spec, tuple) and any(isinstance(one, Spec) for one in spec):
        return False
    numbers = [n for n in node.all_input_nodes if not batch_dims(n)]
    if isinstance(spec, Spec):  # as torch.tensor(B) is
        return bool(numbers) and all(map(counts_rows, node.all_input_nodes))
    return any(map(counts_rows, numbers))


def _size(node: Any) -> str | None:
    """Which of the sizes of a tensor ``node`` is, as in its spec; None if it is none."""
    source, dim = (*node.args, None, None)[:2]
    if is_call(node, operator.getitem) and isinstance(source, Node):
        if not (is_call(source, getattr) or is_method(source, "size")):
            return None
        source = source.args[0]
    elif not is_method(node, "size"):
        return None
    spec = spec_of(source)
    return str(spec.shape[dim]) if spec is not None and isinstance(dim, int) else None


def computes_with_rows(node: Node) -> bool:
    """Whether ``node`` computes a tensor with their number, as ``x / B``; ``x.view(B, -1)`` does
    not.
    """
    if not isinstance(note(node).spec, Spec) or name_of(node) in _SHAPED:
        return False
    return any(map(counts_rows, node.all_input_nodes))


def takes_for_size(user: Node, number: Node) -> bool:
    """Whether ``user`` makes a tensor as large as ``number`` says: ``arange(mask.sum())``."""
    name = name_of(user)
    if name not in _SHAPED or name in LIKE - _MAKERS or name.endswith("_like"):
        tensor = isinstance(note(user).spec, Spec) or user.op == "output"
        return not tensor and any(takes_for_size(one, user) for one in user.users)  # .item()
    made_of = name not in _MAKERS and not (name == "repeat_interleave" and len(user.args) == 1)
    return not (made_of and user.args[:1] == (number,))


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
    return _size(number) == "B"


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
        if over_rows(node) or (node not in known and of_other_rows(node)):
            return "a value over the batch"
        if node in known or name_of(node) in _MAKERS:
            continue
        # What each sample finds by its place, as rows[arange(B), last], is its own.
        found = is_call(node, operator.getitem) and bool(batch_dims(node.args[0]))
        queue += [n for n in node.all_input_nodes if not (found and counts_places(n))]
    return None


def over_rows(node: Node) -> bool:
    """Whether ``node`` is computed over the rows of the batch, as ``x.mean(0)`` and ``x[0]``."""
    return makes_no_rows(node) and any(map(batch_dims, node.all_input_nodes))


def makes_no_rows(node: Node) -> bool:
    """Whether ``node`` makes a tensor, or several, of sizes that do not depend on the batch."""
    source = node.args[0] if is_call(node, operator.setitem) else node
    spec = note(source).spec if isinstance(source, Node) else None
    specs = spec if isinstance(spec, tuple) else (spec,)
    if name_of(node) in LIKE or not any(isinstance(one, Spec) for one in specs):
        return False
    sizes = (n for one in specs if isinstance(one, Spec) for n in one.shape)
    return not any(isinstance(n, str) for n in sizes)


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


def rows_of(spec: Spec) -> set[int]:
    """The dimensions that count rows of the batch, or some for each."""
    return {d for d, size in enumerate(spec.shape) if str(size).endswith("B")}


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
    name = name_of(node)
    if not read:  # parameter[:B]
        part = name in ("getitem", "narrow", "cat", "concat") and bool(batch_dims(node))
        return part and any(spec_of(n) is not None for n in node.all_input_nodes)
    if name in _OF_ALL:
        return True
    if name in ALONG:
        return _along_rows(node, name)
    if name == "embedding":
        return bool(_row_dims(argument(node, 1, "weight")))
    source = node.args[0] if node.args else None
    if source not in read:
        return False
    if name in _PARTS and not _has_rows(node):
        return True
    rows = _row_dims(source)[0]
    if is_call(node, operator.getitem):
        keys = _keys(node.args[1])
        key = keys[rows] if len(keys) > rows and None not in keys and ... not in keys else None
        return isinstance(key, Node) and spec_of(key) is not None and not counts_places(key)
    if name in ("index_select", "gather", "take_along_dim"):
        dim = argument(node, 1 if name != "take_along_dim" else 2, "dim")
        return not isinstance(dim, int) or dim % len(spec_of(source).shape) == rows  # type: ignore[union-attr]
    return False


def _along_rows(node: Node, name: str) -> bool:
    source = argument(node, 0, "input")
    rows, spec = _row_dims(source), spec_of(source)
    index = 2 if name in ("roll", "diff", "topk", "kthvalue", "normalize") else 1
    dims = argument(node, index, "dims" if name in ("flip", "roll") else "dim", ALONG[name])
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
