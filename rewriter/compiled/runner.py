"""Runs the graphs of one module, or its plain forward where they do not apply.

The plain forward is always right, so everything that a graph takes for granted is checked first:
the form of the arguments, the training flags, the guards, and that no module whose call was fused
has been hooked or replaced.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from recast.errors import RecastError, RecastWarning, UsageError
from recast.rewriter import memory
from recast.rewriter.capture import handed
from recast.rewriter.capture.layers import torch_layer
from recast.rewriter.capture.trace import Traced
from recast.rewriter.ir import Graph, Node, note
from recast.rewriter.rule import resolve

from . import rescue, surroundings
from .codegen import Program, compile_graph
from .copies import modules_by_path
from .entries import Entries
from .kept import alike
from .saved import pack, unpack
from .signature import Signature
from .trees import rebuild
from .undo import Undo, undo_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    vars(_module)[name]
    for name in (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    if name in vars(_module)
)  # fmt: skip

_ABSENT = object()
_TABLE = re.compile(r"\btable (\d+)\b")


@dataclass
class _Case:
    """One graph, ready to run."""

    program: Program
    asks: Program | None
    traced: Traced
    leaves: tuple[tuple[dict[str, Any], str, Any], ...]  # attributes to set after a call
    undo: Undo | None


class Runner:
    """The compiled forward of ``root``."""

    def __init__(
        self, name: str, root: nn.Module, signature: Signature | None, graphs: dict[str, Graph],
        traced: dict[str, Traced],
    ) -> None:  # fmt: skip
        self.name = name
        self.root = root
        self.signature = signature
        self.graphs = graphs
        self.traced = traced
        self.warned: set[str] = set()
        self.built = False
        self.kinds: dict[str, str] | None = None  # the class of every module, as first built
        self.swapped: str | None = None  # a module of another class, put there before a copy ran
        self.spread = False  # the tables are spread over ranks: only the graphs can run

    # ------------------------------------------------------------ making

    def build(self) -> None:
        """Generate the code, and list what must not change."""
        self.original = vars(self.root).get("forward")
        if getattr(getattr(self.original, "__self__", None), "_runner", None) is self:
            self.original = None  # ours
        modules = modules_by_path(self.root)
        kinds = {p: f"{type(m).__module__}.{type(m).__qualname__}" for p, m in modules.items()}
        self.kinds = kinds if self.kinds is None else self.kinds
        self.swapped = next((p for p, k in self.kinds.items() if kinds.get(p) != k), None)
        if self.swapped is not None:
            self.cases: dict[str, _Case] = {}
            self.built = True
            return
        self.cases = {
            mode: _Case(
                compile_graph(graph, self.root, f"{self.name} {mode}"),
                compile_graph(asks, self.root, "guards")
                if (asks := self.traced[mode].asks) is not None
                else None,
                self.traced[mode],
                tuple((vars(modules[p]), n, v) for p, n, v in self.traced[mode].leaves),
                undo_of(graph, self.root),
            )
            for mode, graph in self.graphs.items()
        }
        forks = sorted({p for t in self.traced.values() for p in t.forks})
        self.flags = [vars(modules[p]) for p in forks]
        # A call that a rule made replaces others: its module counts as rewritten all the same.
        called = {
            str(n.target)
            for graph in self.graphs.values()
            for n in graph.nodes
            if n.op == "call_module" and note(n).rule is None
        }
        hooks: list[Any] = list(_GLOBAL_HOOKS)
        links: dict[tuple[int, str], tuple[Any, str, nn.Module]] = {}
        for path, module in modules.items():
            if any(path == c or path.startswith(f"{c}.") for c in called):
                inside = path not in called
            else:
                inside = path != "" and _within_layer(path, modules)
                if path and not inside:
                    hooks.extend(d for h in _HOOKS if (d := vars(module).get(h)) is not None)
            if path and not inside:
                parent, _, key = path.rpartition(".")
                slots = modules[parent]._modules if parent in modules else None
                if isinstance(slots, dict) and slots.get(key) is module:  # TorchScript's is none
                    links[(id(slots), key)] = (slots, key, module)
        reads = {(p, n): v for t in self.traced.values() for p, n, v in t.reads}
        self.reads = tuple((vars(modules[p]), p, n, v) for (p, n), v in reads.items())
        everything = {t.key: t for m in self.traced.values() for t in m.taken}
        self.checks = surroundings.checks(everything.values(), modules)
        free = {
            path: module
            for path, module in modules.items()
            if not any(path == k or path.startswith(f"{k}.") for k in called)
            and not isinstance(module, torch.jit.ScriptModule)
        }
        self.checks += tuple(c for p, m in free.items() for c in surroundings.of_module(p, m))
        # Both are long and checked at each call: loops over plain tuples take a tenth of the time.
        self.forwards = tuple(
            (vars(m), vars(m).get("forward"), path) for path, m in free.items() if path
        )
        read = {
            str(n.target) for g in self.graphs.values() for n in g.nodes if n.op == "get_attr"
        }  # these are read at run time
        baked = [s for p, m in free.items() for s in surroundings.settings(p, m, read)]
        self.settings = tuple(
            (itemgetter(*names), held, itemgetter(*names)(held), path)
            for names, held, path in baked
        )
        self.probe: tuple[dict[str, Any], str, torch.dtype | None] | None = None
        if self.signature is not None and self.signature.strict_dtypes:
            floats = (
                (m._parameters, k, self.signature.dtype)
                for m in modules.values()
                for k, p in m._parameters.items()
                if p is not None and p.is_floating_point()
            )
            self.probe = next(floats, None) if self.signature.dtype else None
        self.empty = {m: rescue.emptied(g, self.root) for m, g in self.graphs.items()}
        self.hooks = tuple(hooks)
        self.links = tuple(links.values())
        self.entries = Entries(
            (
                *((slots, key) for slots, key, _ in self.links),
                *((held, "forward") for held, _, _ in self.forwards),
                *((held, name) for names, held, _ in baked for name in names),
            )
        )
        self.built = True  # at last: another thread may ask

    def source(self) -> str:
        """The generated code, all modes."""
        if not self.built:
            self.build()
        return "\n".join(f"# {mode}\n{case.program.source}" for mode, case in self.cases.items())

    def mode(self) -> str | None:
        """The name of the graph for the present training flags; None when none covers them."""
        if "both" in self.cases or not self.cases:
            return "both" if self.cases else None
        first = self.flags[0]["training"]
        if any(flags["training"] != first for flags in self.flags):
            return None
        return "train" if first else "eval"

    def covered(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, list[Any]] | None:
        """The name of the graph that this call runs, and the values of its placeholders; None if
        the plain forward runs.
        """
        if not self.built:
            self.build()
        mode = self.mode()
        if self.swapped is not None or self.signature is None or mode is None:
            return None
        leaves, why = self.signature.leaves(self.signature.bind(args, kwargs))
        if why is not None or self.unfused() is not None:
            return None
        case = self.cases[mode]
        if case.asks is not None and not self._answers(case, leaves):
            return None
        return mode, leaves

    def asked(self, mode: str) -> list[int]:
        """The indices of the placeholders whose values or sizes the guards of a graph read."""
        asks = self.traced[mode].asks
        inputs = [] if asks is None else [n for n in asks.nodes if n.op == "placeholder"]
        return [k for k, n in enumerate(inputs) if n.users]

    # ------------------------------------------------------------ running

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.built:
            self.build()
        if self.swapped is not None:
            self.warn(f"the module {self.swapped!r} was replaced")
        if self.signature is None or not self.cases:  # then no table is spread
            return self.plain(args, kwargs)
        if _leaves_python() and not self.spread:
            return self.plain(args, kwargs)
        ordered = self.signature.bind(args, kwargs)
        leaves, why = self.signature.leaves(ordered)
        if why is None and not torch.compiler.is_compiling():
            why = self.unfused() or self.signature.unresolved(leaves)
        mode = self.mode()
        if mode is None:
            why = (
                why
                or "some modules are in train mode and some in eval mode, and forward asks which"
            )
        if why is None and mode is not None:
            places = self.cases[mode].traced.handed
            if places and handed.shared(ordered, [place for place, _ in places]):
                why = "a dict that forward writes to is given to it in two places"
        if why is None:
            assert mode is not None
            case = self.cases[mode]
            held = _fetch(case.program)
            if held is not None and (case.asks is None or self._answers(case, leaves)):
                kept = None
                if case.undo is not None and not torch.compiler.is_compiling():
                    kept = case.undo.keep(self.root, leaves)
                try:
                    return self._run(case, leaves, held, ordered)
                except Exception as error:
                    ranks = self.signature.ranks
                    why = rescue.why_plain(
                        error, case.program, self.graphs[mode], self.root, leaves, ranks,
                        case.traced.catches, self.empty[mode], kept,
                    )  # fmt: skip
                    if why is None or self.spread:
                        raise
                self.warn(why)
                return self.plain(args, kwargs)
            if held is None:
                self.warn("a parameter that the graph reads is gone")
                return self._without(args, kwargs)
            why = "control flow that depends on values goes another way than in the example"
        self.warn(why)
        return self.plain(args, kwargs)

    def _without(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the plain forward, because a parameter that the graph reads is gone."""
        try:
            return self.plain(args, kwargs)
        except AttributeError as error:
            raise UsageError(
                f"{self.name} cannot run: {error}",
                why="the result shares its parameters with the model that optimize was given, and"
                " one of the two was pruned, parametrized or had it deleted",
                tries=("recast.optimize(model) after that", "undo it in the other one"),
            ) from error

    def _run(
        self, case: _Case, leaves: list[Any], held: tuple[Any, ...], ordered: tuple[Any, ...]
    ) -> Any:
        if torch.compiler.is_compiling():
            result = case.program.trace(*leaves, held)
        else:
            try:
                result = case.program.run(*leaves, held)
            except Exception as error:
                explain(error, case.program)
                if isinstance(error, torch.OutOfMemoryError):
                    memory.explain(error, self.root)
                raise
        if case.traced.stores or case.traced.handed:
            result, stored = result
            beside = iter(stored)
            for path in case.traced.stores:
                owner, _, name = path.rpartition(".")
                setattr(resolve(self.root, owner) if owner else self.root, name, next(beside))
            for (*place, key), form in case.traced.handed:
                entries: Any = ordered
                for one in place:
                    entries = entries[one]
                entries[key] = rebuild(form, lambda _: next(beside))
        for owned, name, value in case.leaves:
            if not alike(owned.get(name, _ABSENT), value):
                owned[name] = copy.copy(value)
        if case.traced.template is not None:
            source = iter(result)
            result = rebuild(case.traced.template, lambda _: next(source))
        return result

    def _answers(self, case: _Case, leaves: list[Any]) -> bool:
        assert case.asks is not None
        try:
            with torch.no_grad():
                values = case.asks.run(*leaves, case.asks.fetch())
        except Exception:  # a guard asks for the third of two values: leave it to the plain forward
            if self.spread:  # it has none
                raise
            return False
        found = [g.convert(v) for g, v in zip(case.traced.guards, values, strict=True)]
        return all(
            now == g.expected and (type(now) is not float or alike(now, g.expected))
            for g, now in zip(case.traced.guards, found, strict=True)
        )

    def unfused(self) -> str | None:
        """Why the graph no longer matches the modules, or None."""
        if any(self.hooks):
            return "a hook was added to a module that is rewritten"
        why = None if self.entries.stand() else self._changed()
        if why is not None:
            return why
        if self.probe is not None:
            slots, key, dtype = self.probe
            kept = slots.get(key)
            if (kept is not None and kept.dtype != dtype) or torch.is_autocast_enabled("cpu"):
                return "the dtypes are not those of the example, and forward reads dtypes"
        for held, path, name, value in self.reads:
            now = held.get(name, _ABSENT)
            if now is not value and not alike(now, value):
                return f"{'.'.join(p for p in (path, name) if p)} was {value!r} and is now {now!r}"
        return surroundings.changed(self.checks)

    def _changed(self) -> str | None:
        """The first entry that has changed to another object that is not equivalent."""
        for slots, key, module in self.links:
            if slots.get(key) is not module:
                return f"the module {key!r} was replaced"
        for held, forward, path in self.forwards:
            if held.get("forward") is not forward and not surroundings.ours(held):
                return f"{path}.forward was changed"
        for ask, held, before, path in self.settings:
            if not alike(ask(held), before):
                return f"a setting of {path} was {before} and is now {ask(held)}"
        return None

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's own forward, over the same parameters."""
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.root).forward(self.root, *args, **kwargs)

    def warn(self, why: str) -> None:
        """Warn once that the plain forward runs. Raises UsageError if it cannot."""
        if self.spread:
            raise UsageError(
                f"{self.name} cannot run: {why}",
                why="the plain forward would run instead, and it reads whole tables",
                tries=("call recast.optimize after such a change, and not before",),
            )
        change = why.partition(" and is now ")[0]  # once, even if the value changes at each step
        if change not in self.warned:
            self.warned.add(change)
            warnings.warn(
                f"{self.name} runs its plain forward: {why}. The numbers are the same, the speed is"
                " not; call recast.optimize again after such a change",
                RecastWarning,
                stacklevel=6,
            )

    # ------------------------------------------------------------ keeping

    def __getstate__(self) -> dict[str, Any]:
        asks = {m: pack(t.asks) for m, t in self.traced.items() if t.asks is not None}
        traced = {}
        for mode, t in self.traced.items():
            kept = dict(vars(t))
            kept["graph"] = kept["asks"] = None
            traced[mode] = kept
        return {
            "name": self.name, "root": self.root, "signature": self.signature, "asks": asks,
            "graphs": {m: pack(g) for m, g in self.graphs.items()}, "traced": traced,
            "spread": self.spread, "kinds": self.kinds,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self.root = state["name"], state["root"]
        self.signature = state["signature"]
        self.graphs = {m: unpack(g) for m, g in state["graphs"].items()}
        self.traced = {}
        for mode, kept in state["traced"].items():
            asks = unpack(state["asks"][mode]) if mode in state["asks"] else None
            self.traced[mode] = Traced(**{**kept, "graph": self.graphs[mode], "asks": asks})
        self.warned = set()
        self.spread, self.kinds = state["spread"], state["kinds"]
        self.swapped = None
        self.built = False  # at the first call: what is being loaded is not whole yet


def _fetch(program: Program) -> tuple[Any, ...] | None:
    try:
        return program.fetch()
    except (KeyError, AttributeError):
        return None


def _leaves_python() -> bool:
    """Whether the call is being exported to where our operations are unknown: by
    ``torch.jit.trace``, ``torch.export`` or ``torch.onnx``.
    """
    return torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()


def _within_layer(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module lies inside a layer of torch, which calls it itself."""
    parts = path.split(".")
    return any(
        torch_layer(type(modules[above])) for k in range(1, len(parts))
        if (above := ".".join(parts[:k])) in modules
    )  # fmt: skip


def explain(error: Exception, program: Program) -> None:
    """Add the module path and the user's line to an error raised inside generated code."""
    node = rescue.failing(error, program)
    if node is None:
        return
    where = note(node).where
    origin = _short(note(node).origin)
    if isinstance(error, RecastError):
        named = _table(error.what, node)
        error.what = _TABLE.sub(f"table {named}", error.what) if named else error.what
        if error.where is None:
            error.where = " ".join(p for p in (where or node.name, f"({named or origin})") if p)
        error.args = (error.what, error.where, error.why, error.tries)
        return
    error.add_note(f"  at   {where or node.name} in {origin or 'forward'} (node {node.name})")


def _table(what: str, node: Node) -> str | None:
    """The user's name for a table that an operation knows only by its index."""
    found, first = _TABLE.search(what), node.args[0] if node.args else None
    if found is None or not isinstance(first, (list, tuple)) or int(found[1]) >= len(first):
        return None
    table = first[int(found[1])]
    return str(table.target) if isinstance(table, Node) and table.op == "get_attr" else None


def _short(origin: Iterable[str]) -> str:
    names = list(origin)
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]}"
