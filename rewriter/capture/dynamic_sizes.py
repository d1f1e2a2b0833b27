"""Sizes that only happen to be equal in both examples, and may be others in the next batch.

Data decide those of ``unique(x)``, ``x[mask]``, ``x[:, : lengths.max()]``: both batches may have
three domains, and the next one four. Others follow from a size that differs, as those of
``x[:, -50:]`` where both have more places, or of a batch that is padded to a multiple of 8. If
Python has seen such a size, as in ``for d in unique(domain)``, it is asked for again before each
call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from recast.errors import InputError
from recast.rewriter.order import declare_assertion, foreign

from .opaque_calls import OpaqueCall

if TYPE_CHECKING:
    from .tracer import Tracer

Pair = tuple[Any, Any]  # a size, or a number, in both examples

_FIRST = frozenset({
    "unique", "unique_consecutive", "_unique2", "_unique_impl", "_return_output", "fn", "nonzero",
    "argwhere", "masked_select", "bincount", "where", "_pack_padded_sequence", "tolist",
    "repeat_interleave",
})  # fmt: skip
# the numbers among their arguments are sizes
_SIZED = frozenset({
    "arange", "linspace", "zeros", "ones", "full", "empty", "rand", "randn", "eye", "randperm",
    "new_zeros", "new_ones", "new_full", "new_empty", "narrow", "expand", "repeat",
})  # fmt: skip
_BY_SIZES = frozenset({  # of these, one for each dimension of the result
    "zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full",
    "new_empty", "expand",
})  # fmt: skip
_SHAPED = frozenset({
    "view", "reshape", "flatten", "unflatten", "cat", "concat", "hstack", "vstack", "repeat",
    "unfold", "pad", "tile", "chunk", "split", "tensor_split", "ravel", "kron", "cartesian_prod",
    "combinations", "tril_indices", "triu_indices",
})  # fmt: skip

# what cuts, pads or pools along a dimension and leaves it in its place; layers by their class
_ALONG = frozenset({
    "getitem", "narrow", "pad", "constant_pad_nd", "fn", "max_pool1d", "avg_pool1d", "lp_pool1d",
    "max_pool2d", "avg_pool2d", "conv1d", "conv2d", "interpolate", "unfold", "cat", "concat",
    "MaxPool1d", "AvgPool1d", "MaxPool2d", "AvgPool2d", "Conv1d", "Conv2d", "Upsample",
    "ConstantPad1d", "ConstantPad2d", "ZeroPad1d", "ZeroPad2d",
})  # fmt: skip
_PIECES = frozenset({  # several of such results
    "split", "chunk", "tensor_split", "split_with_sizes", "max_pool1d_with_indices",
})  # fmt: skip
# a number among their arguments is no size
_UNSIZED = frozenset({"roll", "add", "sub", "mul", "truediv", "div", "pow"})


@dataclass(frozen=True)
class Sizes:
    """Asks a tensor for the sizes of some dimensions, and anything else for its length."""

    dims: tuple[int, ...]

    def __call__(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape[d] for d in self.dims) if self.dims else (len(value),)


@dataclass(frozen=True)
class Lengths:
    """Asks the lengths of sequences that are packed for the longest, or for all of them."""

    longest: bool

    def __call__(self, lengths: torch.Tensor) -> int:
        return int(lengths.max() if self.longest else lengths.sum())


@dataclass(frozen=True)
class AtMost:
    """Asks ``lengths`` whether none of the sequences is longer than that."""

    lengths: Lengths
    most: int

    def __call__(self, value: torch.Tensor) -> bool:
        return self.lengths(value) <= self.most


@dataclass(frozen=True)
class Held:
    """Sizes of what a layer gives that runs as it is: it may not be called ahead to ask for them.
    So each call is held to them, by :func:`check_sizes`.
    """

    dims: tuple[int, ...]


def check_sizes(given: torch.Tensor, sizes: tuple[tuple[int, int], ...], path: str) -> None:
    """Raise InputError if what the layer at ``path`` gives has others than these, (dimension,
    size), on which forward relies.
    """
    for dim, size in sizes:
        if given.shape[dim] != size:
            raise InputError(
                f"{path} gives {given.shape[dim]} in dimension {dim}, and gave {size} in both"
                " examples",
                why="forward relies on it, and the layer, which runs as it is, cannot be asked"
                " before the call",
                tries=(
                    "example=[a, b] of which one gives another",
                    "a layer that is captured: the report says what is in the way",
                ),
            )


declare_assertion(check_sizes)


@dataclass(frozen=True)
class DynamicSizes:
    """The data-dependent sizes of a value, and the nodes that first had such a size, each with the
    question to ask it.
    """

    sizes: frozenset[Pair] = frozenset()
    roots: frozenset[tuple[fx.Node, Any]] = frozenset()

    def counted(self, sizes: Sequence[int]) -> bool:
        """Whether one of ``sizes``, which may be of all entries together, is a multiple of one that
        moves.
        """
        return any(a == b and a > 1 and n % a == 0 for a, b in self.sizes for n in sizes)


def dynamic_sizes(tracer: Tracer, node: fx.Node) -> DynamicSizes:
    """Which sizes of ``node`` depend on data."""
    left = [node]
    while left:  # not by recursion: graphs are deep
        one = left[-1]
        behind = [n for n in one.all_input_nodes if n not in tracer.dynamic_sizes]
        if one in tracer.dynamic_sizes or not behind:
            left.pop()
            if one not in tracer.dynamic_sizes:
                tracer.dynamic_sizes[one] = _found(tracer, one)
        else:
            left += behind
    return tracer.dynamic_sizes[node]


def _found(tracer: Tracer, node: fx.Node) -> DynamicSizes:
    if node.op in ("placeholder", "get_attr"):
        return DynamicSizes()
    before = [tracer.dynamic_sizes[n] for n in _sizing(tracer, node)]
    sizes = frozenset[Pair]().union(*(m.sizes for m in before))
    roots = frozenset[tuple[fx.Node, Any]]().union(*(m.roots for m in before))
    pair = tracer.pairs.get(node, (None, None))
    new = frozenset(_new(tracer, node, pair))
    if name_of(node) == "_pad_packed_sequence":
        sizes -= {(n, n) for n in _total(node)}
    if new:
        sizes |= {size for size, _, _ in new}
        roots |= {(asked, question) for _, asked, question in new}
    if roots and name_of(node) in _SHAPED:
        sizes |= frozenset(size for _, size in _shape(pair))
    if roots and type(pair[0]) in (int, float):
        sizes |= {pair}
    return DynamicSizes(sizes, roots)


def _sizing(tracer: Tracer, node: fx.Node) -> list[fx.Node]:
    """The inputs of ``node`` on which its sizes may depend: no number by which tensors are moved or
    scaled.
    """
    pair = tracer.pairs.get(node, (None, None))
    if name_of(node) not in _UNSIZED or not isinstance(pair[0], torch.Tensor):
        return node.all_input_nodes
    return [
        n
        for n in node.all_input_nodes
        if type(tracer.pairs.get(n, (None, None))[0]) not in (int, float)
    ]


def _new(tracer: Tracer, node: fx.Node, pair: Pair) -> Iterator[tuple[Pair, fx.Node, Any]]:
    """The sizes that depend on the values of the inputs of ``node``, and what to ask which node."""
    name, shape = name_of(node), dict(_shape(pair))
    if not isinstance(pair[0], torch.Tensor):
        if name in ("item", "tolist") or (name == "getitem" and _of_list(tracer, node)):
            if isinstance(pair[0], list):
                yield (len(pair[0]), len(pair[1])), node, Sizes(())
            elif type(pair[0]) in (int, float, bool):
                yield pair, node, type(pair[0])
        elif type(pair[0]) is int and pair[0] == pair[1] and _moves(tracer, node):
            yield pair, node, int
        return
    made = node.args[0] if name == "getitem" and node.args else None
    if isinstance(made, fx.Node) and isinstance(tracer.pairs.get(made, (0, 0))[0], tuple):
        lengths: Any = made.args[1] if len(made.args) > 1 else None
        if name_of(made) == "_pack_padded_sequence" and isinstance(lengths, fx.Node):
            if shape:
                yield shape[0], lengths, Lengths(longest=bool(node.args[1] == 1))
        elif _first(made) and shape:
            yield shape[0], node, Sizes((0,))
        elif name_of(made) in _PIECES:
            for d in _settled(tracer, made, shape):
                yield shape[d], node, Sizes((d,))
        elif name_of(made) == "_pad_packed_sequence" and not _total(made):
            own = {(lengths, Sizes((0,)))}  # how many there are is one of the sizes
            for size in shape.values():
                for asked, question in tracer.dynamic_sizes[lengths].roots or own:
                    yield size, asked, question
        return
    if node.op == "call_module":
        module = tracer.root.get_submodule(str(node.target))
        if foreign(module):
            for d in _settled(tracer, node, shape):
                yield shape[d], node, Held((d,))
            return
        name = type(module).__name__
    dims = set[int]()
    if isinstance(node.target, OpaqueCall):
        dims = {0} if node.target.keeps else set(shape)
    elif name == "one_hot":
        dims = {len(shape) - 1}
    elif _sized_by_tensor(tracer, node, name):
        dims = set(shape) - _literal(node, name, len(shape))
    elif _first(node) or (name == "getitem" and _masked(tracer, node)):
        dims = {0} if name != "repeat_interleave" else set(shape)
    elif name == "arange" and any(_moves(tracer, n) for n in node.all_input_nodes):
        dims = {k for k, (a, b) in shape.items() if a == b}
    if name in _ALONG:
        dims |= _settled(tracer, node, shape)
    for d in dims & shape.keys():
        yield shape[d], node, Sizes((d,))


def _moves(tracer: Tracer, node: fx.Node) -> bool:
    """Whether a number follows from one that differs between the examples, or is one."""
    left, seen = [node], set[fx.Node]()
    while left:
        one = left.pop()
        first, second = tracer.pairs.get(one, (None, None))
        if type(first) not in (int, float, bool) or one in seen:
            continue
        if first != second:
            return True
        seen.add(one)
        left += one.all_input_nodes
    return False


def _settled(tracer: Tracer, node: fx.Node, shape: dict[int, Pair]) -> set[int]:
    """The dimensions of ``shape``, what ``node`` or a piece of it has, that are equal in both
    examples, though that of its input at the same place is not.
    """
    first: Any = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("tensors"))
    found = set[int]()
    for one in first if isinstance(first, (tuple, list)) else (first,):
        before = dict(_shape(tracer.pairs[one])) if isinstance(one, fx.Node) else {}
        sliced = name_of(node) == "getitem"
        places = _places(tracer, node.args[1], len(before)) if sliced else {d: d for d in before}
        for d, k in places.items():
            if before[k][0] != before[k][1] and d in shape and shape[d][0] == shape[d][1]:
                found.add(d)
    return found


def _places(tracer: Tracer, key: Any, dims: int) -> dict[int, int]:
    """Dimension of ``x[key]`` -> that of x which it is a slice of; x has ``dims``."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if not all(_simple(tracer, one) for one in keys):
        return {}
    taken = sum(one is not None and one is not Ellipsis for one in keys)
    at = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    keys[at : at + 1] = [slice(None)] * (dims - taken)
    found: dict[int, int] = {}
    made = given = 0
    for one in keys:
        if isinstance(one, slice):
            found[made] = given
        made += one is None or isinstance(one, slice)
        given += one is not None
    return found


