"""Runs the graphs of one module, or its plain forward where they do not apply.

The plain forward is always right, so everything that a graph takes for granted is checked first:
the form of the arguments, the training flags, the guards, and that no module whose call was fused
has been hooked or replaced.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from recast.errors import RecastError, RecastWarning, UsageError
from recast.rewriter import memory
from recast.rewriter.capture import argument_writes
from recast.rewriter.capture.trace import Traced
from recast.rewriter.ir import Graph, Node, note
from recast.rewriter.rule import resolve

from . import fallback, plain_calls
from .assumptions import Assumptions
from .codegen import Program, compile_graph
from .copies import modules_by_path
from .graph_pickle import pack, unpack
from .known_calls import KnownCalls
from .plain_calls import FORM, Why
from .signature import OTHER_FORM, Signature, class_forward
from .trees import rebuild
from .undo import Snapshot, Undo, undo_of
from .value_checks import alike
from .wide_inputs import cast_inputs, too_wide

_ABSENT = object()
_MIXED = "some modules are in train mode and some in eval mode, and forward asks which"
_MOST_SIZES = 64
_autograd: Any = torch._C._autograd
_tracing_state = torch._C._get_tracing_state
_saved_hooks = _autograd._top_saved_tensors_default_hooks
_TABLE = re.compile(r"\btable (\d+)\b")


@dataclass
class _Case:
    """One graph, ready to run."""

    graph: Graph
    program: Program
    asks: Program | None
    asked: tuple[int, ...]  # the flat inputs that it reads
    answered: set[Hashable]  # for which sizes of them the answers were those of the example
    traced: Traced
    leaves: tuple[tuple[dict[str, Any], str, Any], ...]  # attributes to set after a call
    undo: Undo | None
    empty: set[str]  # what the graph reads that was None when this was made
    lazy: tuple[int, ...]  # the flat inputs that torch may have yet to negate
    cast: tuple[int, ...]  # the flat inputs whose dtype a rule's cast hides

    counts: bool = field(init=False)  # it stores numbers that forward keeps

    def __post_init__(self) -> None:
        self.counts = self.traced.stores_numbers


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
        self.known: KnownCalls | None = None
        self.kinds: dict[str, str] | None = None  # the class of every module, as first built
        self.outline: dict[str, Any] | None = None  # what the graphs took from them, as first built
        self.outdated: str | None = None  # what was changed before a copy was first called
        self.spread = False  # the tables are spread over ranks: only the graphs can run
        self.lazy = False  # the optimizer leaves rows that have no gradient as they are

    # ------------------------------------------------------------ making

    def build(self) -> None:
        """Generate the code, and list what must not change."""
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            _build_apart(self)  # it may take up any function, in a first call that is compiled
        else:
            self._build()

    def _build(self) -> None:
        self.known = None
        self.original = vars(self.root).get("forward")
        taken = getattr(getattr(self.original, "__self__", None), "_runner", None)
        if taken is not None and taken.root is self.root:
            self.original = None  # ours
        held = inspect.getattr_static(type(self.root), "forward")
        self.method = isinstance(held, FunctionType)
        modules = modules_by_path(self.root)
        kinds = {p: f"{type(m).__module__}.{type(m).__qualname__}" for p, m in modules.items()}
        self.kinds = kinds if self.kinds is None else self.kinds
        swapped = next((p for p, k in self.kinds.items() if kinds.get(p) != k), None)
        self.outdated = None if swapped is None else f"the module {swapped!r} was replaced"
        if self.graphs and self.outdated is None:
            self._assume(modules)
        graphs = {} if self.outdated is not None else self.graphs
        self.cases = {mode: self._case(mode, graph, modules) for mode, graph in graphs.items()}
        if self.cases:
            forks = sorted({p for t in self.traced.values() for p in t.forks})
            self.flags = [vars(modules[p]) for p in forks]
            if self.signature is not None:
                lazy = {k for case in self.cases.values() for k in case.lazy}
                self.known = KnownCalls(self.signature, self.assumptions, lazy)
        self.built = True  # at last: another thread may ask

    def _assume(self, modules: dict[str, nn.Module]) -> None:
        """List what the graphs take for granted, and see whether it was so when they were made."""
        traced = self.traced.values()
        self.assumptions = Assumptions(modules, self.graphs, traced, self.signature)
        if self.outline is None:
            self.outline = self.assumptions.outline
        self.outdated = self.assumptions.changed_since(self.outline)

    def _case(self, mode: str, graph: Graph, modules: dict[str, nn.Module]) -> _Case:
        traced = self.traced[mode]
        asks = traced.asks
        return _Case(
            graph,
            compile_graph(graph, self.root, f"{self.name} {mode}"),
            None if asks is None else compile_graph(asks, self.root, "guards"),
            tuple(self.asked(mode)),
            set(),
            traced,
            tuple((vars(modules[p]), n, v) for p, n, v in traced.leaves),
            undo_of(graph, self.root, whole=traced.stores_numbers),
            fallback.emptied(graph, self.root),
            _may_be_lazy(graph, () if self.signature is None else self.signature.dtypes),
            cast_inputs(graph),
        )

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
        found = self.fitting(args, kwargs)
        return None if found is None or self.why_stale() is not None else found

    def fitting(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, list[Any]] | None:
        """The same, whether or not the modules have changed since."""
        if not self.built:
            self.build()
        mode = self.mode()
        leaves = None if mode is None else self._flat(args, kwargs)
        if mode is None or leaves is None or not self._takes(self.cases[mode], leaves):
            return None
        return mode, leaves

    def covers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether such a call runs by a graph in each mode, whatever the present one."""
        if not self.built:
            self.build()
        leaves = self._flat(args, kwargs)
        if leaves is None or not self.cases or self.why_stale() is not None:
            return False
        return all(self._takes(case, leaves) for case in self.cases.values())

    def resembles(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether such a call has the structure and the constants of the example."""
        if self.signature is None:
            return False
        _, why = self.signature.leaves(self.signature.bind(args, kwargs))
        return why is None or not why.startswith(OTHER_FORM)

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The values of the placeholders, unless a call with these arguments runs plain."""
        if self.outdated is not None or self.signature is None:
            return None
        leaves, why = self.signature.leaves(self.signature.bind(args, kwargs))
        return leaves if why is None and self.signature.other_kind(leaves) is None else None

    def _takes(self, case: _Case, leaves: list[Any]) -> bool:
        try:
            return case.asks is None or self._answers(case, leaves)
        except Exception:  # on ranks, of a guard that cannot be computed: a call says so
            return False

    def asked(self, mode: str) -> list[int]:
        """The indices of the placeholders whose values or sizes the guards of a graph read."""
        asks = self.traced[mode].asks
        inputs = [] if asks is None else [n for n in asks.nodes if n.op == "placeholder"]
        return [k for k, n in enumerate(inputs) if n.users]

    # ------------------------------------------------------------ running

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, piecewise: bool = False
    ) -> Any:
        """``forward(*args, **kwargs)``. ``piecewise``: torch.compile follows it from call to call,
        with breaks.
        """
        compiling = torch.compiler.is_compiling()
        call = None if compiling or piecewise else self.known_call(args, kwargs)
        if call is not None:
            return self._go(*call, args, kwargs, False)
        if not self.built:
            self.build()
        signature = self.signature
        if signature is None or not self.cases:  # then no table is spread
            if self.outdated is not None:
                self.warn(self.outdated)
            return self.plain(args, kwargs)
        if not self.spread and _leaves_python():
            _check_memory(self.name, self.root)
            return self.plain(args, kwargs)
        ordered = signature.bind(args, kwargs)
        known = None if compiling or piecewise else self.known
        examination = None if known is None else known.examine()
        leaves, why = signature.leaves(ordered)
        of_call = why is not None
        mode = self.mode()
        case = None if mode is None else self.cases[mode]
        if why is None and not compiling:
            why = _apart(self.assumptions) if piecewise else self.assumptions.broken()
        if why is None:
            why = _MIXED if case is None else self._unfit(case, ordered, leaves, compiling)
        if why is not None or case is None or mode is None:
            self.warn(Why(why or _MIXED, FORM if of_call else None))
            return self.plain(args, kwargs)
        if case.counts and not compiling and _saved_hooks(True) is not None:
            self.warn("torch calls it twice, as activation checkpointing does, and it counts")
            return self.plain(args, kwargs)
        held = _fetch(case.program)
        if held is None:
            self.warn(f"{fallback.gone(self.graphs[mode], self.root)} that the graph reads is gone")
            return self._without(args, kwargs)
        if case.asks is not None and not self._answers(case, leaves):
            why = "control flow that depends on values goes another way than in the example"
            self.warn(Why(why, FORM))
            return self.plain(args, kwargs)
        other = None if self.spread or compiling else self._other_dtype(case, leaves)
        if other is not None:
            try:
                result = self.plain(args, kwargs)
            except Exception as error:
                raise self._said_by(case, leaves, held, ordered) or error from None
            self.warn(Why(other, FORM))
            return result
        if examination is not None and known is not None:
            known.admit(examination, ordered)
        return self._go(case, leaves, held, ordered, args, kwargs, compiling, piecewise)

    def _go(
        self, case: _Case, leaves: list[Any], held: tuple[Any, ...], ordered: tuple[Any, ...],
        args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool, piecewise: bool = False,
    ) -> Any:  # fmt: skip
        """Run the graph; the plain forward if it cannot take this call after all."""
        snapshot = None
        if case.undo is not None and not compiling:
            snapshot = case.undo.snapshot(self.root, leaves)
        try:
            return self._run(case, leaves, held, ordered, compiling or piecewise)
        except Exception as error:
            if case.counts and not (self.spread or compiling):
                return self._counted(error, snapshot, args, kwargs)
            why = self._why_plain(error, case, leaves, snapshot)
            if why is None:
                raise
            said = error
        try:
            result = self.plain(args, kwargs)
        except Exception:
            if why.remedy == fallback.FEWER_ROWS:
                raise said from None  # which says more
            raise
        self.warn(why, inside=1)  # not before: it may refuse these arguments, too
        return result

    def known_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Case, list[Any], tuple[Any, ...], tuple[Any, ...]] | None:
        """What to run, if such a call was examined before, and nothing has changed since; None
        if this one has to be.
        """
        if self.known is None or _tracing_state() is not None:
            return None
        case = self.cases.get(self.mode() or "")
        if case is None or case.traced.argument_writes:
            return None
        if case.counts and _saved_hooks(True) is not None:
            return None
        assert self.signature is not None
        if len(args) != len(self.signature.names):
            ordered = self.signature.in_order(args, kwargs)
            if ordered is None:
                return None
            args = ordered
        elif kwargs:
            return None
        leaves = self.known.inputs(args)
        held = None if leaves is None else _fetch(case.program)
        if leaves is None or held is None:
            return None
        if case.asks is not None and not self._answers(case, leaves):
            return None
        return case, leaves, held, args

    def _why_plain(
        self, error: Exception, case: _Case, leaves: list[Any], snapshot: Snapshot | None
    ) -> Why | None:
        """Why the plain forward is to run after the graph raised ``error``; None if it is not."""
        assert self.signature is not None
        if self.spread:
            return None
        return fallback.why_fall_back(
            error, case.program, case.graph, self.root, leaves, self.signature,
            case.traced.catches, case.empty, snapshot,
        )  # fmt: skip

    def _said_by(
        self, case: _Case, leaves: list[Any], held: tuple[Any, ...], ordered: tuple[Any, ...]
    ) -> RecastError | None:
        """What the graph says is wrong with inputs that the plain forward refuses: it says more."""
        try:
            self._run(case, leaves, held, ordered, False)
        except RecastError as error:
            return error
        except Exception:
            return None
        return None

    def _counted(
        self, error: Exception, snapshot: Snapshot | None, args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """The plain forward after the graph raised ``error``: it may have changed the numbers that
        it keeps before it raises, which the graph does at its end.
        """
        if snapshot is not None:
            snapshot.restore_all()
        try:
            result = self.plain(args, kwargs)
        except Exception:
            raise error from None  # which says more
        why = f"the graph raised {type(error).__name__}, and the plain forward did not"
        self.warn(why, inside=2)
        return result

    def compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call where torch.compile has stopped, on ranks, and takes up what is between
        exchanges.
        """
        return self(args, kwargs, piecewise=True)

    def _unfit(
        self, case: _Case, ordered: tuple[Any, ...], leaves: list[Any], compiling: bool
    ) -> str | None:
        """Why the graph would misread these arguments, or None."""
        if not compiling:
            assert self.signature is not None
            why = self.signature.unresolved(leaves, case.lazy)
            if why is not None:
                return why
        written = case.traced.argument_writes
        if written and argument_writes.shared(ordered, [place for place, _ in written]):
            return "a dict that forward writes to is given to it in two places"
        return None

    def _other_dtype(self, case: _Case, leaves: list[Any]) -> str | None:
        """Which input has a dtype with which torch would compute something else, or None."""
        assert self.signature is not None
        wide = too_wide(leaves, case.cast, self.signature.labels, self.root) if case.cast else None
        return self.signature.other_kind(leaves) or wide

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
        self, case: _Case, leaves: list[Any], held: tuple[Any, ...], ordered: tuple[Any, ...],
        compiling: bool,
    ) -> Any:  # fmt: skip
        traced = case.traced
        if compiling:
            result = case.program.trace(*leaves, held)
        else:
            try:
                result = case.program.run(*leaves, held)
            except Exception as error:
                explain(error, case.program)
                if isinstance(error, torch.OutOfMemoryError):
                    memory.explain(error, self.root)
                raise
        if traced.stores or traced.entries or traced.argument_writes:
            result, stored = result
            self._store(traced, stored, ordered)
        for owned, name, value in case.leaves:
            if not alike(owned.get(name, _ABSENT), value):
                owned[name] = copy.copy(value)
        if traced.template is not None:
            source = iter(result)
            result = rebuild(traced.template, lambda _: next(source))
        return result

    def _store(self, traced: Traced, stored: Iterable[Any], ordered: tuple[Any, ...]) -> None:
        """Write what forward would have written to attributes, and to the dicts it was given."""
        beside = iter(stored)
        for path in traced.stores:
            owner, _, name = path.rpartition(".")
            setattr(resolve(self.root, owner) if owner else self.root, name, next(beside))
        for path, key in traced.entries:
            resolve(self.root, path)[key] = next(beside)
        for (*place, key), form in traced.argument_writes:
            entries: Any = ordered
            for one in place:
                entries = entries[one]
            entries[key] = rebuild(form, lambda _: next(beside))

    def _answers(self, case: _Case, leaves: list[Any]) -> bool:
        assert case.asks is not None
        sizes = None
        try:
            held = case.asks.fetch()
            if case.traced.by_size and not torch.compiler.is_compiling():
                sizes = _sizes((*(leaves[k] for k in case.asked), *held))
                if sizes in case.answered:
                    return True
            with torch.no_grad():
                values = case.asks.run(*leaves, held)
        except Exception:  # a guard asks for the third of two values: leave it to the plain forward
            if self.spread:  # it has none
                raise
            return False
        found = [g.convert(v) for g, v in zip(case.traced.guards, values, strict=True)]
        same = all(
            now == g.expected and (type(now) is not float or alike(now, g.expected))
            for g, now in zip(case.traced.guards, found, strict=True)
        )
        if same and sizes is not None:
            if len(case.answered) >= _MOST_SIZES:
                case.answered.clear()
            case.answered.add(sizes)
        return same

    def why_stale(self) -> str | None:
        """Why the graphs no longer match the modules, or None."""
        return self.assumptions.broken() if self.cases else self.outdated

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's own forward, over the same parameters."""
        if self.original is not None:
            return self.original(*args, **kwargs)
        if self.method:
            return type(self.root).forward(self.root, *args, **kwargs)
        return class_forward(self.root)(*args, **kwargs)

    def warn(self, why: Why | str, inside: int = 0) -> None:
        """Warn once that the plain forward runs, at the line that called the module; ``inside``:
        how many calls below :meth:`__call__`. Raises UsageError if it cannot.
        """
        why = Why(why) if isinstance(why, str) else why
        if self.spread:
            raise plain_calls.refusal(self.name, why, self.root)
        if why.cause not in self.warned:
            self.warned.add(why.cause)
            text = plain_calls.warning(self.name, why, self.root, self.lazy)
            warnings.warn(text, RecastWarning, stacklevel=6 + inside)

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
            "spread": self.spread, "kinds": self.kinds, "outline": self.outline,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self.root = state["name"], state["root"]
        self.signature = state["signature"]
        self.graphs = {m: unpack(g) for m, g in state["graphs"].items()}
        self.traced = {}
        for mode, kept in state["traced"].items():
            asks = unpack(state["asks"][mode]) if mode in state["asks"] else None
            self.traced[mode] = Traced(**{**kept, "graph": self.graphs[mode], "asks": asks})
        self.warned, self.lazy = set(), False
        self.spread, self.kinds = state["spread"], state["kinds"]
        self.outline, self.outdated, self.known = state["outline"], None, None
        self.built = False  # at the first call: what is being loaded is not whole yet


def _sizes(values: Iterable[Any]) -> Hashable | None:
    """The sizes of tensors, and values that are none; None if one has other facts."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_nested:
                return None
            found.append((value.shape, value.device))
        elif value is None or type(value) in (int, float, bool, str):
            found.append((type(value), value))
        else:
            return None
    return tuple(found)


def _fetch(program: Program) -> tuple[Any, ...] | None:
    try:
        return program.fetch()
    except (KeyError, AttributeError):
        return None


def _leaves_python() -> bool:
    """Whether the call is being exported to where our operations are unknown: by
    ``torch.jit.trace``, ``torch.export`` or ``torch.onnx``.
    """
    return _tracing_state() is not None or torch.compiler.is_exporting()


def _check_memory(name: str, root: nn.Module) -> None:
    """Raise UsageError for what ``torch.jit.trace`` takes and ``torch.jit.save`` crashes on: a
    parameter that is made of other tensors, as a table that is stored in fewer bits.
    """
    if _tracing_state() is None:
        return
    for path, held in root.named_parameters():
        if hasattr(held, "__tensor_flatten__"):  # torch's own name: it has no memory of its own
            raise UsageError(
                f"TorchScript cannot trace {name}: its {path} is made of other tensors",
                why="TorchScript saves the memory of a tensor, and this one has none",
                tries=("torch.export.export(result, batch)", "trace the plain model"),
            )


@_disable_dynamo  # torch.compile does not know our extension
def _build_apart(runner: Runner) -> None:
    runner._build()


@_disable_dynamo
def _apart(assumptions: Assumptions) -> str | None:
    """What no longer holds, or None."""
    return assumptions.broken()


def _may_be_lazy(graph: Graph, dtypes: tuple[torch.dtype, ...]) -> tuple[int, ...]:
    """The flat inputs that torch may have yet to negate. It does so with parts of complex tensors,
    never with integers: to view those parts as integers is refused, to convert them negates. What
    was an integer in the example may be of another dtype now, unless only our operations read it.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return tuple(
        k
        for k, (node, dtype) in enumerate(zip(inputs, dtypes, strict=False))
        if dtype.is_floating_point or dtype.is_complex or not all(map(_is_ours, node.users))
    )


def _is_ours(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "recast"


def explain(error: Exception, program: Program) -> None:
    """Add the module path and the user's line to an error raised inside generated code."""
    node = fallback.failing(error, program)
    if node is None:
        return
    where = note(node).where
    origin = _short(note(node).origin)
    if isinstance(error, RecastError):
        named = _table(error.what, node)
        error.what = _TABLE.sub(f"table {named}", error.what) if named else error.what
        if error.where is None:
            inside = f" ({named or origin})" if named or origin else ""
            error.where = f"{where or node.name}{inside}"
        error.args = (error.what, error.where, error.why, error.tries)
        return
    error.add_note(f"  at   {where or node.name} in {origin or 'forward'} (node {node.name})")


def _table(what: str, node: Node) -> str | None:
    """The user's name for a table that an operation knows only by its index."""
    found, first = _TABLE.search(what), node.args[0] if node.args else None
    if found is None or not isinstance(first, (list, tuple)) or int(found[1]) >= len(first):
        return None
    table = first[int(found[1])]
    if not isinstance(table, Node) or table.op != "get_attr":
        return None
    return str(table.target).removesuffix(".packed")  # the rows of a table that is stored


def _short(origin: Iterable[str]) -> str:
    names = list(origin)
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]}"
