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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import KEY, Graph, Node, Spec, annotate, is_call, is_method, merge, note
from recast.rewriter.order import declare_random, droppable
from recast.rewriter.report.journal import Missed
from recast.runtime.ranks.batch_of_all import batch_of_all, own_diagonal, sizes_of_all
from recast.runtime.ranks.means_of_all import mean_of_all, sum_of_all

from .batch_dimension import inputs_read
from .batch_pair_writes import above_of, only_asks, written_to
from .batch_pairs import (
    CONTRACTION,
    PRODUCTS,
    REDUCTIONS,
    Paired,
    Unlike,
    aligned,
    dim_of,
    is_pairs,
    shape,
)
from .leaf import argument, module_of, reduction_of, spec_of
from .own_rows import why_not_mean
from .row_counts import batch_dims, counts_places, name_of
from .row_sums import is_mean
from .synchronise import fired

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_CROSS_ENTROPY = torch.ops.recast.cross_entropy.default
_LINEAR_CROSS_ENTROPY = torch.ops.recast.linear_cross_entropy.default
_PAIRING = (
    *PRODUCTS, torch.einsum, CONTRACTION, torch.cdist, torch.inner, F.linear,
    _LINEAR_CROSS_ENTROPY, F.cosine_similarity,
)  # fmt: skip
_LOSSES = (
    F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.mse_loss, F.l1_loss,
    F.smooth_l1_loss, F.huber_loss, F.kl_div,
)  # fmt: skip

# of those: they weigh no pairs
_MATTERS_NOT = {"reduction", "beta", "delta", "log_target"}

for _collective in (sizes_of_all, batch_of_all):
    declare_random(_collective)  # it keeps its place


# ---------------------------------------------------------------- what reads pairs


def _consumed(node: Node, paired: Paired, root: nn.Module) -> Node:
    """What stands for ``node``, which reads pairs and is of this rank's rows. Raises Unlike."""
    for read in (_loss, _of_all, _diagonal, _over_others, _weighted_rows):
        made = read(node, paired, root)
        if made is not None:
            return made
    raise Unlike(f"{name_of(node)} of pairs")


def _loss(node: Node, paired: Paired, root: nn.Module) -> Node | None:
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
            raise Unlike("classes that are weighed")
        logits, target = argument(node, 0, "input"), argument(node, 1, "target")
        if len(shape(logits)) != 2 or not is_pairs(logits):
            return None
        given = {logits: paired.pairs(logits, 0)}
    else:
        return None
    if is_pairs(target):
        given[target] = paired.pairs(target, 0)  # type: ignore[arg-type]
    elif counts_places(target):
        given[target] = paired.own(target)  # type: ignore[arg-type]
    else:
        raise Unlike("classes that are not arange(B)")
    return paired.again(node, given)  # type: ignore[arg-type]


def _of_all(node: Node, paired: Paired, root: nn.Module) -> Node | None:
    """The mean or the sum of all pairs, or a loss that is one of them."""
    known = is_call(node, torch.mean, torch.sum) or is_method(node, "mean", "sum")
    if not known and not is_call(node, *_LOSSES):
        return None
    kwargs = {k: v for k, v in node.kwargs.items() if v is not None}
    if known and (len(node.args) > 1 or kwargs):
        return None
    if not known and (len(node.args) > 2 or set(kwargs) - _MATTERS_NOT):
        raise Unlike("pairs that are weighed")
    tensors = [n for n in node.all_input_nodes if spec_of(n) is not None]
    rank = max(len(shape(n)) for n in tensors)
    dims = next(batch_dims(n) for n in tensors if is_pairs(n))
    if len(dims) != 2:
        raise Unlike("its rows are not those of the batch")
    given = {n: paired.part(n, aligned(n, rank), *dims) for n in tensors}
    return paired.again(node, given)


def _diagonal(node: Node, paired: Paired, root: nn.Module) -> Node | None:
    """What pairs each row with itself."""
    source = argument(node, 0, "input")
    if not isinstance(source, Node) or len(shape(source)) != 2 or not is_pairs(source):
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


def _over_others(node: Node, paired: Paired, root: nn.Module) -> Node | None:
    """A reduction over all rows that each one is paired with."""
    read = reduction_of(node, *REDUCTIONS)
    if read is None or not isinstance(read.source, Node) or len(batch_dims(read.source)) != 2:
        return None
    dims = batch_dims(read.source)
    dim = dim_of(read.dim, len(shape(read.source)))
    if dim not in dims:
        return None
    own = next(d for d in dims if d != dim)
    made = paired.again(node, {read.source: paired.pairs(read.source, own)})
    annotate(made, spec=note(node).spec)
    if read.name in ("max", "min"):
        if any(not is_call(user, operator.getitem) or user.args[1] != 0 for user in node.users):
            raise Unlike("the places of the greatest pairs")
    elif read.name in ("argmax", "argmin"):
        for user in node.users:
            others = [n for n in user.all_input_nodes if n is not node]
            equal = is_call(user, operator.eq, operator.ne, torch.eq, torch.ne)
            equal = equal or is_method(user, "eq", "ne")
            if not equal or len(others) != 1 or not counts_places(others[0]):
                raise Unlike("the places of the greatest pairs")
    return made