def _simple(tracer: Tracer, key: Any) -> bool:
    """Whether ``key`` is a slice, a number, None or an ellipsis, rather than many places."""
    if isinstance(key, fx.Node):
        held = tracer.pairs.get(key, (None, None))[0]
        return type(held) is int or (isinstance(held, torch.Tensor) and not held.dim())
    return key is None or key is Ellipsis or type(key) is int or isinstance(key, slice)


def _total(node: fx.Node) -> tuple[int, ...]:
    """The length to which ``pad_packed_sequence`` was told to pad, if it was."""
    return tuple(n for n in node.args[4:5] if type(n) is int and n > 0)


def _first(node: fx.Node) -> bool:
    """Whether the first dimension of a call's result depends on data."""
    name = name_of(node)
    if name == "where":
        return len(node.args) + len(node.kwargs) == 1
    if name == "repeat_interleave":
        given = (*node.args[1:2], node.kwargs.get("repeats"))
        return any(isinstance(v, fx.Node) for v in given)
    return name in _FIRST


def _of_list(tracer: Tracer, node: fx.Node) -> bool:
    """Whether ``node`` is a number out of what ``tolist`` gave."""
    made = node.args[0]
    while isinstance(made, fx.Node) and name_of(made) == "getitem":
        made = made.args[0]
    return isinstance(made, fx.Node) and (name_of(made) == "tolist" or _outside(made))


