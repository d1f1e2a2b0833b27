"""Values of all pairs of rows of the batch, with this rank's rows by those of all ranks.

In a graph of one rank such a value has two dimensions of the batch. It is made again so that one of
them counts this rank's ``own`` rows and the other, ``many``, those of all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from recast.rewriter.ir import KEY, Node, Spec, annotate, is_call, is_method, merge, note
from recast.runtime.ranks.batch_of_all import (
    all_positions,
    batch_of_all,
    diagonal_filled,
    own_block,
    own_positions,
    widened,
)

from .leaf import Einsum, argument, einsum_of, reduction_of, spec_of
from .own_rows import why_not_own
from .row_counts import batch_dims, computes_with_rows, counts_places, name_of

CONTRACTION = torch.ops.recast.contraction.default
_NAMES = (
    "add", "sub", "mul", "div", "pow", "neg", "exp", "log", "log1p", "expm1", "abs", "sqrt",
    "rsqrt", "square", "sigmoid", "tanh", "relu", "clamp", "clamp_min", "clamp_max", "where",
    "masked_fill", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
    "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not",
    "isfinite", "isnan", "nan_to_num", "zeros_like", "ones_like", "full_like", "reciprocal",
)  # fmt: skip
# each number of the result is made of those at its place
_ELEMENTWISE: set[Any] = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg,
    operator.abs, operator.and_, operator.or_, operator.xor, operator.invert, operator.eq,
    operator.ne, operator.lt, operator.le, operator.gt, operator.ge, F.relu, F.softplus,
    F.logsigmoid, F.silu, F.gelu, F.elu, F.leaky_relu, F.hardtanh,
    *(getattr(torch, name) for name in _NAMES if hasattr(torch, name)),
}  # fmt: skip
_ELEMENTWISE_METHODS = {
    *_NAMES, "to", "float", "double", "half", "bool", "long", "int", "type_as", "detach", "clone",
    "contiguous",
}  # fmt: skip
OUT_OF_PLACE = {f"{name}_": name for name in _NAMES if hasattr(torch.Tensor, f"{name}_")}
_CONSTANTS: dict[Any, Callable[..., Any]] = {
    torch.eye: own_block, torch.ones: widened, torch.zeros: widened, torch.full: widened,
}  # fmt: skip
_SOFTMAX = (torch.softmax, torch.log_softmax, F.softmax, F.log_softmax)
PRODUCTS = (torch.matmul, torch.mm, operator.matmul)
REDUCTIONS = (
    "sum", "mean", "logsumexp", "amax", "amin", "max", "min", "any", "all", "prod", "var", "std",
    "argmax", "argmin",
)  # fmt: skip


class Unlike(Exception):
    """Why something is computed from each rank's own rows."""


def is_pairs(node: Any) -> bool:
    spec = spec_of(node)
    return spec is not None and sum(str(size).endswith("B") for size in spec.shape) > 1