def _weighted_rows(node: Node, paired: Paired, root: nn.Module) -> Node | None:
    """A product of pairs, as weights, with the rows that they are of."""
    product = is_call(node, *PRODUCTS) or is_method(node, "matmul", "mm")
    if not product or len(node.args) != 2:
        return None
    weights, rows = node.args
    if not is_pairs(weights) or len(shape(weights)) != 2 or batch_dims(rows) != [0]:
        return None
    given = {weights: paired.pairs(weights, 0), rows: paired.whole(rows, 0)}  # type: ignore[arg-type]
    return paired.again(node, given)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the pass


def _consumers(graph: Graph) -> list[Node]:
    """The nodes that read pairs, and are none."""
    return [
        node
        for node in graph.nodes
        if not is_pairs(node)
        and (
            any(map(is_pairs, node.all_input_nodes))
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
            if len(shape(query)) - 2 in batch_dims(query):
                found.append(node)
    return found


def _sizes(node: Node) -> tuple[Any, ...]:
    """The sizes of what ``node`` returns, of all tensors if it is several."""
    spec = note(node).spec
    specs = spec if isinstance(spec, tuple) else (spec,)
    return tuple(size for one in specs if isinstance(one, Spec) for size in one.shape)


def sizes_before(node: Node, rule: str) -> Node:
    """The node that returns the number of rows of each rank; a new one, if none is before it."""
    before = takewhile(lambda n: n is not node, node.graph.nodes)
    known = next((n for n in before if is_call(n, sizes_of_all) and _of_batch(*n.args)), None)
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


def _of_batch(source: Any, dim: Any) -> bool:
    """Whether dimension ``dim`` of ``source`` counts all rows of the batch, not some of them."""
    return dim in batch_dims(source)


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
            self._miss(node, f"{name_of(node)} pairs rows in a way that is not known", context)
        written = written_to(graph, context.root)
        if written is not None:
            self._miss(written, f"{name_of(written)} writes to pairs", context)
            return 0
        known: dict[tuple[Node, int, str], Node] = {}
        done: dict[Node, Node] = {}
        left: dict[Node, str] = {}
        made: list[Node] = []
        for node in [n for n in _consumers(graph) if not only_asks(n)]:
            if len(done) == context.fuel_left():
                break
            sizes = made[0] if made else sizes_before(node, self.name)
            made = made or [sizes]
            paired, before = Paired(node, self.name, sizes, known, done, left), dict(known)
            try:
                done[node] = _read(node, paired, context.root)
                made += paired.made
            except Unlike as unlike:
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
                _compare_places(node, Paired(user, self.name, made[0], {}, done, left))
            node.replace_all_uses_with(instead)
            graph.erase_node(node)
            fired(instead, "pairs of rows of the global batch", self.name, context)
        _drop(graph, context.root, made)
        return len(done)

    def _miss(self, node: Node, why: str, context: Context) -> None:
        where = note(node).where
        if node.op == "output":
            why = "forward returns pairs"
            where = next(note(n).where for n in node.all_input_nodes if is_pairs(n))
        told = f"{why}: each rank pairs the rows of its own batch alone"
        tries = ("cross_entropy of the logits with arange(B), in forward",)
        context.journal.miss(Missed(self.name, node.name, told, where, tries))


def _read(node: Node, paired: Paired, root: nn.Module) -> Node:
    """What stands for ``node``, where the mean over ranks of what follows is that of one process.
    Raises Unlike.
    """
    made = _consumed(node, paired, root)
    why = why_not_mean(node)
    if why is None:
        return made
    of_all = _number_of_all(node)
    if of_all is None or any(map(is_mean, node.users)):
        raise Unlike(why)
    return paired.call(node, of_all, made, paired.sizes)


def _number_of_all(node: Node) -> Callable[..., Any] | None:
    """What makes that of all ranks of ``node``, a mean or a sum of pairs of which a function is
    taken: ``logits.exp().mean().log()``.
    """
    known = is_call(node, torch.mean, torch.sum, *_LOSSES) or is_method(node, "mean", "sum")
    spec = spec_of(node)
    if not known or spec is None or spec.shape or why_not_mean(node, of_all=True) is not None:
        return None
    return sum_of_all if "sum" in (name_of(node), node.kwargs.get("reduction")) else mean_of_all


def _keep_apart(done: dict[Node, Node], left: dict[Node, str]) -> None:
    """Leave what is computed of something that is left, or is a part of it, as it is: it would be
    of all rows beside those of one rank.
    """
    above = above_of(next(iter(done)).graph, {*done, *left}) if done else {}
    waiting = [node for node in left if node.op != "output" and done]
    while waiting:
        node = waiting.pop()
        for other in [n for n in done if n in above[node] or node in above[n]]:
            del done[other]
            left[other] = f"it is computed with {name_of(node)} of pairs of one rank"
            waiting.append(other)


def _compare_places(node: Node, paired: Paired) -> None:
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
