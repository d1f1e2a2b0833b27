"""Chains of Linear, BatchNorm, activation and dropout as one call.

A chain is read off the graph, step by step along sole users, in whatever order the model has them.
What a module decides at run time (p, training, momentum, eps, slope) is read from it at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from recast.errors import UsageError
from recast.rewriter.ir import Graph, Node, is_call, is_method, sole_user
from recast.rewriter.rule import Answer, Build, Match, Miss, Rule, apply

from .leaf import (
    BATCH_NORM,
    Attr,
    Value,
    argument,
    arguments,
    differs,
    extra,
    module_of,
    plural,
    put,
    rank,
    tensor_at,
    unpaid,
)

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context


@dataclass(frozen=True, slots=True)
class Step:
    """One link of a chain, with what the op wants for it; see the schema of ``recast::mlp``."""

    node: Node
    source: Any  # the value it works on
    kind: str
    params: tuple[Value, ...] = ()
    stats: tuple[Value, ...] = ()
    numbers: tuple[Value, ...] = ()
    training: tuple[Value, ...] = ()
    inplace: bool = False


# ---------------------------------------------------------------- modules


def _linear(node: Node, m: nn.Linear, path: str) -> Step:
    bias = None if m.bias is None else Attr(f"{path}.bias")
    return Step(node, None, "linear", params=(Attr(f"{path}.weight"), bias))


def _batch_norm(node: Node, m: nn.BatchNorm1d, path: str) -> Step | Miss:
    if not m.track_running_stats and m.running_mean is not None:
        return Miss(
            node,
            "track_running_stats was switched off after the statistics were made",
            ("build it with track_running_stats=False",),
        )
    held = {
        name: None if getattr(m, name) is None else Attr(f"{path}.{name}")
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    return Step(
        node, None, "batch_norm",
        params=(held["weight"], held["bias"]),
        stats=(held["running_mean"], held["running_var"], held["num_batches_tracked"]),
        numbers=(Attr(f"{path}.momentum"), Attr(f"{path}.eps")),
        training=(Attr(f"{path}.training"),),
    )  # fmt: skip


def _dropout(node: Node, m: nn.Dropout, path: str) -> Step:
    flags = (Attr(f"{path}.training"),)
    return Step(node, None, "dropout", (), (), (Attr(f"{path}.p"),), flags, m.inplace)


def _plain(kind: str, *attributes: str) -> Callable[[Node, Any, str], Step]:
    """An activation whose numbers are attributes of its module."""

    def read(node: Node, m: Any, path: str) -> Step:
        numbers = tuple(Attr(f"{path}.{name}") for name in attributes)
        return Step(node, None, kind, numbers=numbers, inplace=getattr(m, "inplace", False))

    return read


def _prelu(node: Node, m: nn.PReLU, path: str) -> Step:
    return Step(node, None, "prelu", params=(Attr(f"{path}.weight"),))


def _gelu_module(node: Node, m: nn.GELU, path: str) -> Step | Miss | None:
    return Step(node, None, "gelu") if m.approximate == "none" else None


MODULES: Mapping[type[nn.Module], Callable[[Node, Any, str], Step | Miss | None]] = {
    nn.Linear: _linear,
    nn.BatchNorm1d: _batch_norm,
    nn.Dropout: _dropout,
    nn.ReLU: _plain("relu"),
    nn.Sigmoid: _plain("sigmoid"),
    nn.Tanh: _plain("tanh"),
    nn.SiLU: _plain("silu"),
    nn.LeakyReLU: _plain("leaky_relu", "negative_slope"),
    nn.ELU: _plain("elu", "alpha"),
    nn.PReLU: _prelu,
    nn.GELU: _gelu_module,
}


# ---------------------------------------------------------------- functions


def _scalar(value: Any) -> bool:
    """Whether ``value`` is a number, or an attribute of the model that holds one."""
    return isinstance(value, (int, float)) or (isinstance(value, Node) and value.op == "get_attr")


def _f_linear(node: Node, root: nn.Module) -> Step | Miss | None:
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    table = tensor_at(weight, root)
    if (table.dim() if table is not None else rank(weight)) != 2:
        return None
    return Step(node, argument(node, 0, "input"), "linear", params=(weight, bias))


def _f_batch_norm(node: Node, root: nn.Module) -> Step | Miss | None:
    source, mean, var, weight, bias, training, momentum, eps = arguments(node, BATCH_NORM)
    if mean is None or var is None or not all(map(_scalar, (training, momentum, eps))):
        return Miss(
            node,
            "batch_norm without running statistics, or with computed flags",
            ("use nn.BatchNorm1d",),
        )
    return Step(
        node, source, "batch_norm", (weight, bias), (mean, var, None), (momentum, eps), (training,)
    )


def _f_dropout(node: Node, root: nn.Module) -> Step | Miss | None:
    p, training = argument(node, 1, "p", 0.5), argument(node, 2, "training", True)
    if not (_scalar(p) and _scalar(training)):
        return None
    inplace = argument(node, 3, "inplace", False)
    return Step(
        node, argument(node, 0, "input"), "dropout", (), (), (p,), (training,), bool(inplace)
    )


def _f_numbers(kind: str, **defaults: float) -> Callable[[Node, nn.Module], Step | None]:
    """A functional activation with numbers; their order is that of torch's signature."""

    def read(node: Node, root: nn.Module) -> Step | None:
        numbers = tuple(
            argument(node, k, name, default)
            for k, (name, default) in enumerate(defaults.items(), start=1)
        )
        if not all(map(_scalar, numbers)):
            return None
        inplace = argument(node, len(defaults) + 1, "inplace", False)
        source = argument(node, 0, "input")
        return Step(node, source, kind, numbers=numbers, inplace=bool(inplace))

    return read