def _outside(node: fx.Node) -> bool:
    return isinstance(node.target, OpaqueCall)


def _masked(tracer: Tracer, node: fx.Node) -> bool:
    """Whether the entries are selected by a mask."""
    keys = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    values = (tracer.pairs[k][0] for k in keys if isinstance(k, fx.Node))
    return any(isinstance(v, torch.Tensor) and v.dtype in (torch.bool, torch.uint8) for v in values)


def _sized_by_tensor(tracer: Tracer, node: fx.Node, name: str) -> bool:
    """Whether a size is given as a tensor of no dimension: ``x[:, : n.max()]``, ``arange(n)``."""
    found: list[fx.Node] = []
    if name == "getitem":
        keys = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        for key in keys:
            if isinstance(key, slice):
                found += [v for v in (key.start, key.stop, key.step) if isinstance(v, fx.Node)]
    elif name in _SIZED:
        found = node.all_input_nodes[1:] if node.op == "call_method" else node.all_input_nodes
    values = (tracer.pairs.get(n, (None, None))[0] for n in found)
    return any(isinstance(v, torch.Tensor) and v.dim() == 0 for v in values)


def _literal(node: fx.Node, name: str, dims: int) -> set[int]:
    """The dimensions whose sizes stand in the code: the second of ``zeros(n, 32)``."""
    if name not in _BY_SIZES:
        return set()
    sizes: Any = node.args[1:] if node.op == "call_method" else node.args
    if sizes and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    if len(sizes) != dims:
        return set()
    return {k for k, size in enumerate(sizes) if type(size) is int}


def name_of(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _shape(pair: Pair) -> Iterator[tuple[int, Pair]]:
    """The sizes of a tensor in both examples, by dimension."""
    if isinstance(pair[0], torch.Tensor) and isinstance(pair[1], torch.Tensor):
        yield from enumerate(zip(pair[0].shape, pair[1].shape, strict=False))
