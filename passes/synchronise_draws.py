"""For several ranks: random numbers that forward draws, as one process draws them for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.rewriter.ir import Graph, Node, Spec, annotate, is_call, note
from recast.rewriter.order import declare_random
from recast.rewriter.report.journal import Missed
from recast.runtime.ranks.draws_global import (
    draw_global_,
    gumbel_softmax,
    multinomial_global,
    shifted,
)

from .batch_dimension import UNKNOWN, counts, inputs_read
from .leaf import argument, spec_of
from .synchronise import Writer, fired

if TYPE_CHECKING:
    from recast.rewriter.pipeline import Context

ROWS = torch.ops.recast.global_rows.default
_NAMED = {"dtype", "device", "layout", "pin_memory", "size", "memory_format"}
# Methods in place, and the numbers they take, by name, with their defaults.
_METHODS: dict[str, dict[str, float | None]] = {
    "normal_": {"mean": 0.0, "std": 1.0}, "uniform_": {"from": 0.0, "to": 1.0},
    "exponential_": {"lambd": 1.0}, "bernoulli_": {"p": 0.5}, "random_": {"from": None, "to": None},
    "geometric_": {"p": None}, "cauchy_": {"median": 0.0, "sigma": 1.0},
    "log_normal_": {"mean": 1.0, "std": 2.0},
}  # fmt: skip

declare_random(draw_global_)
declare_random(multinomial_global)


@dataclass(frozen=True, slots=True)
class _Draw:
    """A node as a method in place that draws into ``made``, which is a node or makes one; without a
    ``method``, as ``torch.multinomial`` of it.
    """

    node: Node
    method: str | None
    args: Sequence[Any]
    made: Node | Callable[[Writer], Node]
    found: tuple[int, int] | None  # see :func:`counts`


def _read(node: Node, root: nn.Module) -> _Draw | None:
    """The draw that ``node`` makes; None if it makes none, or none that is known here."""
    read = _FUNCTIONS.get(node.target)
    if node.op == "call_method":
        read = _TENSOR_METHODS.get(str(node.target), _of_method)
    return None if read is None else read(node, counts(node, root))


def _of_method(node: Node, found: tuple[int, int] | None) -> _Draw | None:
    source, *args = node.args
    numbers = _METHODS.get(str(node.target))
    if numbers is None or not isinstance(source, Node) or set(node.kwargs) - set(numbers):
        return None
    if node.kwargs:
        given = {**numbers, **dict(zip(numbers, args, strict=False)), **node.kwargs}
        args = [*given.values()]
        if None in args:
            return None
    if any(isinstance(a, Node) and not _alike(a, source) for a in args):
        return None
    return _Draw(node, str(node.target), args, source, found)


def _alike(a: Node, b: Node) -> bool:
    """Whether ``a`` is a number, or a tensor of the shape of ``b``."""
    own, other = spec_of(a), spec_of(b)
    return own is None or (other is not None and own.shape == other.shape)


def _sized(method: str, numbers: int = 0) -> Callable[[Node, Any], _Draw | None]:
    """A function whose first arguments are ``numbers``, and then a size or several."""

    def read(node: Node, found: tuple[int, int] | None) -> _Draw | None:
        named = _named(node)
        if named is None or len(node.args) < numbers:
            return None
        given, sizes = node.args[:numbers], node.args[numbers:]
        return _Draw(node, method, given, _maker(torch.empty, sizes, named), found)

    return read


def _randint(node: Node, found: tuple[int, int] | None) -> _Draw | None:
    *numbers, size = node.args if "size" not in node.kwargs else (*node.args, None)
    bounds, named = _bounds(node, numbers), _named(node, "low", "high")
    if named is None or bounds is None:
        return None
    sizes = () if size is None else (size,)
    made = _maker(torch.empty, sizes, {"dtype": torch.int64, **named})
    return _Draw(node, "random_", bounds, made, found)


def _normal(node: Node, found: tuple[int, int] | None) -> _Draw | None:
    mean, std = argument(node, 0, "mean"), argument(node, 1, "std")
    size = argument(node, 2, "size")
    numbers = all(isinstance(v, (int, float)) for v in (mean, std))
    named = _named(node, "mean", "std", "size")
    if size is None or not numbers or named is None:
        return None
    return _Draw(node, "normal_", (mean, std), _maker(torch.empty, (size,), named), found)


def _like(method: str, *, bounded: bool = False) -> Callable[[Node, Any], _Draw | None]:
    """A function of a tensor, and of bounds if it is ``bounded``, that draws one like it."""

    def read(node: Node, found: tuple[int, int] | None) -> _Draw | None:
        named = _named(node, *(("low", "high") if bounded else ()))
        if not node.args or named is None:
            return None
        x, *numbers = node.args
        bounds = _bounds(node, numbers) if bounded else None if numbers else []
        if bounds is None:
            return None
        return _Draw(node, method, bounds, _maker(torch.empty_like, (x,), named), found)

    return read


def _bounds(node: Node, numbers: Sequence[Any]) -> list[Any] | None:
    """The lowest of the integers to be drawn and the end, of which ``numbers`` are given by place;
    None if there is no end.
    """
    named = node.kwargs
    given = [*numbers, *(named[name] for name in ("low", "high") if name in named)]
    if len(given) == 1 and "low" not in named:
        return [0, *given]
    return given if len(given) == 2 else None


def _named(node: Node, *but: str) -> dict[str, Any] | None:
    """The arguments by name ``but`` these, for what makes a tensor to draw into; None if it has
    others.
    """
    named = {k: v for k, v in node.kwargs.items() if k not in but}
    for name, usual in (("requires_grad", False), ("generator", None)):
        if named.get(name, ...) is usual:
            del named[name]
    return None if set(named) - _NAMED else named


def _bernoulli(node: Node, found: tuple[int, int] | None) -> _Draw | None:
    """Of a tensor of probabilities; or, with a number for them, of any tensor's shape."""
    x, p = argument(node, 0, "input"), argument(node, 1, "p")
    if not isinstance(x, Node) or set(node.kwargs) - {"input", "p"}:
        return None
    made = _maker(torch.empty_like, (x,), {})
    return _Draw(node, "bernoulli_", (x if p is None else p,), made, found)


