"""One trace: takes a model, two batches and a mode; returns a tidy graph with its guards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import nn

from recast.rewriter.compiled import code_names
from recast.rewriter.compiled.baked_values import global_values, of_classes, taken_by_trace
from recast.rewriter.compiled.copies import modules_by_path, unregistered
from recast.rewriter.compiled.external_state import BakedValue, Check, checks, slot
from recast.rewriter.compiled.homes import named
from recast.rewriter.compiled.object_contents import Absent
from recast.rewriter.compiled.signature import Signature
from recast.rewriter.compiled.trees import Hole, atoms, flatten, rebuild
from recast.rewriter.compiled.undo import undo_of
from recast.rewriter.compiled.value_checks import (
    Function,
    NotComparable,
    ProcessLocal,
    Same,
)
from recast.rewriter.compiled.visible_names import visible_names
from recast.rewriter.ir import KEY, Graph, Node, note

from . import frames, tidy
from .argument_writes import ArgumentContents, Place, holds_itself
from .attribute_writes import State, attribute_writes, state
from .distributions import traced_shapes
from .dynamic_sizes import check_sizes
from .guards import Guard, ask
from .intercept import Recorder
from .muted import muted
from .numpy_calls import Array
from .opaque_calls import OpaqueCall, transformed
from .operands import argument
from .plain_model import live_copy, run_plain
from .python_reads import bound_on_class
from .refused import UNREGISTERED, Refused, not_comparable, refusal
from .shapes import Shape
from .squeezes import Squeezed, squeezed
from .tracer import Tracer
from .values import Flag, make


@dataclass
class Traced:
    """A graph, and the assumptions that it was made under."""

    graph: Graph
    forks: frozenset[str]  # modules whose training flag decided the control flow
    guards: tuple[Guard, ...] = ()
    asks: Graph | None = None  # computes the guarded values from the inputs
    by_size: bool = False  # their sizes alone decide them
    stores: tuple[str, ...] = ()  # attributes that forward leaves behind: the second output
    entries: tuple[tuple[str, Any], ...] = ()  # of dicts, (attribute, key): behind ``stores``
    template: Any = None  # structure of the user's output, if more than tuples, lists and dicts
    baked: frozenset[str] = frozenset()  # inputs whose fixed sizes the graph relies on
    strict_dtypes: bool = False
    computed_dtypes: bool = False  # it read those of more than inputs and parameters
    reads: tuple[tuple[str, str, Any], ...] = ()  # (module, attribute, value) that the graph bakes
    leaves: tuple[tuple[str, str, Any], ...] = ()  # plain attributes that every call leaves behind
    taken: tuple[BakedValue, ...] = ()  # what else it took from Python
    opaque_calls: tuple[str, ...] = ()  # functions that run as they are, with their line
    catches: bool = False  # forward catches errors: an error of the graph may not be the model's
    # entries that forward writes into dicts that it is given, in the form of ``template``; their
    # tensors come behind ``entries``
    argument_writes: tuple[tuple[Place, Any], ...] = ()
    prints: tuple[str, ...] = ()  # lines that print or log, which the graph does not
    numbers: tuple[str, ...] = ()  # attributes that are read anew at each call
    squeezes: Squeezed = field(default_factory=Squeezed)  # the sizes that decide ranks

    @property
    def stores_numbers(self) -> bool:
        """Whether it stores numbers that forward keeps: it counts."""
        return not {*self.numbers}.isdisjoint(self.stores)


def trace(
    root: nn.Module,
    signature: Signature,
    first: tuple[Any, ...],
    pairs: list[tuple[Any, Any]],
    *,
    training: bool,
    sizes: tuple[int, int],
    opaque: frozenset[str] = frozenset(),
    prefix: str = "",
    plain_flags: bool = False,
    sizes_kept: frozenset[str] = frozenset(),
    outside: frozenset[CodeType] = frozenset(),
    numbers: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> Traced:
    """Trace ``root.forward``. Raises :class:`Refused`.

    Callers of this function do not count as code of the model: :meth:`.tracer.Tracer.where` stops
    at a function with this name.
    """
    tracer = Tracer(
        root, live_copy(root), training=training, sizes=sizes, opaque=opaque, prefix=prefix,
        plain_flags=plain_flags, sizes_kept=sizes_kept, outside=outside, numbers=numbers,
    )  # fmt: skip
    before = state(tracer.scratch)
    hidden = [(at, vars(m), dict(vars(m))) for at, m in unregistered(tracer.scratch).items()]
    shared = _shared(root)
    try:
        with torch.enable_grad(), Recorder(tracer):
            with tracer.quiet():
                inputs = _inputs(tracer, signature, first, pairs)
            arguments = ArgumentContents(zip(signature.every_name, inputs, strict=True))
            args, kwargs = signature.unbind(inputs)
            with muted(), traced_shapes(), tracer.reading.watching(tracer.refuse):
                result = tracer.scratch.forward(*args, **kwargs)
            frozen = not torch.is_grad_enabled()
    except Refused as error:
        _leave(error)
        raise
    except Exception as error:
        _leave(error)
        raise _refused(tracer, error) from error
    if tracer.failed is not None:
        raise tracer.failed
    if tracer.raised is not None:
        raise refusal(
            "forward goes on after an error of this call, which other inputs may not raise",
            *tracer.raised,
        )
    if frozen:
        raise refusal("forward switches gradients off and leaves them so", None, "")
    _check_unregistered(hidden)
    bound = bound_on_class(tracer.scratch.modules())
    if bound is not None:
        where = frames.line_of_write(tracer.reading.codes, bound.rpartition(".")[2])
        raise refusal(f"forward changes {bound}", where, "")
    written = arguments.written()
    if isinstance(written, str) or not all(map(_entry, written.values())):
        changed = written if isinstance(written, str) else "an argument"
        raise refusal(f"forward changes what is in {changed}: its caller sees that", None, "")
    _check_kinds(tracer, sizes_kept, bool(numbers))
    _check_shared(tracer, shared)
    try:
        return _finish(tracer, result, before, written, partial(_kept, tracer, signature, first))
    except NotComparable as error:
        raise not_comparable(error) from None


def _check_unregistered(hidden: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    """Refuse a forward that sets attributes of modules in plain containers: (at, now, before)."""
    for at, now, before in hidden:
        for name in now.keys() | before.keys():
            if now.get(name, Absent) is not before.get(name, Absent):
                where = at.partition(",")[0]
                refused = refusal(f"forward changes {name} of a module in self.{where}", None, "")
                refused.tries = UNREGISTERED
                raise refused


def _check_kinds(tracer: Tracer, sizes_kept: frozenset[str], numbers: bool) -> None:
    """Refuse a forward that may see that a traced value is of another type, unless types are told
    as they are (``sizes_kept``) or, of numbers, it keeps some.
    """
    name = code_names.asks_type(tracer.reading.codes) if "type" not in sizes_kept else None
    if name is not None:
        refused = refusal(f"{name}() asks for the exact type of a tensor", None, "")
        refused.size = "type"
        raise refused
    if "isinstance" not in sizes_kept and not numbers and _takes_numbers(tracer):
        refused = refusal("forward asks what kind of value a number of the batch is", None, "")
        refused.size = "isinstance"
        raise refused


def _check_shared(tracer: Tracer, shared: list[tuple[Check, str]]) -> None:
    """Refuse a forward that changed a global or an attribute of a class."""
    for (question, of, held, label), home in shared:
        if not held.same(question(*of)):
            raise _changes(tracer, label.removeprefix(f"{home}."), home)
    for name, home in () if tracer.copies is None else tracer.copies.rebound():
        raise _changes(tracer, name, home)


def _changes(tracer: Tracer, name: str, home: str) -> Refused:
    where = frames.line_of_write(tracer.reading.codes, name.rpartition(".")[2])
    return refusal(f"forward changes {name}{_of(home)}", where, "")


def _takes_numbers(tracer: Tracer) -> bool:
    """Whether forward takes a Python number out of a tensor, and names what tells kinds apart."""
    taken = any(n.target == "item" for n in tracer.graph.nodes)
    return taken and any(_KINDS & code_names.names_in(code) for code in tracer.reading.codes)


_KINDS = frozenset({"isinstance", "hasattr", "is_tensor"})


def _shared(root: nn.Module) -> list[tuple[Check, str]]:
    """Globals and class attributes that the model's methods name, since forward may write to them;
    of functions, what was set on them.
    """
    codes = code_names.codes_of(root)
    modules = modules_by_path(root)
    seen = visible_names(codes, modules)
    found = global_values(codes, seen, strict=False)
    taken = [BakedValue("global", module, name, held) for (module, name), held in found.items()]
    with suppress(NotComparable):  # said where forward reads it
        taken += of_classes(modules, seen)
    shared = []
    for one in taken:
        kept = one.check.check if type(one.check) is ProcessLocal else one.check
        if isinstance(kept, Function):
            kept = seen.whole_function(kept)
        home = named(one.owner) if one.kind == "global" else ""
        shared += [(check, home) for check in checks((replace(one, check=kept),), modules)]
    return shared


def _of(home: str) -> str:
    return f", a global of {home}" if home else ""


def _leave(error: BaseException) -> None:
    """Leave the contexts that the frames of ``error`` hold open: before torch 2.13 ``checkpoint``
    keeps its hooks in a generator, which an error that is kept keeps too.
    """
    step, frames_passed = error.__traceback__, []
    while step is not None:
        frames_passed.append(step.tb_frame)
        step = step.tb_next
    for frame in reversed(frames_passed):
        with suppress(RuntimeError):  # it is running
            frame.clear()


def _refused(tracer: Tracer, error: Exception) -> Refused:
    """The user's line, and the reason, for an error raised under the trace."""
    if isinstance(tracer.failed, Refused):
        return tracer.failed
    refused = transformed(frames.transform(None, error), tracer.innermost or "")
    if refused is not None:
        return refused
    if type(error).__module__.startswith("torch._dynamo"):
        why = "forward uses torch.compile, or what is made with it, inside which no trace can look"
        refused = refusal(why, frames.raised_at(error), tracer.innermost or "")
        refused.tries = (
            "the plain function; torch.compile works around the result of optimize",
            *refused.tries[-1:],
        )
        return refused
    text = str(error).strip().splitlines()
    why = f"{type(error).__name__}: {text[0] if text else ''}"
    refused = refusal(why, frames.raised_at(error), tracer.innermost or "")
    refused.error = True
    if frames.passed_torch(error, "_refs"):  # torch.broadcast_shapes
        refused.size = "numpy"
    return refused


