"""For several ranks: what pairs each row of the batch with every other one, as an in-batch softmax
does, with the rows of all ranks.

In a graph of one rank a value of pairs has two dimensions of the batch. Here one of them counts
this rank's ``own`` rows, and the other those of all ranks::

    cross_entropy(u vᵀ / t, arange(B))   =>   cross_entropy(u Vᵀ / t, own_positions(arange(B)))
                                              V = batch_of_all(v)

Where the rows are reduced and where the columns, as in a symmetric loss, it is computed twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter import alias
from recast.rewriter.alias import Roots
from recast.rewriter.ir import KEY, Graph, Node, Spec, annotate, is_call, is_method, merge, note
from recast.rewriter.order import declare_random, droppable, writes
from recast.rewriter.report.journal import Missed
from recast.runtime.ranks.batch_of_all import (
    all_positions,
    batch_of_all,
    diagonal_filled,
    mean_of_all,
    own_block,
    own_diagonal,
    own_positions,
    sizes_of_all,
    widened,
)

from .batch_dimension import inputs_read
from .leaf import Einsum, argument, einsum_of, module_of, reduction_of, spec_of
from .own_rows import (
    batch_dims,
    computes_with_rows,
    counts_places,
    counts_rows,
    why_not_mean,
    why_not_own,
)
from .synchronise import fired

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_CROSS_ENTROPY = torch.ops.recast.cross_entropy.default
_LINEAR_CROSS_ENTROPY = torch.ops.recast.linear_cross_entropy.default
_CONTRACTION = torch.ops.recast.contraction.default
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
_OUT_OF_PLACE = {f"{name}_": name for name in _NAMES if hasattr(torch.Tensor, f"{name}_")}
_CONSTANTS: dict[Any, Callable[..., Any]] = {
    torch.eye: own_block, torch.ones: widened, torch.zeros: widened, torch.full: widened,
}  # fmt: skip
_SOFTMAX = (torch.softmax, torch.log_softmax, F.softmax, F.log_softmax)
_PRODUCTS = (torch.matmul, torch.mm, operator.matmul)
_PAIRING = (
    *_PRODUCTS, torch.einsum, _CONTRACTION, torch.cdist, F.linear, _LINEAR_CROSS_ENTROPY,
    F.cosine_similarity,
)  # fmt: skip
_REDUCTIONS = (
    "sum", "mean", "logsumexp", "amax", "amin", "max", "min", "any", "all", "prod", "var", "std",
    "argmax", "argmin",
)  # fmt: skip
_LOSSES = (
    F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.mse_loss, F.l1_loss,
    F.smooth_l1_loss, F.huber_loss,
)  # fmt: skip

for _collective in (sizes_of_all, batch_of_all, mean_of_all):
    declare_random(_collective)  # it keeps its place


class _Unlike(Exception):
    """Why something is computed from each rank's own rows."""


def _is_pairs(node: Any) -> bool:
    spec = spec_of(node)
    return spec is not None and sum(str(size).endswith("B") for size in spec.shape) > 1


