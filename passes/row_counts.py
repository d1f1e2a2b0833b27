"""Which dimensions count the rows of the batch, and what counts them: ``arange(B)``, ``len(x)``."""

from __future__ import annotations

import operator
from typing import Any

import torch

from recast.rewriter.ir import Node, Spec, is_call, is_method, note

from .leaf import argument, spec_of

# of vectors that count rows, what still does
_COUNTING = {"to", "long", "int", "float", "double", "unsqueeze", "type_as"}
SQUEEZES = {"squeeze", "flatten", "unbind"}  # of a column of places
_REPEATS = {"repeat_interleave", "repeat", "expand", "reshape", "view", "flatten"}
_BY_INDEX = {"index_select", "index_add", "index_copy", "index_fill", "gather", "scatter_add"}
# what takes the number of rows for a size of its result
MAKERS = {
    "arange", "eye", "ones", "zeros", "full", "empty", "rand", "randn", "randint", "new_zeros",
    "new_ones", "new_empty", "new_full", "zeros_like", "ones_like", "full_like", "empty_like",
}  # fmt: skip
_SHAPED = {
    *MAKERS, "view", "reshape", "expand", "expand_as", "broadcast_to", "repeat", "tile",
    "unflatten", "narrow", "split", "chunk", "getitem", "repeat_interleave", "getattr", "size",
}  # fmt: skip
_FILLS = {"full": 1, "full_like": 1, "new_full": 2}  # the place of their value
# what reads no values of some of its inputs
LIKE = {
    *MAKERS, "new_tensor", "to", "type_as", "view_as", "reshape_as", "getattr", "size", "setattr",
}  # fmt: skip


# ---------------------------------------------------------------- dimensions


def batch_dims(node: Any) -> list[int]:
    """The dimensions of the batch; where it is a multiple of it, there are none that we know."""
    spec = spec_of(node)
    return [] if spec is None else [d for d, size in enumerate(spec.shape) if size == "B"]


