"""For several ranks: means, sums and variances over the rows of the batch, as of a load that
experts share.

    p.mean(0), x.T @ y          =>  mean_of_all(p.mean(0), sizes), sum_of_all(x.T @ y, sizes)
    l.sum() / mask.sum()        =>  sum_of_all(l.sum(), sizes) / sum_of_all(mask.sum(), sizes)
    x.std(0)                    =>  variance_of_all(x, sizes, [0], 1, False, True)
    x.roll(1, 0), x.amax(0)     told: of each rank's own rows, as under DistributedDataParallel
    x * B, x * arange(B)        told: of each rank's own number of rows

They are those of the global batch where nothing else mixes rows: beside others, as an order, they
would be of other rows than those. What is a loss, and what is not: ``mixed_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from recast.rewriter.ir import Graph, Node, Spec, annotate, note
from recast.rewriter.order import declare_random
from recast.rewriter.report.journal import Missed
from recast.runtime.ranks.means_of_all import OF_ALL, mean_of_all, sum_of_all, variance_of_all

from .batch_pair_writes import above_of
from .mixed_rows import Mixed, mixed_rows, of_places, takes_own
from .row_counts import computes_with_rows
from .synchronise import Writer, fired
from .synchronise_pairs import sizes_before

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

_OF_ALL: dict[str, Callable[..., Any]] = {
    "mean": mean_of_all, "sum": sum_of_all, "var": variance_of_all, "std": variance_of_all,
}  # fmt: skip
_TRIES = ("a loss for each row, and their mean",)

for _collective in OF_ALL:
    declare_random(_collective)  # it keeps its place


@dataclass(frozen=True)
class SynchroniseMeans:
    """p.mean(0) => mean_of_all(p.mean(0), sizes_of_all(p)), and sums alike

    For more than one rank: means, sums and variances over the rows of the batch that are no loss
    are of all ranks'. If something else mixes rows (a sort, a shift), all are of each rank's own,
    and the report says so.
    """

    name: ClassVar[str] = "synchronise-means"

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite the means and sums of ``graph``, or tell of what is in their way; returns how
        many.
        """
        root = context.root
        mixed = {n: found for n in graph.nodes if (found := mixed_rows(n, root)) is not None}
        unknown = any(not (found.known or found.loss) for found in mixed.values())
        places = [*filter(of_places, graph.nodes)]
        left = unknown or bool(places)
        todo = [n for n, found in mixed.items() if found.known and not (left and _beside(found))]
        todo = _with_sums_of_shares(todo, mixed)
        for node in [n for n in mixed if n not in todo]:
            article = "an" if mixed[node].what[0] in "aeiou" else "a"
            self._miss(node, f"{article} {mixed[node].what} over the rows of the batch", context)
        for node in [n for n in places if n not in mixed]:
            what = "number" if computes_with_rows(node) else "places"
            self._miss(node, f"a value of the {what} of the rows of the batch", context)
        todo = todo[: context.fuel_left()]
        for node in todo:
            made, what = self._of_all(node, mixed[node]), mixed[node].what
            annotate(made, spec=note(node).spec)
            for user in [u for u in node.users if u is not made and not takes_own(u, node)]:
                user.replace_input_with(node, made)
            if not node.users:  # a variance, of which nothing is taken
                graph.erase_node(node)
            fired(made, f"{what} over the rows of the global batch", self.name, context)
        return len(todo)

    def _of_all(self, node: Node, found: Mixed) -> Node:
        """The call that stands for ``node``."""
        sizes, target = self._sizes(node, found), _OF_ALL[found.what]
        args: tuple[Any, ...] = node, sizes
        if found.variance is not None:
            args = node.args[0], sizes, *found.variance, found.what == "std"
        with node.graph.inserting_after(node):
            return Writer(node, self.name).stamped(node.graph.call_function(target, args))

    def _sizes(self, node: Node, found: Mixed) -> Node:
        if found.sizes is None:
            return sizes_before(node, self.name)
        with node.graph.inserting_before(node):
            made = node.graph.call_function(*found.sizes)
        Writer(node, self.name).stamped(made)
        annotate(made, spec=Spec(torch.int64, ("n",)))
        return made

    def _miss(self, node: Node, what: str, context: Context) -> None:
        told = f"{what}: on several ranks, of each rank's own"
        context.journal.miss(Missed(self.name, node.name, told, note(node).where, _TRIES))


def _with_sums_of_shares(todo: list[Node], mixed: Mapping[Node, Mixed]) -> list[Node]:
    """``todo``, and each loss that is a sum of what is made of a sum of all: ``(l * w / w.sum())``.
    Of one rank's rows it would be smaller than any rank has it.
    """
    sums = {n for n in todo if mixed[n].what == "sum"}
    if not sums:
        return todo
    above = above_of(todo[0].graph, sums)
    made = {*todo, *(n for n, found in mixed.items() if found.what == "sum" and above[n])}
    return [n for n in mixed if n in made]


def _beside(found: Mixed) -> bool:
    """Whether it must be of the same rows as all else that mixes them."""
    return not found.loss or found.sizes is None