def _multinomial(node: Node, found: tuple[int, int] | None) -> _Draw | None:
    x, many = argument(node, 0, "input"), argument(node, 1, "num_samples")
    replacement, generator = argument(node, 2, "replacement", False), argument(node, 3, "generator")
    if not isinstance(x, Node) or generator is not None or node.kwargs.get("out") is not None:
        return None
    spec = spec_of(x)
    if found is not None and (spec is None or len(spec.shape) != 2):
        found = UNKNOWN  # samples from one row of weights, as many as the batch has
    return _Draw(node, None, (many, replacement), x, found)


def _maker(
    make: Callable[..., Tensor], args: Sequence[Any], kwargs: Any
) -> Callable[[Writer], Node]:
    def write(writer: Writer) -> Node:
        with writer.graph.inserting_before(writer.node):
            made = writer.graph.create_node("call_function", make, tuple(args), dict(kwargs))
        return writer.stamped(made)

    return write


_FUNCTIONS: dict[Any, Callable[[Node, Any], _Draw | None]] = {
    torch.randn: _sized("normal_"),
    torch.rand: _sized("uniform_"),
    torch.randint: _randint,
    torch.normal: _normal,
    torch.randn_like: _like("normal_"),
    torch.rand_like: _like("uniform_"),
    torch.randint_like: _like("random_", bounded=True),
    torch.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
}
_TENSOR_METHODS = {"bernoulli": _bernoulli, "multinomial": _multinomial}