@dataclass
class Paired:
    """The nodes that are made before ``node``, which reads pairs; ``known`` of the whole graph."""

    node: Node
    rule: str
    sizes: Node
    known: dict[tuple[Node, int, str], Node]
    done: Mapping[Node, Node]  # other nodes that read pairs, and what stands for them
    left: Mapping[Node, str]  # those that keep to this rank's rows, and why
    made: list[Node] = field(default_factory=list)

    # ------------------------------------------------------------ nodes

    def call(self, like: Node, target: Callable[..., Any], *args: Any) -> Node:
        """A call that stands for ``like``."""
        with self.node.graph.inserting_before(self.node):
            return self._stamped(
                self.node.graph.create_node("call_function", target, args), like, None
            )

    def again(self, like: Node, given: Mapping[Node, Node], many: int | None = None) -> Node:
        """``like``, of other inputs; ``many``: the dimension of its rows of all ranks."""
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.node_copy(like, lambda n: given.get(n, n))
        return self._stamped(made, like, many)

    def _stamped(self, made: Node, like: Node, many: int | None) -> Node:
        made.meta[KEY] = merge([like], self.rule)
        spec = spec_of(like)
        if spec is not None:
            sizes = (("n" if d == many else size) for d, size in enumerate(spec.shape))
            annotate(made, spec=Spec(spec.dtype, tuple(sizes)))
        self.made.append(made)
        return made

    # ------------------------------------------------------------ rows of all ranks

    def whole(self, x: Node, dim: int) -> Node:
        """``x`` of all ranks, whose dimension ``dim`` counts rows."""
        key = x, dim, "whole"
        if key not in self.known:
            if counts_places(x):
                self.known[key] = self._positions(x, all_positions)
            elif is_call(x, torch.transpose) and len(x.args) == 3 and len(shape(x)) == 2:
                source = self.whole(x.args[0], 1 - dim)  # type: ignore[arg-type]
                self.known[key] = self.again(x, {x.args[0]: source}, dim)  # type: ignore[dict-item]
            else:
                self.check(x)
                made = self.call(x, batch_of_all, x, self.sizes, dim)
                annotate(made, spec=self._wide(x, dim))
                self.known[key] = made
        return self.known[key]

    def own(self, x: Node) -> Node:
        """``x``, of this rank's rows: with their places among all, if that is what it is."""
        if not counts_places(x):
            self.check(x)
            return x
        key = x, 0, "own"
        if key not in self.known:
            self.known[key] = self._positions(x, own_positions)
        return self.known[key]

    def check(self, x: Node) -> None:
        """Raise Unlike if ``x`` is not what it would be in one process."""
        why = why_not_own(x, self.done, self.left)
        if why is not None:
            raise Unlike(why)

    def _wide(self, x: Node, dim: int) -> Spec:
        spec = spec_of(x)
        assert spec is not None
        return Spec(
            spec.dtype, tuple("n" if d == dim else size for d, size in enumerate(spec.shape))
        )

    def _positions(self, x: Node, positions: Callable[..., Any]) -> Node:
        if is_call(x, torch.arange):
            made = self.call(x, positions, x, self.sizes)
        else:
            source: Any = x.args[0]
            made = self.again(x, {source: self._positions(source, positions)})
        if positions is all_positions:
            annotate(made, spec=self._wide(x, batch_dims(x)[0]))
        return made

    # ------------------------------------------------------------ pairs

    def pairs(self, x: Node, own: int) -> Node:
        """The value of pairs ``x`` with this rank's rows in dimension ``own``, and those of all
        ranks in the other. Raises Unlike.
        """
        key = x, own, "pairs"
        if key not in self.known:
            dims = batch_dims(x)
            if len(dims) != 2 or sum(isinstance(size, str) for size in shape(x)) > 2:
                raise Unlike("its rows are not those of the batch")
            self.known[key] = self._pairs(x, own, next(d for d in dims if d != own))
        return self.known[key]

    def _pairs(self, x: Node, own: int, many: int) -> Node:
        made_up = _CONSTANTS.get(x.target) if x.op == "call_function" else None
        if computes_with_rows(x):
            raise Unlike("a value that depends on the number of rows")
        if made_up is not None:
            made = self.call(x, made_up, x, self.sizes, own)
            annotate(made, spec=self._wide(x, many))
            return made
        if is_method(x, "fill_diagonal_"):
            if len(x.args) != 2:  # the value is given by name
                raise Unlike("fill_diagonal_ of pairs")
            source = self.pairs(x.args[0], own)  # type: ignore[arg-type]
            made = self.call(x, diagonal_filled, source, self.sizes, own, x.args[1])
            annotate(made, spec=self._wide(x, many))
            return made
        turned = turned_places(x)
        if turned is not None:
            source = self.pairs(x.args[0], turned[own])  # type: ignore[arg-type]
            return self.again(x, {x.args[0]: source}, many)  # type: ignore[dict-item]
        if is_call(x, *_SOFTMAX) or is_method(x, "softmax", "log_softmax"):
            if dim_of(argument(x, 1, "dim"), len(shape(x))) == own:
                raise Unlike("a softmax over the other rows")
            return self.again(x, {x.args[0]: self.pairs(x.args[0], own)}, many)  # type: ignore[arg-type, dict-item]
        places = places_of(x)
        if places is None:
            raise Unlike(f"{name_of(x)} of pairs")
        given = {one: self.part(one, place, own, many) for one, place in places.items()}
        made = self.again(x, given, many)
        made.target = OUT_OF_PLACE.get(made.target, made.target)  # type: ignore[arg-type]
        return made

    def part(self, x: Node, place: Mapping[int, int], own: int, many: int) -> Node:
        """The operand ``x``, whose dimension d is ``place[d]`` in the result."""
        at = {place.get(d): d for d in batch_dims(x)}
        if None in at:
            raise Unlike("a sum over the batch")
        if own in at and many in at:
            return self.pairs(x, at[own])
        if many in at:
            return self.whole(x, at[many])
        return self.own(x)


