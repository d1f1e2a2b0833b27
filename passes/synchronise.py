"""Batch norm on W ranks with the results of one process with the global batch.

Runs after all fusion, for more than one rank: chains are taken apart again where ranks have to
communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.rewriter.ir import KEY, Graph, Node, annotate, is_call, merge, note
from recast.rewriter.report.journal import Fired
from recast.rewriter.rule import Miss
from recast.runtime.mlp.chain import ARITY
from recast.runtime.refusal import refuse

from .leaf import BATCH_NORM, Attr, Value, argument, arguments, differs, module_of, plural

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

MLP = torch.ops.recast.mlp.default
_NORM = torch.ops.recast.batch_norm_global.default
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # SyncBatchNorm does it itself
_STATS = ("running_mean", "running_var", "num_batches_tracked")


# ---------------------------------------------------------------- writing


class Writer:
    """Makes nodes that replace one node, stamped with its origin and line."""

    def __init__(self, node: Node, rule: str) -> None:
        self.node, self.graph, self.rule = node, node.graph, rule
        self._note = merge([node], rule)

    def call(self, target: Callable[..., Any], *args: Any, name: str | None = None) -> Node:
        with self.graph.inserting_before(self.node):
            made = self.graph.create_node("call_function", target, args, {}, name=name)
        return self.stamped(made)

    def stamped(self, made: Node) -> Node:
        """``made``, with the origin and line of the node that it replaces."""
        made.meta[KEY] = self._note
        return made

    def put(self, value: Value) -> Any:
        """The argument that stands for ``value``: a node, or the constant itself."""
        if not isinstance(value, Attr):
            return value
        with self.graph.inserting_before(self.node):
            made = self.graph.create_node("get_attr", value.path, (), {})
        owner, _, _ = value.path.rpartition(".")
        made.meta[KEY] = self._note
        annotate(made, origin=(owner,) if owner else ())
        return made

    def replace(self, made: Node) -> None:
        """Replace the node by ``made``."""
        if note(made).spec is None:
            annotate(made, spec=note(self.node).spec)
        self.node.replace_all_uses_with(made)
        self.graph.erase_node(self.node)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of steps of a chain with their operands, as lists of the arguments of ``mlp``."""

    steps: list[str]
    params: list[Any]
    stats: list[Any]
    numbers: list[Any]
    training: list[Any]


def parts(chain: Node, cut: str) -> Iterator[Part]:
    """The arguments of a call of ``mlp`` cut into parts, with each step named ``cut`` in a part of
    its own.
    """
    given: list[Any] = list(chain.args[1:])
    params, stats, steps, numbers, training = ([*values] for values in given)
    part = Part([], [], [], [], [])
    for step in steps:
        if part.steps and (step == cut or part.steps[-1] == cut):
            yield part
            part = Part([], [], [], [], [])
        part.steps.append(step)
        taken = zip((part.params, part.stats, part.numbers, part.training),
                    (params, stats, numbers, training), ARITY[step], strict=True)  # fmt: skip
        for into, source, count in taken:
            into += source[:count]
            del source[:count]
    yield part


def rebuild(
    chain: Node, cut: str, rule: str, make: Callable[[Writer, Node, Part], Node]
) -> list[Node]:
    """Rewrite a call of ``mlp`` as its parts; ``make`` writes those of ``cut``. Returns what that
    made.
    """
    writer, x = Writer(chain, rule), chain.args[0]
    assert isinstance(x, Node)
    made: list[Node] = []
    for part in parts(chain, cut):
        if part.steps == [cut]:
            x = make(writer, x, part)
            made.append(x)
        else:
            lists = part.params, part.stats, part.steps, part.numbers, part.training
            x = writer.call(MLP, x, *lists, name="mlp")
    writer.replace(x)
    return made


def fired(node: Node, what: str, rule: str, context: Context) -> None:
    """Journal one rewrite."""
    origin, where = note(node).origin, note(node).where
    context.journal.fired.append(Fired(rule, node.name, origin, where, what))
    context.burn()


# ---------------------------------------------------------------- batch norm


@dataclass(frozen=True, slots=True)
class Norm:
    """A call of a batch norm, as arguments of the op."""

    source: Node
    params: Sequence[Value]
    stats: Sequence[Value]
    training: Value
    momentum: Value
    eps: Value


