"""Runs passes in order. The runner types, verifies, times and journals; a pass does none of it."""

from __future__ import annotations

import re
import time
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx, nn

from recast.errors import UsageError
from recast.rewriter.report.journal import Journal, Step

from . import verify
from .ir import Graph, Node, Spec, annotate, note, spec_of
from .rule import resolve


@runtime_checkable
class Pass(Protocol):
    """One ordered step; its dataclass fields are its options."""

    @property
    def name(self) -> str: ...

    def run(self, graph: Graph, context: Context) -> int:
        """Rewrite ``graph``; return how many times it fired, 0 when nothing changed."""
        ...


@dataclass
class Fuel:
    """How many more rewrites are allowed; None: no limit. Shared by all graphs of a model."""

    left: int | None = None


@dataclass
class Context:
    """What a pass may read besides the graph.

    Attributes:
        root: the module whose parameters and submodules the graph names. Not to be changed.
        journal: where rewrites and misses are told, for the report; ``rule.apply`` does it.
        batches, sizes: both example batches, and how many rows each has; None without an example.
        fuel: ask :meth:`fuel_left` before a rewrite, and :meth:`burn` after it.
        strict: re-raise what a rule raises.
        loops: loops over steps that were unrolled, each with the lines of what it made.
        whole: those that are one call again, whatever the number of steps (capture/step_loops).
    """

    root: nn.Module
    journal: Journal = field(default_factory=Journal)
    batches: tuple[Any, Any] | None = None
    sizes: tuple[int, int] | None = None
    fuel: Fuel = field(default_factory=Fuel)
    strict: bool = False
    loops: dict[str, frozenset[str]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def fuel_left(self) -> int | None:
        """How many more rewrites are allowed; None: no limit."""
        return self.fuel.left

    def burn(self) -> None:
        """Count one rewrite."""
        if self.fuel.left is not None:
            self.fuel.left -= 1


def run(
    graph: Graph,
    passes: Sequence[Pass],
    context: Context,
    *,
    after: Callable[[Pass, Graph], str] | None = None,
) -> None:
    """Run ``passes`` over ``graph`` in place.

    ``after(pass, graph)`` is called after every pass that changed something, and returns the dump
    to keep. Raises VerifyError when a pass fails, breaks an invariant, or changes the graph but
    reports that it did not.
    """
    before = verify.facts(graph, context.root)
    for p in passes:
        started = time.perf_counter()
        fired = _run(p, graph, context)
        if not fired and verify.still(before, graph):  # the usual case
            facts = before
        else:
            retype(graph, context)
            facts = verify.facts(graph, context.root, p.name)
        changed = facts.nodes != before.nodes
        if changed and not fired:
            what = f"pass {p.name} changed the graph but reports that it did not"
            why = "a pass returns how many times it fired, and 0 only for an untouched graph"
            raise verify.broken(p.name, what, why)
        verify.check(before, facts, graph, context.root, p.name)
        text = after(p, graph) if after and changed else ""
        seconds = time.perf_counter() - started
        context.journal.steps.append(Step(p.name, fired, seconds, changed, text))
        before = facts


def run_again(graph: Graph, passes: Sequence[Pass], context: Context) -> None:
    """Run ``passes`` over ``graph``, whose result is only to be compared with a verified one.

    Raises VerifyError when a pass fails.
    """
    for p in passes:
        if _run(p, graph, context):
            retype(graph, context)


def _run(p: Pass, graph: Graph, context: Context) -> int:
    try:
        return p.run(graph, context)
    except Exception as error:
        if context.strict:
            raise
        what = f"pass {p.name} failed: {type(error).__name__}: {error}"
        raise verify.broken(p.name, what, "this is a defect of the pass") from error


def retype(graph: Graph, context: Context) -> None:
    """Give every new node its spec, by running it on meta tensors for two batch sizes."""
    sizes = context.sizes or (3, 5)
    for node in graph.nodes:
        if note(node).spec is None and note(node).rule is not None:
            spec = _spec(node, context.root, sizes)
            if spec is not None:
                annotate(node, spec=spec)


def _spec(node: Node, root: nn.Module, sizes: tuple[int, int]) -> Any:
    try:
        if node.op == "get_attr":
            value = resolve(root, str(node.target))
            return spec_of(value, value, sizes)
        if node.op != "call_function" or not callable(node.target):
            return None
        values = []
        for size in sizes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), partial(_meta, root, size))
            with torch.no_grad():
                values.append(node.target(*args, **kwargs))
        return spec_of(values[0], values[1], sizes)
    except Exception:  # an operation without a shape function: its type stays unknown
        return None