@dataclass
class _Paired:
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
            elif is_call(x, torch.transpose) and len(x.args) == 3 and len(_shape(x)) == 2:
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
        """Raise _Unlike if ``x`` is not what it would be in one process."""
        why = why_not_own(x, self.done, self.left)
        if why is not None:
            raise _Unlike(why)

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
        ranks in the other. Raises _Unlike.
        """
        key = x, own, "pairs"
        if key not in self.known:
            dims = batch_dims(x)
            if len(dims) != 2 or sum(isinstance(size, str) for size in _shape(x)) > 2:
                raise _Unlike("its rows are not those of the batch")
            self.known[key] = self._pairs(x, own, next(d for d in dims if d != own))
        return self.known[key]

    def _pairs(self, x: Node, own: int, many: int) -> Node:
        made_up = _CONSTANTS.get(x.target) if x.op == "call_function" else None
        if computes_with_rows(x) or (is_call(x, torch.full) and counts_rows(x.args[1])):
            raise _Unlike("a value that depends on the number of rows")
        if made_up is not None:
            made = self.call(x, made_up, x, self.sizes, own)
            annotate(made, spec=self._wide(x, many))
            return made
        if is_method(x, "fill_diagonal_"):
            if len(x.args) != 2:  # the value is given by name
                raise _Unlike("fill_diagonal_ of pairs")
            source = self.pairs(x.args[0], own)  # type: ignore[arg-type]
            made = self.call(x, diagonal_filled, source, self.sizes, own, x.args[1])
            annotate(made, spec=self._wide(x, many))
            return made
        turned = _turned(x)
        if turned is not None:
            source = self.pairs(x.args[0], turned[own])  # type: ignore[arg-type]
            return self.again(x, {x.args[0]: source}, many)  # type: ignore[dict-item]
        if is_call(x, *_SOFTMAX) or is_method(x, "softmax", "log_softmax"):
            if _dim(argument(x, 1, "dim"), len(_shape(x))) == own:
                raise _Unlike("a softmax over the other rows")
            return self.again(x, {x.args[0]: self.pairs(x.args[0], own)}, many)  # type: ignore[arg-type, dict-item]
        places = _places(x)
        if places is None:
            raise _Unlike(f"{_name(x)} of pairs")
        given = {one: self.part(one, place, own, many) for one, place in places.items()}
        made = self.again(x, given, many)
        made.target = _OUT_OF_PLACE.get(made.target, made.target)  # type: ignore[arg-type]
        return made

    def part(self, x: Node, place: Mapping[int, int], own: int, many: int) -> Node:
        """The operand ``x``, whose dimension d is ``place[d]`` in the result."""
        at = {place.get(d): d for d in batch_dims(x)}
        if None in at:
            raise _Unlike("a sum over the batch")
        if own in at and many in at:
            return self.pairs(x, at[own])
        if many in at:
            return self.whole(x, at[many])
        return self.own(x)


def _shape(x: Any) -> tuple[Any, ...]:
    spec = spec_of(x)
    return () if spec is None else spec.shape


def _name(x: Node) -> str:
    return getattr(x.target, "__name__", str(x.target))


def _dim(dim: Any, rank: int) -> int:
    if not isinstance(dim, int):
        raise _Unlike("a dimension that is not told")
    return dim % rank


def _turned(x: Node) -> dict[int, int] | None:
    """For each dimension of ``x`` that of its source, if it is a transposed one."""
    rank = len(_shape(x))
    if not (is_call(x, torch.transpose) or is_method(x, "transpose")) or len(x.args) != 3:
        return None
    a, b = (_dim(d, rank) for d in x.args[1:])
    return {d: {a: b, b: a}.get(d, d) for d in range(rank)}


def _places(x: Node) -> dict[Node, dict[int, int]] | None:
    """For each tensor that ``x`` reads, the places of its dimensions in the result."""
    tensors = [n for n in x.all_input_nodes if spec_of(n) is not None]
    if any(note(n).spec is not None and spec_of(n) is None for n in x.all_input_nodes):
        return None
    if _elementwise(x):
        return {n: _aligned(n, len(_shape(x))) for n in tensors}
    if is_call(x, F.cosine_similarity) or reduction_of(x, "sum", "mean", "amax", "logsumexp"):
        # over the numbers of a pair
        rank = max(len(_shape(n)) for n in tensors)
        dim = argument(x, 2, "dim", 1) if is_call(x, F.cosine_similarity) else _reduced(x)
        dim = _dim(dim, rank)
        if rank == len(_shape(x)):  # kept
            return {n: _aligned(n, rank) for n in tensors}
        gone = {d: d - (d > dim) for d in range(rank) if d != dim}
        return {n: {d: gone[p] for d, p in _aligned(n, rank).items() if p != dim} for n in tensors}
    a, b = (x.args[k] if len(x.args) > k else None for k in (0, 1))
    ranks = len(_shape(a)), len(_shape(b)), len(_shape(x))
    if ranks == (2, 2, 2) and a is not b:
        if is_call(x, *_PRODUCTS) or is_method(x, "matmul", "mm"):
            return {a: {0: 0}, b: {1: 1}}  # type: ignore[dict-item]
        if is_call(x, torch.cdist) or (is_call(x, F.linear) and len(tensors) == 2):
            return {a: {0: 0}, b: {0: 1}}  # type: ignore[dict-item]
    read = einsum_of(x)
    if is_call(x, _CONTRACTION):
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
    methods = {*_ELEMENTWISE_METHODS, *_OUT_OF_PLACE}
    known: set[Any] = _ELEMENTWISE if x.op == "call_function" else methods
    return x.op != "call_module" and x.target in known and x.kwargs.get("out") is None


def _reduced(x: Node) -> Any:
    read = reduction_of(x, *_REDUCTIONS)
    return None if read is None else read.dim


def _aligned(x: Node, rank: int) -> dict[int, int]:
    own = len(_shape(x))
    return {d: d + rank - own for d in range(own)}


# ---------------------------------------------------------------- what reads pairs


def _consumed(node: Node, paired: _Paired, root: nn.Module) -> Node:
    """What stands for ``node``, which reads pairs and is of this rank's rows. Raises _Unlike."""
    for read in (_loss, _of_all, _diagonal, _over_others, _weighted_rows):
        made = read(node, paired, root)
        if made is not None:
            return made
    raise _Unlike(f"{_name(node)} of pairs")