def shape(x: Any) -> tuple[Any, ...]:
    spec = spec_of(x)
    return () if spec is None else spec.shape


def dim_of(dim: Any, rank: int) -> int:
    if not isinstance(dim, int):
        raise Unlike("a dimension that is not told")
    return dim % rank


def turned_places(x: Node) -> dict[int, int] | None:
    """For each dimension of ``x`` that of its source, if it is a transposed one."""
    rank = len(shape(x))
    if not (is_call(x, torch.transpose) or is_method(x, "transpose")) or len(x.args) != 3:
        return None
    a, b = (dim_of(d, rank) for d in x.args[1:])
    return {d: {a: b, b: a}.get(d, d) for d in range(rank)}


def places_of(x: Node) -> dict[Node, dict[int, int]] | None:
    """For each tensor that ``x`` reads, the places of its dimensions in the result."""
    tensors = [n for n in x.all_input_nodes if spec_of(n) is not None]
    if any(note(n).spec is not None and spec_of(n) is None for n in x.all_input_nodes):
        return None
    if _elementwise(x):
        return {n: aligned(n, len(shape(x))) for n in tensors}
    if is_call(x, F.cosine_similarity) or reduction_of(x, "sum", "mean", "amax", "logsumexp"):
        # over the numbers of a pair
        rank = max(len(shape(n)) for n in tensors)
        dim = argument(x, 2, "dim", 1) if is_call(x, F.cosine_similarity) else _reduced(x)
        dim = dim_of(dim, rank)
        if rank == len(shape(x)):  # kept
            return {n: aligned(n, rank) for n in tensors}
        gone = {d: d - (d > dim) for d in range(rank) if d != dim}
        return {n: {d: gone[p] for d, p in aligned(n, rank).items() if p != dim} for n in tensors}
    a, b = (x.args[k] if len(x.args) > k else None for k in (0, 1))
    ranks = len(shape(a)), len(shape(b)), len(shape(x))
    if ranks == (2, 2, 2) and a is not b:
        if is_call(x, *PRODUCTS) or is_method(x, "matmul", "mm"):
            return {a: {0: 0}, b: {1: 1}}  # type: ignore[dict-item]
        if is_call(x, torch.cdist, torch.inner) or (is_call(x, F.linear) and len(tensors) == 2):
            return {a: {0: 0}, b: {0: 1}}  # type: ignore[dict-item]
    read = einsum_of(x)
    if is_call(x, CONTRACTION):
        inputs, _, output = str(x.args[2]).partition("->")
        read = Einsum(inputs.split(","), output, [a, b])
    if read is None or read.output is None or "." in read.output:
        return None
    if len({*read.operands}) == len(read.operands):
        letters = {letter: place for place, letter in enumerate(read.output)}
        terms = zip(read.operands, read.terms, strict=True)
        return {n: {d: letters[c] for d, c in enumerate(t) if c in letters} for n, t in terms}
    return None


def _elementwise(x: Node) -> bool:
    if x.target in (torch.where, "where") and len(x.args) != 3:
        return False
    methods = {*_ELEMENTWISE_METHODS, *OUT_OF_PLACE}
    known: set[Any] = _ELEMENTWISE if x.op == "call_function" else methods
    return x.op != "call_module" and x.target in known and x.kwargs.get("out") is None


def _reduced(x: Node) -> Any:
    read = reduction_of(x, *REDUCTIONS)
    return None if read is None else read.dim


def aligned(x: Node, rank: int) -> dict[int, int]:
    own = len(shape(x))
    return {d: d + rank - own for d in range(own)}