def _f_prelu(node: Node, root: nn.Module) -> Step | None:
    return Step(node, argument(node, 0, "input"), "prelu", params=(argument(node, 1, "weight"),))


def _f_gelu(node: Node, root: nn.Module) -> Step | None:
    if argument(node, 1, "approximate", "none") != "none":
        return None
    return Step(node, argument(node, 0, "input"), "gelu")


FUNCTIONS: Mapping[Callable[..., Any], Callable[[Node, nn.Module], Step | Miss | None]] = {
    F.linear: _f_linear,
    F.batch_norm: _f_batch_norm,
    F.dropout: _f_dropout,
    torch.relu: _f_numbers("relu"),
    F.relu: _f_numbers("relu"),
    torch.sigmoid: _f_numbers("sigmoid"),
    F.sigmoid: _f_numbers("sigmoid"),
    torch.tanh: _f_numbers("tanh"),
    F.tanh: _f_numbers("tanh"),
    F.silu: _f_numbers("silu"),
    F.leaky_relu: _f_numbers("leaky_relu", negative_slope=0.01),
    F.elu: _f_numbers("elu", alpha=1.0),
    F.prelu: _f_prelu,
    torch.prelu: _f_prelu,
    F.gelu: _f_gelu,
}
_INPLACE = {"relu_": "relu", "sigmoid_": "sigmoid", "tanh_": "tanh"}
_INPLACE_FUNCTIONS = {
    torch.relu_: "relu", F.relu_: "relu", torch.sigmoid_: "sigmoid", torch.tanh_: "tanh",
}  # fmt: skip


def read(node: Node, root: nn.Module) -> Step | Miss | None:
    """The step that ``node`` is; a Miss when it nearly is one; None for anything else."""
    module = module_of(node, root)
    if module is not None:
        return _read_module(node, module)
    if is_method(node, *_INPLACE) and not extra(node, 1):
        return Step(node, node.args[0], _INPLACE[str(node.target)], inplace=True)
    if node.op != "call_function":
        return None
    if is_call(node, *_INPLACE_FUNCTIONS):
        return Step(node, node.args[0], _INPLACE_FUNCTIONS[node.target], inplace=True)  # type: ignore[index]
    reader = FUNCTIONS.get(node.target)  # type: ignore[arg-type]
    return reader(node, root) if reader else None


def _read_module(node: Node, module: nn.Module) -> Step | Miss | None:
    kind = next((c for c in type(module).__mro__ if c in MODULES), None)
    if kind is None:
        return None
    found = differs(node, module, kind) or MODULES[kind](node, module, str(node.target))
    if not isinstance(found, Step):
        return found
    source = argument(node, 0, "input")
    return Step(
        node, source, found.kind, found.params, found.stats, found.numbers, found.training,
        found.inplace,
    )  # fmt: skip


# ---------------------------------------------------------------- chains


def chain_at(node: Node, root: nn.Module, max_layers: int) -> list[Step]:
    """The maximal chain that holds ``node``; empty when ``node`` is no step."""
    first = read(node, root)
    if not isinstance(first, Step):
        return []
    while (before := _link(first.source, root)) is not None:
        first = before
    for part in _parts(_forward(first, root), max_layers):
        if any(step.node is node for step in part):
            return part
    return []


def _link(node: Any, root: nn.Module) -> Step | None:
    """The step at ``node`` if its value has no other user."""
    if not isinstance(node, Node) or sole_user(node) is None:
        return None
    step = read(node, root)
    return step if isinstance(step, Step) else None


def _forward(step: Step, root: nn.Module) -> Iterable[Step]:
    while True:
        yield step
        user = sole_user(step.node)
        following = None if user is None else read(user, root)
        if not isinstance(following, Step) or following.source is not step.node:
            return
        if step.node in _others(following):
            return
        step = following