def _loss(node: Node, paired: _Paired, root: nn.Module) -> Node | None:
    """A cross entropy of the logits of each row."""
    module = module_of(node, root)
    plain = is_call(node, F.cross_entropy, F.nll_loss) or type(module) is nn.CrossEntropyLoss
    if is_call(node, _LINEAR_CROSS_ENTROPY):
        x, weight, bias, target = node.args[:4]
        given = {weight: paired.whole(weight, 0)}  # type: ignore[arg-type]
        if isinstance(bias, Node) and batch_dims(bias):
            given[bias] = paired.whole(bias, 0)
        if batch_dims(x) != [0] or x is weight:
            return None
        paired.check(x)  # type: ignore[arg-type]
    elif plain or is_call(node, _CROSS_ENTROPY):
        weights = module.weight if isinstance(module, nn.CrossEntropyLoss) else None
        if plain and (argument(node, 2, "weight") is not None or weights is not None):
            raise _Unlike("classes that are weighed")
        logits, target = argument(node, 0, "input"), argument(node, 1, "target")
        if len(_shape(logits)) != 2 or not _is_pairs(logits):
            return None
        given = {logits: paired.pairs(logits, 0)}
    else:
        return None
    if _is_pairs(target):
        given[target] = paired.pairs(target, 0)  # type: ignore[arg-type]
    elif counts_places(target):
        given[target] = paired.own(target)  # type: ignore[arg-type]
    else:
        raise _Unlike("classes that are not arange(B)")
    return paired.again(node, given)  # type: ignore[arg-type]


def _of_all(node: Node, paired: _Paired, root: nn.Module) -> Node | None:
    """The mean or the sum of all pairs, or a loss that is one of them."""
    known = is_call(node, torch.mean, torch.sum) or is_method(node, "mean", "sum")
    if not known and not is_call(node, *_LOSSES):
        return None
    kwargs = {k: v for k, v in node.kwargs.items() if v is not None}
    if known and (len(node.args) > 1 or kwargs):
        return None
    if not known and (len(node.args) > 2 or set(kwargs) - {"reduction", "beta", "delta"}):
        raise _Unlike("pairs that are weighed")
    tensors = [n for n in node.all_input_nodes if spec_of(n) is not None]
    rank = max(len(_shape(n)) for n in tensors)
    dims = next(batch_dims(n) for n in tensors if _is_pairs(n))
    if len(dims) != 2:
        raise _Unlike("its rows are not those of the batch")
    given = {n: paired.part(n, _aligned(n, rank), *dims) for n in tensors}
    return paired.again(node, given)


