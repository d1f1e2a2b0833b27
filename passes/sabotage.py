"""Rewrites that are wrong on purpose, to prove that verify and diff catch what they should.

Append one to a pipeline: ``recast diff SPEC --passes default,sabotage-wrong-triangle``. Each
silently makes one mistake that a real rewrite could make, in the first place where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from recast.rewriter import order
from recast.rewriter.capture.constants import constants
from recast.rewriter.ir import KEY, Graph, Node, annotate, is_call, items, merge
from recast.rewriter.pipeline import Pass
from recast.rewriter.report.journal import Fired
from recast.rewriter.rule import resolve

from .mistakes import last_one_wins, scaled, stale, through_bfloat16

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

ATTENTION = torch.ops.recast.field_attention.default
BAGS = torch.ops.recast.embedding_bags.default
DOT = torch.ops.recast.dot_interaction.default
MLP = torch.ops.recast.mlp.default
RELU_DROPOUT = torch.ops.recast.relu_dropout.default

Found = Iterator[tuple[Node, Callable[[], None]]]  # where, and the function that makes the mistake


def sabotage(graph: Graph, context: Context, name: str, found: Found) -> int:
    """Make the first mistake in ``found``; it counts as a rewrite and burns fuel."""
    if context.fuel_left() == 0:
        return 0
    for node, mistake in found:
        mistake()
        order.stable_sort(graph)
        annotate(node, rule=name)
        note = node.meta[KEY]
        what = "a mistake, on purpose"
        context.journal.fired.append(Fired(name, node.name, note.origin, note.where, what))
        context.burn()
        return 1
    return 0


def calls(graph: Graph, target: Callable[..., Any]) -> Iterator[Node]:
    """The calls of ``target``, in order."""
    yield from [n for n in graph.nodes if is_call(n, target)]


def lookups(graph: Graph) -> Iterator[tuple[Node, int, Node]]:
    """Each grouped call, with each lookup's index in it and the node of its rows."""
    for call in calls(graph, BAGS):
        for k, rows in items(call):
            yield call, k, rows


def value(argument: Any, context: Context) -> Any:
    """The value of ``argument``: itself, or the attribute that it reads."""
    return resolve(context.root, str(argument.target)) if isinstance(argument, Node) else argument


def change(node: Node, index: int, value: Any) -> Callable[[], None]:
    """Replace one argument."""
    return lambda: node.update_arg(index, value)