def _others(step: Step) -> list[Any]:
    """The values a step reads besides the one it works on."""
    return [*step.params, *step.stats, *step.numbers, *step.training]


def _parts(steps: Iterable[Step], max_layers: int) -> list[list[Step]]:
    """Cut a run of steps where the op may not follow the model.

    A step in place writes to the value before it: harmless on a value the chain itself has made,
    but not on the chain's input, which others may see. Dropout hands its input on when not
    training, so it makes no new value.
    """
    parts: list[list[Step]] = [[]]
    owned = False
    for step in steps:
        layers = sum(s.kind == "linear" for s in parts[-1])
        if step.inplace and not owned:
            parts.append([])
            continue
        if step.kind == "linear" and layers == max_layers:
            parts.append([])
        parts[-1].append(step)
        owned = owned or step.kind != "dropout"
    return parts


def _matcher(max_layers: int) -> Callable[[Node, nn.Module], Answer]:
    def match(node: Node, root: nn.Module) -> Answer:
        found = read(node, root)
        if not isinstance(found, Step):
            return found
        chain = chain_at(node, root, max_layers)
        if not chain or chain[0].node is not node:
            return None
        if not any(step.kind == "linear" for step in chain):
            return None
        if len(chain) == 1:
            return _alone(node, root)
        match = Match([s.node for s in chain], [chain[-1].node], chain)
        return unpaid("mlp", node, root) or match

    return match


def _alone(node: Node, root: nn.Module) -> Miss | None:
    """What keeps a single Linear from being a chain, where that is worth telling."""
    users = list(node.users)
    steps = [u for u in users if isinstance(read(u, root), Step)]
    if steps and any(is_call(u, torch.ops.recast.dice.default) for u in steps[0].users):
        return None  # it reads both by its definition: nothing that a user could change
    if steps and len(users) > 1:
        others = ", ".join(u.name for u in users if u is not steps[0])
        why = f"{steps[0].name} could follow in one call, but {others} uses its value too"
        return Miss(node, why, ("use the value after the activation only",))
    follows = None if len(users) != 1 else module_of(users[0], root)
    if follows is not None and not steps:
        name = type(follows).__name__
        return Miss(node, f"a Linear alone gains nothing, and nn.{name} behind it joins no chain")
    return None


def _rewrite(match: Match, build: Build) -> list[Node]:
    chain: Sequence[Step] = match.found
    return [call(build, chain[0].source, chain, "mlp")]


def call(build: Build, source: Node, chain: Sequence[Step], name: str) -> Node:
    """The call of ``recast::mlp`` that takes ``source`` through the steps of ``chain``."""

    def flat(part: str) -> list[Any]:
        return [put(build, value) for step in chain for value in getattr(step, part)]

    return build.call(
        torch.ops.recast.mlp.default,
        source,
        flat("params"),
        flat("stats"),
        [step.kind for step in chain],
        flat("numbers"),
        flat("training"),
        name=name,
    )


def _describe(match: Match) -> str:
    chain: Sequence[Step] = match.found
    counts: dict[str, int] = {}
    for step in chain:
        counts[step.kind] = counts.get(step.kind, 0) + 1
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) + " in one call"


def _worth(match: Match) -> str:
    """Launches; products of few rows are not worth one node's price where gradients are wanted."""
    launches = plural(len(match.found) - 1, "launch")
    return f"{launches}; small batches train on torch's own layers"


@cache
def chain_rule(max_layers: int) -> Rule:
    """The rule for chains of at most ``max_layers`` Linear."""
    return Rule(
        name="fuse-mlp",
        equation="dropout(act(norm(linear(x)))) ... => mlp(x, params, steps)",
        match=_matcher(max_layers),
        rewrite=_rewrite,
        describe=_describe,
        worth=_worth,
    )


@dataclass(frozen=True)
class FuseMlp:
    """dropout(act(norm(linear(x)))) ... => mlp(x, params, steps)

    The longest chains of Linear, BatchNorm1d, activation and Dropout, in any order, as modules or
    as functions, with at least one Linear and one more step. A value that is also used elsewhere
    cuts the chain.
    """

    name: ClassVar[str] = "fuse-mlp"
    max_layers: int = 64

    def __post_init__(self) -> None:
        if self.max_layers < 1:
            raise UsageError(
                f"passes: fuse-mlp cannot have max-layers={self.max_layers}",
                why="a chain has at least one Linear",
                tries=("--without fuse-mlp, for none",),
            )

    def run(self, graph: Graph, context: Context) -> int:
        """Fuse the chains of ``graph``; returns their number."""
        return apply(graph, [chain_rule(self.max_layers)], context)