def _diagonal(node: Node, paired: _Paired, root: nn.Module) -> Node | None:
    """What pairs each row with itself."""
    source = argument(node, 0, "input")
    if not isinstance(source, Node) or len(_shape(source)) != 2 or not _is_pairs(source):
        return None
    if is_call(node, operator.getitem):  # source[arange(B), arange(B)]
        key = node.args[1]
        if not (isinstance(key, tuple) and len(key) == 2 and all(map(counts_places, key))):
            return None
        return paired.call(node, own_diagonal, paired.pairs(source, 0), paired.sizes)
    if is_call(node, torch.gather) or is_method(node, "gather"):
        dim, index = argument(node, 1, "dim"), argument(node, 2, "index")
        if dim not in (1, -1) or not counts_places(index) or batch_dims(index) != [0]:
            return None
        return paired.again(node, {source: paired.pairs(source, 0), index: paired.own(index)})
    known = is_call(node, torch.diag, torch.diagonal) or is_method(node, "diag", "diagonal")
    if not known or len(node.args) > 1 or node.kwargs:
        return None
    return paired.call(node, own_diagonal, paired.pairs(source, 0), paired.sizes)


def _over_others(node: Node, paired: _Paired, root: nn.Module) -> Node | None:
    """A reduction over all rows that each one is paired with."""
    read = reduction_of(node, *_REDUCTIONS)
    if read is None or not isinstance(read.source, Node) or len(batch_dims(read.source)) != 2:
        return None
    dims = batch_dims(read.source)
    dim = _dim(read.dim, len(_shape(read.source)))
    if dim not in dims:
        return None
    own = next(d for d in dims if d != dim)
    made = paired.again(node, {read.source: paired.pairs(read.source, own)})
    annotate(made, spec=note(node).spec)
    if read.name in ("max", "min"):
        if any(not is_call(user, operator.getitem) or user.args[1] != 0 for user in node.users):
            raise _Unlike("the places of the greatest pairs")
    elif read.name in ("argmax", "argmin"):
        for user in node.users:
            others = [n for n in user.all_input_nodes if n is not node]
            equal = is_call(user, operator.eq, operator.ne, torch.eq, torch.ne)
            equal = equal or is_method(user, "eq", "ne")
            if not equal or len(others) != 1 or not counts_places(others[0]):
                raise _Unlike("the places of the greatest pairs")
    return made


def _weighted_rows(node: Node, paired: _Paired, root: nn.Module) -> Node | None:
    """A product of pairs, as weights, with the rows that they are of."""
    product = is_call(node, *_PRODUCTS) or is_method(node, "matmul", "mm")
    if not product or len(node.args) != 2:
        return None
    weights, rows = node.args
    if not _is_pairs(weights) or len(_shape(weights)) != 2 or batch_dims(rows) != [0]:
        return None
    given = {weights: paired.pairs(weights, 0), rows: paired.whole(rows, 0)}  # type: ignore[arg-type]
    return paired.again(node, given)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the pass


def _consumers(graph: Graph) -> list[Node]:
    """The nodes that read pairs, and are none."""
    return [
        node
        for node in graph.nodes
        if not _is_pairs(node)
        and (
            any(map(_is_pairs, node.all_input_nodes))
            or (is_call(node, _LINEAR_CROSS_ENTROPY) and batch_dims(node.args[1])[:1] == [0])
        )
    ]


def _of_parts(graph: Graph) -> list[Node]:
    """What pairs a part of the rows, or others beside them, or returns no pairs, as ``pdist``."""
    parts, found = set[Node](), list[Node]()
    for node in graph.nodes:
        read, sizes = node.all_input_nodes, _sizes(node)
        of_rows = any(map(batch_dims, read)) and not any("n" in _sizes(n) for n in read)
        if "n" in sizes and (of_rows or parts & {*read}):
            parts.add(node)
        product = is_call(node, *_PAIRING) or is_method(node, "matmul", "mm")
        sides = [n for n in read if any(isinstance(size, str) for size in _sizes(n))]
        if product and len(sides) > 1 and parts & {*sides}:
            wide = sum(isinstance(size, str) for size in sizes) > 1
            if wide or (is_call(node, _LINEAR_CROSS_ENTROPY) and node.args[1] in parts):
                found.append(node)
        elif is_call(node, torch.pdist, F.pdist) and batch_dims(node.args[0]) == [0]:
            found.append(node)
        elif is_call(node, F.scaled_dot_product_attention):
            query = argument(node, 0, "query")
            if len(_shape(query)) - 2 in batch_dims(query):
                found.append(node)
    return found