def _inputs(
    tracer: Tracer, signature: Signature, first: tuple[Any, ...], pairs: list[tuple[Any, Any]]
) -> tuple[Any, ...]:
    """The arguments of forward with every tensor replaced by a Value."""
    values = []
    for (a, b), label in zip(pairs, _names(signature, len(pairs)), strict=True):
        own = [name for name in getattr(a, "__dict__", ()) if not name.startswith("_")]
        if own:
            raise refusal(f"the tensor {label} carries {own[0]}, which no graph hands on", None, "")
        pair: Any = tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in (a, b))
        node = tracer.node("placeholder", label, (), {}, pair, name=label)
        node.meta[KEY] = type(note(node))(spec=note(node).spec)
        values.append(make(tracer, (pair[0], pair[1]), static=False, node=node))
    count = len(pairs) - len(signature.numbers)
    tensors, numbers = iter(values[:count]), iter(values[count:])
    places, order = set(signature.numbers), iter(atoms(signature.key))
    number = lambda v: next(numbers) if next(order) in places else v  # noqa: E731
    made = rebuild(first, lambda t: next(tensors), number if places else None)
    if next(tensors, None) is not None:
        raise refusal("an argument cannot be made anew with other tensors in it", None, "")
    for k in signature.arrays:
        Array.of(made[k])
    return made


