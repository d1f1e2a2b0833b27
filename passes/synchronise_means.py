"""For several ranks: means over the rows of the batch, as of a load that experts should share.

    p.mean(0)                   =>  mean_of_all(p.mean(0), sizes)
    x.roll(1, 0), x.std(0)      told: of each rank's own rows, as under DistributedDataParallel

A mean is that of the global batch where nothing else mixes rows: beside others, as a variance, it
would be of other rows than those. What becomes one number by a mean or a sum is taken for a loss,
of which the ranks' mean is that of one process.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from recast.rewriter.ir import Graph, Node, Spec, annotate, is_call, is_method, note
from recast.rewriter.order import declare_random
from recast.rewriter.report.journal import Missed
from recast.runtime.ranks.batch_of_all import all_positions, mean_of_all, own_block, own_positions

from .leaf import argument, spec_of
from .own_rows import batch_dims, computes_with_rows, is_mean, name_of, of_other_rows
from .synchronise import Writer, fired
from .synchronise_pairs import sizes_before

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_LOSSES = frozenset({"mean", "sum"})
_REDUCE = frozenset({
    *_LOSSES, "var", "std", "amax", "amin", "max", "min", "median", "prod", "logsumexp", "norm",
    "argmax", "argmin", "var_mean", "std_mean", "quantile",
})  # fmt: skip
_AT = {"norm": 2, "quantile": 2}  # the place of ``dim``, else 1
_PRODUCTS = (
    torch.matmul, torch.mm, operator.matmul, torch.einsum, torch.ops.recast.contraction.default,
)  # fmt: skip
_OF: dict[Any, str] = {getattr(torch, name): name for name in _REDUCE if hasattr(torch, name)}

declare_random(mean_of_all)  # it keeps its place


def _name(node: Node) -> str | None:
    if node.op == "call_method":
        return str(node.target) if node.target in _REDUCE else None
    return _OF.get(node.target) if node.op == "call_function" else None


def _dims(node: Node, name: str, rank: int) -> list[int] | None:
    """The dimensions that ``node`` works along; None: not told by numbers."""
    told: Any = argument(node, _AT.get(name, 1), "dim", node.kwargs.get("axis"))
    if told is None:
        return [*range(rank)]
    dims = told if isinstance(told, (tuple, list)) else (told,)
    return [d % rank for d in dims] if all(type(d) is int for d in dims) else None


def _mixed(node: Node) -> str | None:
    """What ``node`` does along the rows of the batch; None: nothing, or what may be a loss."""
    name, made = _name(node), spec_of(node)
    if name is None and of_other_rows(node):
        return name_of(node)
    spec = spec_of(node.args[0]) if name is not None and node.args else None
    if name is None or spec is None or not spec.shape:
        return "sum" if _sums_products(node, made) else None
    dims = _dims(node, name, len(spec.shape))
    if dims is None or not _rows(spec) & {*dims}:
        return None
    if name in _LOSSES and made is not None and not made.shape:
        return None
    return name if len(_rows(spec)) == 1 else f"{name}, perhaps,"  # which are the rows?


def _of_places(node: Node) -> bool:
    """Whether ``node`` depends on the places or the number of rows, which is a rank's own."""
    if is_call(node, torch.arange, torch.eye) and batch_dims(node):
        # as an index, or told among those of all
        known = operator.getitem, own_positions, all_positions, own_block
        return not all(is_call(user, *known) for user in node.users)
    return computes_with_rows(node) and not is_mean(node)


def _rows(spec: Spec) -> set[int]:
    return {d for d, size in enumerate(spec.shape) if str(size).endswith("B")}


def _sums_products(node: Node, made: Spec | None) -> bool:
    """Whether this is a product of matrices that sums over the rows of the batch: ``x.T @ y``."""
    product = is_call(node, *_PRODUCTS) or is_method(node, "matmul", "mm")
    if not product or made is None or not made.shape or _rows(made):
        return False
    return all(_rows(spec) for n in node.all_input_nodes if (spec := spec_of(n)) is not None)


@dataclass(frozen=True)
class SynchroniseMeans:
    """p.mean(0) => mean_of_all(p.mean(0), sizes_of_all(p))

    For more than one rank: means over the rows of the batch that are no loss are of all ranks'. If
    something else mixes rows (a variance, a sort, a shift), all are of each rank's own, and the
    report says so.
    """

    name: ClassVar[str] = "synchronise-means"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the means of ``graph``, or tell of what is in their way; returns how many."""
        mixed = {node: what for node in graph.nodes if (what := _mixed(node)) is not None}
        if any(what != "mean" for what in mixed.values()) or any(map(_of_places, graph.nodes)):
            for node, what in mixed.items():
                why = f"a {what} over the rows of the batch: on several ranks, of each rank's own"
                tries = ("a loss for each row, and their mean",)
                context.journal.miss(Missed(self.name, node.name, why, note(node).where, tries))
            return 0
        means = list(mixed)[: context.fuel_left()]
        for node in means:
            with graph.inserting_after(node):
                made = graph.call_function(mean_of_all, (node, sizes_before(node, self.name)))
            writer = Writer(node, self.name)
            writer.stamped(made)
            annotate(made, spec=note(node).spec)
            node.replace_all_uses_with(made, lambda user, own=made: user is not own)
            fired(made, "mean over the rows of the global batch", self.name, context)
        return len(means)