def put_after(node: Node, rule: str, target: Callable[..., Any], *more: Any) -> Node:
    """Put ``target(node, *more)`` between ``node`` and all its users."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, (node, *more))
    made.meta[KEY] = merge([node], rule)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


# ---------------------------------------------------------------- mistakes in values


@dataclass(frozen=True)
class SwapTables:
    """rows of table 0, rows of table 1 => rows of table 1, rows of table 0"""

    name: ClassVar[str] = "sabotage-swap-tables"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph))

    @staticmethod
    def _find(graph: Graph) -> Found:
        for call in calls(graph, BAGS):
            rows = dict(items(call))
            if 0 in rows and 1 in rows:
                a, b = rows[0], rows[1]

                def swap(call: Node = call, a: Node = a, b: Node = b) -> None:
                    a.args, b.args = (call, 1), (call, 0)

                yield call, swap


@dataclass(frozen=True)
class SumForMean:
    """mean pooling => sum pooling, and the reverse"""

    name: ClassVar[str] = "sabotage-sum-for-mean"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph))

    @staticmethod
    def _find(graph: Graph) -> Found:
        other = {"sum": "mean", "mean": "sum"}
        for call in calls(graph, BAGS):
            modes: Sequence[str] = call.args[5]  # type: ignore[assignment]
            for k, mode in enumerate(modes):
                # mean takes no weights
                if mode in other and call.args[3][k] is None:  # type: ignore[index]
                    new = [*modes[:k], other[mode], *modes[k + 1 :]]
                    yield call, change(call, 5, new)


@dataclass(frozen=True)
class WrongTriangle:
    """pairs (1,0), (2,0), (2,1) ... => the same pairs in another order"""

    name: ClassVar[str] = "sabotage-wrong-triangle"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph, context))

    @staticmethod
    def _find(graph: Graph, context: Context) -> Found:
        for call in calls(graph, DOT):

            def turn(call: Node = call) -> None:
                for index in (2, 3):
                    with graph.inserting_before(call):
                        turned = graph.call_function(torch.flip, (call.args[index], [0]))
                    turned.meta[KEY] = merge([call], WrongTriangle.name)
                    call.update_arg(index, turned)

            yield call, turn


@dataclass(frozen=True)
class LowPrecision:
    """x => float32(bfloat16(x)): right to three digits"""

    name: ClassVar[str] = "sabotage-low-precision"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph))

    @staticmethod
    def _find(graph: Graph) -> Found:
        for target in (DOT, MLP):
            for call in calls(graph, target):
                made = put_after(call, LowPrecision.name, through_bfloat16)
                yield made, _done


# ---------------------------------------------------------------- mistakes in gradients


@dataclass(frozen=True)
class LoseDuplicates:
    """d rows[i] = sum of d out at all places of id i => d out at the last place of i"""

    name: ClassVar[str] = "sabotage-lose-duplicates"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph, context))

    @staticmethod
    def _find(graph: Graph, context: Context) -> Found:
        for call, k, rows in lookups(graph):
            weights, ids, offsets, per_sample, table, mode, padding, last, *_ = call.args
            if value(padding[k], context) is None and mode[k] in ("none", "sum", "mean"):  # type: ignore

                def replace(
                    rows: Node = rows,
                    args: tuple[Any, ...] = (
                        weights[table[k]], ids[k], offsets[k], per_sample[k], mode[k], last[k],  # type: ignore
                    ),
                ) -> None:  # fmt: skip
                    rows.target = last_one_wins
                    rows.args = args

                yield rows, replace


@dataclass(frozen=True)
class LosePadding:
    """the padding row gets no gradient => it gets one"""

    name: ClassVar[str] = "sabotage-lose-padding"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph, context))

    @staticmethod
    def _find(graph: Graph, context: Context) -> Found:
        for call in calls(graph, BAGS):
            padding: Sequence[Any] = call.args[6]  # type: ignore[assignment]
            if any(value(p, context) is not None for p in padding):
                yield call, change(call, 6, [None] * len(padding))


@dataclass(frozen=True)
class DetachBranch:
    """x => x.detach(): right forward, no gradient back"""

    name: ClassVar[str] = "sabotage-detach-branch"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph))

    @staticmethod
    def _find(graph: Graph) -> Found:
        for _, _, rows in lookups(graph):
            made = put_after(rows, DetachBranch.name, torch.detach)
            yield made, _done
        for call in calls(graph, MLP):
            made = put_after(call, DetachBranch.name, torch.detach)
            yield made, _done


# ---------------------------------------------------------------- mistakes with what is held


@dataclass(frozen=True)
class DropBias:
    """x W + b => x W"""

    name: ClassVar[str] = "sabotage-drop-bias"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph))

    @staticmethod
    def _find(graph: Graph) -> Found:
        for call in calls(graph, MLP):
            params: Sequence[Any] = call.args[1]  # type: ignore[assignment]
            steps: Sequence[str] = call.args[3]  # type: ignore[assignment]
            if steps[0] == "linear" and params[1] is not None:
                yield call, change(call, 1, [params[0], None, *params[2:]])


@dataclass(frozen=True)
class StaleCopy:
    """self.weight, read at each call => the weight as it was when rewriting"""

    name: ClassVar[str] = "sabotage-stale-copy"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph, context))

    @staticmethod
    def _find(graph: Graph, context: Context) -> Found:
        for call in calls(graph, MLP):
            weight = call.args[1][0]  # type: ignore[index]
            now = value(weight, context)

            def freeze(call: Node = call, weight: Any = weight, now: Tensor = now) -> None:
                path = constants(context.root).add(now.detach().clone(), "stale")
                with graph.inserting_before(call):
                    held = graph.get_attr(path)
                    # zero times the weight keeps it "used", as a careless cast or cache would
                    made = graph.call_function(stale, (weight, held))
                for n in (held, made):
                    n.meta[KEY] = merge([call], StaleCopy.name)
                rest: Sequence[Any] = call.args[1][1:]  # type: ignore[index, assignment]
                call.update_arg(1, [made, *rest])

            yield call, freeze


@dataclass(frozen=True)
class BakeTraining:
    """self.training, read at each call => False"""

    name: ClassVar[str] = "sabotage-bake-training"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph))

    @staticmethod
    def _find(graph: Graph) -> Found:
        for call in calls(graph, MLP):
            if call.args[5]:
                yield call, change(call, 5, [False] * len(call.args[5]))  # type: ignore[arg-type]
        for call in calls(graph, RELU_DROPOUT):
            yield call, change(call, 2, False)


@dataclass(frozen=True)
class DoubleDropoutScale:
    """dropout(x) / (1 - p) => dropout(x) / (1 - p)^2 in train mode"""

    name: ClassVar[str] = "sabotage-double-dropout-scale"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph))

    @staticmethod
    def _find(graph: Graph) -> Found:
        for call in calls(graph, MLP):
            if "dropout" in call.args[3]:  # type: ignore[operator]
                training = call.args[5][-1]  # type: ignore[index]
                yield put_after(call, DoubleDropoutScale.name, scaled, training), _done
        for call in calls(graph, RELU_DROPOUT):
            yield put_after(call, DoubleDropoutScale.name, scaled, call.args[2]), _done


# ---------------------------------------------------------------- mistakes in structure


@dataclass(frozen=True)
class ReorderRandom:
    """draw a, draw b => draw b, draw a"""

    name: ClassVar[str] = "sabotage-reorder-random"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph, context))

    @staticmethod
    def _find(graph: Graph, context: Context) -> Found:
        drawing = [n for n in graph.nodes if order.draws(n, context.root)]
        for a, b in pairwise(drawing):
            needed = order.hoisted(b.all_input_nodes, a, order.positions(graph))
            if a in needed or any(order.draws(n, context.root) for n in needed):
                continue

            def move(a: Node = a, b: Node = b) -> None:
                a.prepend(b)  # stable_sort lifts what b needs
                place = order.positions(graph)
                for n in sorted(order.hoisted(b.all_input_nodes, b, place), key=place.__getitem__):
                    b.prepend(n)

            yield b, move


@dataclass(frozen=True)
class ForgetWeights:
    """weighted sum of rows => sum of rows"""

    name: ClassVar[str] = "sabotage-forget-weights"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph))

    @staticmethod
    def _find(graph: Graph) -> Found:
        for call in calls(graph, BAGS):
            weights: Sequence[Any] = call.args[3]  # type: ignore[assignment]
            if any(w is not None for w in weights):
                yield call, change(call, 3, [None] * len(weights))


@dataclass(frozen=True)
class ForgetMask:
    """softmax of masked scores => softmax of all scores"""

    name: ClassVar[str] = "sabotage-forget-mask"

    def run(self, graph: Graph, context: Context) -> int:
        return sabotage(graph, context, self.name, self._find(graph))

    @staticmethod
    def _find(graph: Graph) -> Found:
        for call in calls(graph, ATTENTION):
            bias, filled = (*call.args[7:9], None, None)[:2]
            if bias is not None or filled is not None:

                def forget(call: Node = call) -> None:
                    call.args = call.args[:7]

                yield call, forget


@dataclass(frozen=True)
class SayNothing:
    """a rewrite that reports no change"""

    name: ClassVar[str] = "sabotage-say-nothing"

    def run(self, graph: Graph, context: Context) -> int:
        if context.fuel_left() != 0:
            for call in [*calls(graph, MLP), *calls(graph, BAGS)][:1]:
                call.name = f"{call.name}_changed"
        return 0


def _done() -> None:
    """For mistakes that are already made when they are found."""


SABOTEURS: Mapping[str, Callable[..., Pass]] = {
    p.name: p
    for p in (
        SwapTables, SumForMean, WrongTriangle, LowPrecision, LoseDuplicates, LosePadding,
        DetachBranch, DropBias, StaleCopy, BakeTraining, DoubleDropoutScale, ReorderRandom,
        ForgetWeights, ForgetMask, SayNothing,
    )
}  # fmt: skip

__all__ = ["SABOTEURS"]