def _names(signature: Signature, count: int) -> list[str]:
    names = [*signature.labels, *(f"number_{k}" for k in range(count - len(signature.labels)))]
    return ["".join(c if c.isalnum() or c == "_" else "_" for c in name) for name in names]


def _finish(
    tracer: Tracer, result: Any, before: State, argument_writes: dict[Place, Any],
    kept: Callable[[str, str], bool],
) -> Traced:  # fmt: skip
    reading = tracer.reading
    stores, left, entries = attribute_writes(tracer.scratch, reading, before, kept, tracer.layers)
    if entries and tracer.opaque_calls:
        at, _ = next(iter(entries))
        called = next(iter(tracer.opaque_calls)).__name__
        raise refusal(f"forward sets entries of self.{at}, which {called}() may read", None, "")
    written = {(p, n) for p, n, _ in left}
    attributes = (*stores, *tracer.numbers, *(at for at, _ in entries))
    written |= {(p, n) for p, _, n in (s.rpartition(".") for s in attributes)}
    template = None
    if _simple(result):
        out = argument(tracer, result)
    else:
        leaves: list[Any] = []
        flatten(result, leaves, [])
        out, template = argument(tracer, tuple(leaves)), rebuild(result, lambda t: Hole())
    graph = tracer.graph
    beside = [_size(tracer, v) if type(v) is Shape else v for v in stores.values()]
    beside += entries.values()
    for value in argument_writes.values():
        flatten(value, beside, [])
    whole = (out, argument(tracer, tuple(beside))) if beside or argument_writes else out
    end = tracer.node("output", "output", (whole,), {}, (None, None), origin="")
    end.meta[KEY] = type(note(end))()
    tidy.functional(tracer)
    squeezes = squeezed(tracer)
    asks, guards, by_size = ask(tracer)
    tidy.drop_lost(tracer)
    default_dtype = tidy.fold(tracer)
    tidy.prune(graph)
    tidy.resolve_negated(graph, list(tidy.negated(tracer)))
    _check_held(tracer)
    graph.lint()
    _undoable(tracer)
    read = {n.target for g in (graph, asks) if g is not None for n in g.nodes if n.op == "get_attr"}
    numbers = {path: pair for path, pair in tracer.numbers.items() if path in {*read, *stores}}
    return Traced(
        graph,
        forks=frozenset(tracer.forks),
        guards=guards,
        asks=asks,
        by_size=by_size,
        stores=tuple(stores),
        entries=tuple(entries),
        template=template,
        baked=frozenset(n.name for n in tracer.baked),
        strict_dtypes=tracer.bakes_dtypes,
        computed_dtypes=tracer.bakes_computed_dtypes,
        reads=tuple((path, name, value) for (path, name), value in reading.plain.items()),
        leaves=tuple(left),
        taken=(
            *taken_by_trace(reading, modules_by_path(tracer.root), written, default_dtype),
            *(_number(path, pair) for path, pair in numbers.items()),
        ),
        opaque_calls=tuple(
            f"{target.__name__}() {where}" for target, where in tracer.opaque_calls.items()
        ),
        catches=any(map(code_names.catches, reading.codes)),
        argument_writes=tuple(
            (at, rebuild(value, lambda t: Hole())) for at, value in argument_writes.items()
        ),
        prints=tuple(reading.prints),
        numbers=tuple(numbers),
        squeezes=squeezes,
    )