@dataclass(frozen=True)
class SynchroniseDraws:
    """randn_like(x) => draw_global(empty_like(x), global_rows(x), "normal_")

    For more than one rank: what forward draws, each rank draws for the global batch, and keeps its
    own rows. If it is not known which dimension counts samples, ranks draw numbers of their own,
    independent of each other, and the report says so. What does not grow with the batch is the same
    on all ranks. ``F.gumbel_softmax`` is written as its draw and its softmax.
    """

    name: ClassVar[str] = "synchronise-draws"

    def run(self, graph: Graph, context: Context) -> int:
        """Replace the draws of ``graph``; returns how many."""
        for node in [n for n in graph.nodes if is_call(n, F.gumbel_softmax)]:
            _open(node, self.name)
        for node in [n for n in graph.nodes if is_call(n, torch.normal)]:
            _open_normal(node, self.name)
        read = (_read(node, context.root) for node in graph.nodes)
        draws = [d for d in read if d is not None][: context.fuel_left()]
        rows: Node | None = None
        for draw in draws:
            writer = Writer(draw.node, self.name)
            made = draw.made if isinstance(draw.made, Node) else draw.made(writer)
            if rows is None:  # before the first of them, which all ranks begin in one state
                rows = _rows(writer, graph, made, context.root)
            self._replace(draw, made, rows, writer, context)
        return len(draws)

    def _replace(
        self, draw: _Draw, made: Node, rows: Node, writer: Writer, context: Context
    ) -> None:
        dim, unit = (None, 1) if draw.found is None else draw.found
        name, where, drawn = draw.node.name, note(draw.node).where, draw.node
        args = made, rows, draw.method, dim, unit, *draw.args
        if draw.method is None:
            drawn = writer.call(multinomial_global, made, rows, dim, unit, *draw.args, name=name)
            writer.replace(drawn)
        elif drawn.op == "call_method" and made is drawn.args[0]:  # it stays the user's write
            drawn.op, drawn.target = "call_function", draw_global_
            drawn.args, drawn.kwargs = args, {}
        else:
            drawn = writer.call(draw_global_, *args, name=name)
            writer.replace(drawn)
        what = "random numbers of the global batch" if dim != -1 else "numbers of each rank's own"
        if dim == -1:
            why = "which dimension counts the samples is not known: ranks draw numbers of their own"
            tries = ("example=[batch_a, batch_b] of different sizes", "numbers of (batch, ...)")
            context.journal.miss(Missed(self.name, name, why, where, tries))
        fired(drawn, what, self.name, context)


def _rows(writer: Writer, graph: Graph, made: Node, root: nn.Module) -> Node:
    """The node that returns the sizes of all batches, by an input that has one; 0 if none has."""
    source, found = made, UNKNOWN
    for node in inputs_read(graph):
        counted = counts(node, root)
        if counted is not None and counted != UNKNOWN:
            source, found = node, counted
            break
    rows = writer.call(ROWS, source, *found, [True], name="global_rows")
    annotate(rows, spec=Spec(torch.int64, ("n",)))
    return rows


def _open(node: Node, rule: str) -> None:
    """Write a gumbel softmax as what it draws, and the rest."""
    writer = Writer(node, rule)
    logits, spec = argument(node, 0, "logits"), note(node).spec
    tau, hard = argument(node, 1, "tau", 1.0), argument(node, 2, "hard", False)
    dim = argument(node, 4, "dim", -1)
    drawn = _drawn_like(logits, "exponential_", spec, writer)
    writer.replace(writer.call(gumbel_softmax, logits, drawn, tau, hard, dim, name=node.name))


def _open_normal(node: Node, rule: str) -> None:
    """Write ``torch.normal(mean, std)``, of which one is a tensor of the result's shape."""
    mean, std = argument(node, 0, "mean"), argument(node, 1, "std", 1.0)
    spec = note(node).spec
    like = [n for n in (mean, std) if isinstance(n, Node) and _alike(n, node) and spec_of(n)]
    if not like or set(node.kwargs) - {"mean", "std"} or len(node.args) > 2:
        return
    writer = Writer(node, rule)
    drawn = _drawn_like(like[0], "normal_", spec, writer)
    writer.replace(writer.call(shifted, mean, std, drawn, name=node.name))


def _drawn_like(like: Node, method: str, spec: Any, writer: Writer) -> Node:
    """The nodes that make a tensor like this one, contiguous, and draw into it."""
    format_ = {"memory_format": torch.legacy_contiguous_format}
    made = _maker(torch.empty_like, (like,), format_)(writer)
    with writer.graph.inserting_before(writer.node):
        drawn = writer.graph.create_node("call_method", method, (made,))
    for one in (made, writer.stamped(drawn)):
        annotate(one, spec=spec)
    return drawn