def _meta(root: nn.Module, size: int, node: Node) -> Any:
    if node.op == "get_attr":
        value = resolve(root, str(node.target))
        return value.detach().to("meta") if isinstance(value, torch.Tensor) else value
    return _meta_of(note(node).spec, size)


def _meta_of(spec: Any, size: int) -> Any:
    if isinstance(spec, tuple):
        return tuple(_meta_of(s, size) for s in spec)
    shape = spec.at(size) if isinstance(spec, Spec) else None
    if shape is None:
        raise ValueError("unknown shape")
    return torch.empty(shape, dtype=spec.dtype, device="meta")


# ---------------------------------------------------------------- pipelines as text

_ITEM = re.compile(r"(-?)([a-z0-9][a-z0-9-]*)(?:\{([^}]*)\})?\s*(?:,|$)\s*")


def parse(
    text: str, registry: Mapping[str, Callable[..., Pass]], default: Sequence[Pass]
) -> tuple[Pass, ...]:
    """A pipeline from text, as ``'normalize,fuse-mlp{max-layers=4}'``; the word "default" stands
    for ``default``, and ``-name`` takes a pass out of what stands before it.

    Raises UsageError for an unknown pass or option.
    """
    passes: list[Pass] = []
    at = 0
    text = text.strip()
    while at < len(text):
        item = _ITEM.match(text, at)
        if not item:
            raise UsageError(
                f"passes: cannot read {text[at:]!r}",
                why="a pipeline is names separated by commas, options in braces: 'a,b{k=1}'",
                tries=("default", "default,-fuse-mlp", "normalize,fuse-mlp{max-layers=4}"),
            )
        minus, name, options = item.group(1), item.group(2), item.group(3) or ""
        if minus:
            passes = _without(name, passes)
        else:
            passes.extend(default if name == "default" else [_make(name, options, registry)])
        at = item.end()
    return tuple(passes)


def _without(name: str, passes: list[Pass]) -> list[Pass]:
    kept = [p for p in passes if p.name != name]
    if len(kept) == len(passes):
        raise UsageError(
            f"passes: there is no pass {name!r} to take out",
            why="-name takes out what stands before it",
            tries=_near(name, {p.name: p for p in passes}) or ("recast list passes",),
        )
    return kept


def given(passes: object) -> tuple[Pass, ...]:
    """``passes`` as a tuple. Raises UsageError unless it is a pass or a sequence of passes."""
    listed = tuple(passes) if isinstance(passes, Iterable) else (passes,)
    for p in listed:
        if isinstance(p, type) or not isinstance(p, Pass):
            raise UsageError(
                f"passes: {p!r} is no pass",
                why="a pass has a name and run(graph, context); passes is a list of them, or text",
                tries=("passes='default'", "passes=[FuseMlp(max_layers=4)]"),
            )
    return listed


def _make(name: str, options: str, registry: Mapping[str, Callable[..., Pass]]) -> Pass:
    if name not in registry:
        raise UsageError(
            f"passes: there is no pass {name!r}",
            why="`recast list passes` names all of them",
            tries=_near(name, registry) or ("passes='default'",),
        )
    make = registry[name]
    known = {f.name.replace("_", "-"): f for f in fields(make)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for option in filter(None, (o.strip() for o in options.split(","))):
        key, _, value = option.partition("=")
        if key not in known:
            raise UsageError(
                f"passes: {name} has no option {key!r}",
                why=f"its options are {', '.join(sorted(known)) or 'none'}",
            )
        values[known[key].name] = given = _literal(value)
        kind = type(known[key].default)
        if kind in (bool, int, str) and type(given) is not kind:
            raise UsageError(
                f"passes: {name} cannot have {option}",
                why=f"{key} is {_KINDS[kind]}",
                tries=(f"{name}{{{key}={known[key].default}}}, the default",),
            )
    return make(**values)


_KINDS = {bool: "true or false", int: "a whole number", str: "a text"}


def _near(name: str, registry: Mapping[str, object]) -> tuple[str, ...]:
    from difflib import get_close_matches

    return tuple(get_close_matches(name, registry, n=2))


def _literal(text: str) -> Any:
    lowered = {"true": True, "false": False, "none": None}
    if text.lower() in lowered:
        return lowered[text.lower()]
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text