def _check_held(tracer: Tracer) -> None:
    """Write the checks of sizes that layers give which run as they are."""
    for node, sizes in tracer.held_sizes.items():
        args = node, tuple(sorted(sizes.items())), str(node.target)
        with tracer.graph.inserting_after(node):
            made = tracer.graph.create_node("call_function", check_sizes, args)
        made.meta[KEY] = replace(note(node), spec=None)


def _number(path: str, pair: tuple[Any, ...]) -> BakedValue:
    """The check for an attribute of which only the type is the same at each call."""
    owner, _, name = path.rpartition(".")
    return BakedValue("number", owner, name, Same(type(pair[0])))


def _kept(
    tracer: Tracer, signature: Signature, first: tuple[Any, ...], path: str, name: str
) -> bool:
    """Whether the second call of the plain forward leaves what the first one made."""
    live = live_copy(tracer.root, tracer.training)
    module = live.get_submodule(path)
    try:
        run_plain(live, signature, first)
        made = slot(module, name)
        run_plain(live, signature, first)
    except Exception:  # another call than the first is what it does not take
        return False
    return slot(module, name) is made


def _undoable(tracer: Tracer) -> None:
    """Refuse if the plain forward could not take over from a function that leaves torch and gives
    another shape than in the examples.
    """
    for node in tracer.graph.nodes:
        call = node.target
        if not isinstance(call, OpaqueCall) or call.custom is not None or not call.keeps:
            continue
        if undo_of(tracer.graph, tracer.root) is None:
            why = (
                f"control flow depends on the shape that {call.__name__}() gives, which leaves"
                " torch: what forward does before it cannot be undone if that is another one"
            )
            raise refusal(why, note(node).where, "")


def _size(tracer: Tracer, shape: Shape) -> Node:
    """The node that makes a ``torch.Size`` of ``shape``."""
    sizes = argument(tracer, tuple(shape))
    return tracer.node("call_function", torch.Size, (sizes,), {}, (None, None))


def _entry(value: Any) -> bool:
    """Whether a graph can return what forward put into a dict."""
    if holds_itself(value):
        return False
    if isinstance(value, (tuple, list)):
        return _simple(value) and all(map(_entry, value))
    if type(value) is dict:
        return _simple(value) and all(map(_entry, value.values()))
    return _simple(value) and not isinstance(value, Flag)


def _simple(value: Any) -> bool:
    """Whether an output consists only of tuples, lists, dicts, tensors and plain constants."""
    if isinstance(value, (tuple, list)):
        known = type(value) in (tuple, list) or hasattr(value, "_fields")
        return known and all(_simple(v) for v in value)
    if type(value) is dict:
        return all(isinstance(k, str) and _simple(v) for k, v in value.items())
    return isinstance(value, (torch.Tensor, int, float, bool, str, type(None), Flag))