def _norm(node: Node, root: nn.Module) -> Norm | Miss | None:
    """The batch norm that ``node`` calls; a Miss if it cannot be synchronised."""
    if is_call(node, F.batch_norm):
        return _function(node)
    module = module_of(node, root)
    kind = next((c for c in NORMS if isinstance(module, c)), None)
    if module is None or kind is None:
        return None
    if (miss := differs(node, module, kind)) is not None:
        return miss
    if not module.track_running_stats and module.running_mean is not None:
        return Miss(node, "track_running_stats was switched off after the statistics were made")

    def attr(name: str) -> Value:
        return None if getattr(module, name) is None else Attr(f"{node.target}.{name}")

    flags = (Attr(f"{node.target}.{name}") for name in ("training", "momentum", "eps"))
    source = argument(node, 0, "input")
    return Norm(source, [attr("weight"), attr("bias")], [attr(s) for s in _STATS], *flags)


def _function(node: Node) -> Norm:
    source, mean, var, weight, bias, training, momentum, eps = arguments(node, BATCH_NORM)
    return Norm(source, [weight, bias], [mean, var, None], training, momentum, eps)


def inner(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that run inside a call of ``module`` without a graph of their own: ``(path,
    module)``.
    """
    yield path, module
    for name, child in module.named_children():
        if "forward" not in vars(child):  # a captured part, with a graph of its own
            yield from inner(child, f"{path}.{name}" if path else name)


def alone(module: nn.Module, path: str = "") -> list[str]:
    """Paths of batch norms inside a call of ``module``, whose statistics would be those of one
    rank.
    """
    return [name for name, m in inner(module, path) if isinstance(m, NORMS)]


def _write_norm(writer: Writer, norm: Norm) -> Node:
    params, stats = ([writer.put(v) for v in held] for held in (norm.params, norm.stats))
    rest = (writer.put(v) for v in (norm.training, norm.momentum, norm.eps))
    return writer.call(_NORM, norm.source, params, stats, *rest, name="batch_norm_global")


def _write_step(writer: Writer, x: Node, part: Part) -> Node:
    (momentum, eps), (training,) = part.numbers, part.training
    return writer.call(
        _NORM, x, part.params, part.stats, training, momentum, eps, name="batch_norm_global"
    )


@dataclass(frozen=True)
class SynchroniseBatchNorm:
    """batch_norm(x) => batch_norm_global(x)

    Uses the statistics of the batches of all ranks, in modules, functions and chains. For more than
    one rank. A batch norm that cannot be replaced (because it has hooks, say) raises in train mode.
    """

    name: ClassVar[str] = "synchronise-batch-norm"

    def run(self, graph: Graph, context: Context) -> int:
        """Replace the batch norms of ``graph``; returns how many nodes were rewritten."""
        count = 0
        for node in list(graph.nodes):
            if context.fuel_left() == 0:
                break
            count += self._one(node, context)
        return count

    def _one(self, node: Node, context: Context) -> bool:
        if is_call(node, MLP):
            steps: Any = node.args[3]
            if "batch_norm" not in steps:
                return False
            norms = rebuild(node, "batch_norm", self.name, _write_step)
            what = f"{plural(len(norms), 'batch norm')} of a chain over all ranks"
            fired(norms[0], what, self.name, context)
            return True
        norm, writer = _norm(node, context.root), Writer(node, self.name)
        if norm is None:
            opaque = module_of(node, context.root)
            inside = [] if opaque is None else alone(opaque, str(node.target))
            why = "it is inside a module that is not captured"
            return any([self._refuse(writer, path, why, (), context) for path in inside])
        if isinstance(norm, Miss):
            return self._refuse(writer, str(node.target), norm.why, norm.tries, context)
        made = _write_norm(writer, norm)
        writer.replace(made)
        fired(made, "statistics of all ranks", self.name, context)
        return True

    def _refuse(
        self, writer: Writer, path: str, why: str, tries: Sequence[str], context: Context
    ) -> bool:
        made = writer.call(
            refuse,
            writer.put(Attr(f"{path}.training")),
            f"the batch norm {path} on several ranks",
            f"{why}, so its statistics would be of one rank",
            tuple(tries),
        )
        fired(made, f"{path} is refused in train mode", self.name, context)
        return True