def _sizes(node: Node) -> tuple[Any, ...]:
    """The sizes of what ``node`` returns, of all tensors if it is several."""
    spec = note(node).spec
    specs = spec if isinstance(spec, tuple) else (spec,)
    return tuple(size for one in specs if isinstance(one, Spec) for size in one.shape)


def _written(graph: Graph, root: nn.Module) -> Node | None:
    """A write that the pairs, made anew at the place of what reads them, would see in another
    order: to what they are made of, or to pairs that others see, by another name or as a view.
    """
    writing = [n for n in graph.nodes if writes(n, root)]
    if not writing or not any(map(_is_pairs, graph.nodes)):
        return None
    known = alias.roots(graph, root)
    above = _above(graph, set(filter(_is_pairs, graph.nodes)))
    for node in writing:
        touched = alias.touched(node, root, known)
        if not any(map(_is_pairs, node.all_input_nodes)):
            if _read_before(node, touched, known, above):
                return node
            continue
        source = node.args[0] if node.args else None
        in_place = is_method(node, "fill_diagonal_", *_OUT_OF_PLACE) and _is_pairs(source)
        if not in_place or not isinstance(source, Node) or _turned(source) is not None:
            return node
        if any(user is not node and not _asks(user) for user in source.users):
            return node
        if _seen_after(node, touched, known, above):
            return node
    return None


def _above(graph: Graph, chosen: set[Node]) -> dict[Node, set[Node]]:
    """For each node those of ``chosen`` that it is computed of."""
    found: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        read = node.all_input_nodes
        found[node] = (chosen & {*read}).union(*(found[n] for n in read))
    return found


def _read_before(
    node: Node, touched: Roots, known: Mapping[Node, Roots], above: Mapping[Node, set[Node]]
) -> bool:
    """Whether ``node`` writes to what pairs were made of before it, that are read after it."""
    order = list(node.graph.nodes)
    at = order.index(node)
    made = {n for n in order[:at] if _is_pairs(n) and _touches(n, touched, known)}
    return any(made & above[n] for n in order[at + 1 :] if not _is_pairs(n))


def _touches(node: Node, touched: Roots, known: Mapping[Node, Roots]) -> bool:
    return any(touched & known[n] for n in node.all_input_nodes if spec_of(n) is not None)


def _seen_after(
    node: Node, touched: Roots, known: Mapping[Node, Roots], above: Mapping[Node, set[Node]]
) -> bool:
    """Whether pairs, or a part of them, that ``node`` writes to are read later by another name."""
    order = list(node.graph.nodes)
    below = {node}
    for after in order[order.index(node) + 1 :]:
        if below & {*after.all_input_nodes}:
            below.add(after)
        for one in after.all_input_nodes:
            of_pairs = _is_pairs(one) or bool(above[one])
            if one not in below and of_pairs and not _asks(after) and touched & known[one]:
                return True
    return False


def _asks(node: Node) -> bool:
    """Whether ``node`` only asks for a size, a dtype or a device."""
    return is_call(node, getattr) or is_method(node, "size", "dim", "numel")


def sizes_before(node: Node, rule: str) -> Node:
    """The node that returns the number of rows of each rank; a new one, if none is before it."""
    before = takewhile(lambda n: n is not node, node.graph.nodes)
    known = next((n for n in before if is_call(n, sizes_of_all)), None)
    if known is not None:
        return known
    inputs = (n for n in inputs_read(node.graph) if len(batch_dims(n)) == 1)
    source = next(inputs, None) or next(n for n in node.all_input_nodes if batch_dims(n))
    with node.graph.inserting_before(node):
        args = source, batch_dims(source)[0]
        made = node.graph.create_node("call_function", sizes_of_all, args, {}, "sizes_of_all")
    made.meta[KEY] = merge([node], rule)
    annotate(made, spec=Spec(torch.int64, ("n",)))
    return made