def name_of(node: Node) -> str:
    """``"sum"``, of the function as of the method, and of torch's own operator."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return node.target.overloadpacket.__name__
    return str(getattr(node.target, "__name__", node.target))


def rows_of(spec: Spec) -> set[int]:
    """The dimensions that count rows of the batch, or some for each."""
    return {d for d, size in enumerate(spec.shape) if str(size).endswith("B")}


def starts_with_rows(x: Any) -> bool:
    """Whether the first dimension of ``x`` counts rows of the batch, or some for each."""
    spec = spec_of(x)
    return spec is not None and 0 in rows_of(spec)


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


def repeats_places(x: Any) -> bool:
    """Whether ``x`` is ``arange(B)``, perhaps several times: places as they are in any batch."""
    while isinstance(x, Node):
        if is_call(x, torch.arange):
            return bool(batch_dims(x))
        adds = is_call(x, operator.getitem) and _only_adds_dimensions(x.args[1])
        if not (adds or name_of(x) in _COUNTING | _REPEATS):
            return False
        x = x.args[0]
    return False


def _only_adds_dimensions(key: Any) -> bool:
    return all(one is None or one == slice(None) for one in keys_of(key))


def finds_places(node: Node) -> bool:
    """Whether ``node`` returns the places where a mask of the rows is true."""
    found = name_of(node) in ("where", "nonzero", "argwhere") and len(node.args) == 1
    spec = spec_of(node.args[0]) if found else None
    return spec is not None and bool(rows_of(spec))


def only_finds(places: Node) -> bool:
    """Whether ``places``, which count the rows of the batch, or some of them, say nothing but which
    row is meant, as in ``rows[arange(B), last]``.
    """
    return bool(places.users) and all(_finds(user, places) for user in places.users)


def _finds(user: Node, places: Node) -> bool:
    name, args = name_of(user), user.args
    if name in ("getitem", "setitem", "index_put", "index_put_") and args[0] is not places:
        dim = next((d for d, key in enumerate(keys_of(args[1])) if key is places), None)
        spec = spec_of(args[0])
        return spec is not None and dim in rows_of(spec) and not any(a is places for a in args[2:])
    if name.removesuffix("_") in _BY_INDEX:
        by = len(args) > 2 and args[2] is places and args[1] in (0,)
        return by and starts_with_rows(args[0])
    if args[:1] != (places,):
        return False
    if is_call(user, operator.getitem):
        if finds_places(places) and spec_of(places) is None and args[1] not in _mask_rows(places):
            return all(_is_key(one, user) for one in user.users)  # of ``i, j = where(mask)`` j
        return takes_each(user) and (only_finds(user) or not user.users)
    return name in SQUEEZES | _COUNTING | _REPEATS and only_finds(user)


def _is_key(user: Node, key: Node) -> bool:
    known = name_of(user) in ("getitem", "setitem", "index_put", "index_put_")
    return known and any(one is key for one in keys_of(user.args[1])) and user.args[0] is not key


def _mask_rows(places: Node) -> set[int]:
    spec = spec_of(places.args[0])
    return set() if spec is None else rows_of(spec)


def takes_each(node: Node) -> bool:
    """Whether ``x[key]`` is a part of each row, ``x[:, 0]``, or one of several tensors."""
    first: object = keys_of(node.args[1])[0]
    return first is None or first is ... or first == slice(None) or spec_of(node.args[0]) is None


def keys_of(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


# ---------------------------------------------------------------- the number of rows


def counts_rows(node: Any) -> bool:
    """Whether ``node`` is a number that depends on how many rows the batch has, or made of it."""
    if not isinstance(node, Node) or node.op in ("placeholder", "get_attr"):
        return False
    size, spec = size_name(node), note(node).spec
    if size is not None:
        return size.endswith("B")
    if name_of(node) in ("numel", "nelement", "len"):
        return bool(batch_dims(node.args[0]))
    if isinstance(spec, Spec) and (name_of(node) in MAKERS or batch_dims(node)):
        return False
    if isinstance(spec, tuple) and any(isinstance(one, Spec) for one in spec):
        return False
    numbers = [n for n in node.all_input_nodes if not batch_dims(n)]
    if isinstance(spec, Spec):  # as torch.tensor(B) is
        return bool(numbers) and all(map(counts_rows, node.all_input_nodes))
    return any(map(counts_rows, numbers))


def size_name(node: Any) -> str | None:
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
    name = name_of(node)
    if name in _FILLS:
        return counts_rows(argument(node, _FILLS[name], "fill_value"))
    if is_call(node, operator.getitem):
        return _at_number(node)
    if name in _SHAPED or not isinstance(note(node).spec, (Spec, tuple)):
        return False
    return any(map(counts_rows, node.all_input_nodes))


def _at_number(node: Node) -> bool:
    """Whether ``node`` takes what their number tells, but no rows: ``w[B]``."""
    spec = spec_of(node.args[0])
    keys = keys_of(node.args[1])
    if spec is None or None in keys or ... in keys:
        return False
    bounds = (
        (key.start, key.stop, key.step) if isinstance(key, slice) else (key,)
        for d, key in enumerate(keys)
        if d not in rows_of(spec) and not (d == 0 and batch_dims(node))
    )
    return any(counts_rows(n) for one in bounds for n in one)


def takes_for_size(user: Node, number: Node) -> bool:
    """Whether ``user`` makes a tensor as large as ``number`` says: ``arange(mask.sum())``."""
    name = name_of(user)
    if name not in _SHAPED or name in LIKE - MAKERS or name.endswith("_like"):
        tensor = isinstance(note(user).spec, Spec) or user.op == "output"
        return not tensor and any(takes_for_size(one, user) for one in user.users)  # .item()
    made_of = name not in MAKERS and not (name == "repeat_interleave" and len(user.args) == 1)
    return not (made_of and user.args[:1] == (number,))