@dataclass(frozen=True)
class SynchronisePairs:
    """cross_entropy(u vᵀ, arange(B)) => cross_entropy(u batch_of_all(v)ᵀ, own_positions(...))

    For more than one rank: what pairs the rows of the batch, as an in-batch softmax, a symmetric
    loss over pairs or attention over the batch, has the rows of all ranks for each of this rank's.
    What reads pairs in another way keeps to each rank's own, and the report says so.
    """

    name: ClassVar[str] = "synchronise-pairs"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite what reads pairs in ``graph``; returns how much."""
        for node in _of_parts(graph):
            self._miss(node, f"{_name(node)} pairs rows in a way that is not known", context)
        written = _written(graph, context.root)
        if written is not None:
            self._miss(written, f"{_name(written)} writes to pairs", context)
            return 0
        known: dict[tuple[Node, int, str], Node] = {}
        done: dict[Node, Node] = {}
        left: dict[Node, str] = {}
        made: list[Node] = []
        for node in [n for n in _consumers(graph) if not _asks(n)]:
            if len(done) == context.fuel_left():
                break
            sizes = made[0] if made else sizes_before(node, self.name)
            made = made or [sizes]
            paired, before = _Paired(node, self.name, sizes, known, done, left), dict(known)
            try:
                done[node] = _read(node, paired, context.root)
                made += paired.made
            except _Unlike as unlike:
                known.clear()
                known.update(before)
                for one in reversed(paired.made):
                    graph.erase_node(one)
                left[node] = str(unlike)
        _keep_apart(done, left)
        for node, why in left.items():
            self._miss(node, why, context)
        for node, instead in done.items():
            for user in list(node.users):
                _compare_places(node, _Paired(user, self.name, made[0], {}, done, left))
            node.replace_all_uses_with(instead)
            graph.erase_node(node)
            fired(instead, "pairs of rows of the global batch", self.name, context)
        _drop(graph, context.root, made)
        return len(done)

    def _miss(self, node: Node, why: str, context: Context) -> None:
        where = note(node).where
        if node.op == "output":
            why = "forward returns pairs"
            where = next(note(n).where for n in node.all_input_nodes if _is_pairs(n))
        told = f"{why}: each rank pairs the rows of its own batch alone"
        tries = ("cross_entropy of the logits with arange(B), in forward",)
        context.journal.miss(Missed(self.name, node.name, told, where, tries))


def _read(node: Node, paired: _Paired, root: nn.Module) -> Node:
    """What stands for ``node``, where the mean over ranks of what follows is that of one process.
    Raises _Unlike.
    """
    made = _consumed(node, paired, root)
    why = why_not_mean(node)
    if why is not None:
        raise _Unlike(why)
    return made


def _keep_apart(done: dict[Node, Node], left: dict[Node, str]) -> None:
    """Leave what is computed of something that is left, or is a part of it, as it is: it would be
    of all rows beside those of one rank.
    """
    above = _above(next(iter(done)).graph, {*done, *left}) if done else {}
    waiting = [node for node in left if node.op != "output" and done]
    while waiting:
        node = waiting.pop()
        for other in [n for n in done if n in above[node] or node in above[n]]:
            del done[other]
            left[other] = f"it is computed with {_name(node)} of pairs of one rank"
            waiting.append(other)


def _compare_places(node: Node, paired: _Paired) -> None:
    """``argmax == arange(B)``, where ``argmax`` tells places among all rows."""
    user = paired.node
    for one in user.all_input_nodes:
        if reduction_of(node, "argmax", "argmin") is not None and counts_places(one):
            user.replace_input_with(one, paired.own(one))


def _drop(graph: Graph, root: nn.Module, made: Collection[Node]) -> None:
    """Erase what nothing reads any longer; of what was ``made`` all of it."""
    for node in reversed(list(graph.nodes)):
        if not node.users and (node in made or droppable(node, root)):
            graph.erase_node(node)
