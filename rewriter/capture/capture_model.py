"""Model to graph: tries to capture the whole model, then its parts, else leaves it as it is."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from recast.errors import CaptureError, UsageError
from recast.rewriter.compiled.array_inputs import arrays_in
from recast.rewriter.compiled.copies import (
    generators_of,
    modules_by_path,
    same_random_numbers,
    shallow_copy,
)
from recast.rewriter.compiled.linked_hooks import link_hooks
from recast.rewriter.compiled.signature import Signature, complete, of_forward
from recast.rewriter.compiled.trees import flatten
from recast.rewriter.ir import Graph
from recast.rewriter.order import renormalises
from recast.rewriter.report.journal import Missed

from . import batches as _batches
from .frames import raised_at
from .layers import shares_gradients, torch_layer, why_opaque
from .modes import trace_modes
from .moving_state import moved
from .plain_model import (
    Call,
    live_copy,
    place_of,
    record_calls,
    rehearse,
    run_plain,
    uncompile,
    uncompiled,
)
from .proof import disagreement, elsewhere
from .refused import Refused
from .restored_state import restored_globals, restored_objects, restored_tensors
from .squeezes import relying
from .symbolic import trace_without_example
from .trace import Traced
from .unread_entries import unread

ATTEMPTS = 12  # how many modules may be left as they are before capturing the whole is given up
_ONE_ROW = "Expected more than 1 value per channel when training"  # torch's batch norm
_MORE_ROWS = ("an example of several rows: both modes are captured", "example=[batch, other_batch]")
_NO_EXAMPLE = (
    "no example batch was given: no rewrite was proved by running it, and what needs the types or"
    " sizes of values was not tried; give one: example=batch"
)


@dataclass(frozen=True)
class Terms:
    """What a capture may rely on. ``falls_back``: the plain forward can take over at any call.
    ``varying``: numbers that are set between calls, by their paths in the model.
    """

    falls_back: bool = True
    varying: frozenset[str] = frozenset()

    def varying_in(self, prefix: str) -> frozenset[str]:
        """The numbers of the module at ``prefix``, by their paths in it."""
        start = f"{prefix}." if prefix else ""
        return frozenset(p.removeprefix(start) for p in self.varying if p.startswith(start))


@dataclass
class Captured:
    """A model as graphs over a copy of its module tree.

    ``graphs`` is ``{"both": g}``, or has one for ``"train"`` and one for ``"eval"`` if Python
    control flow depends on training flags, or is empty. ``parts`` are captures of submodules, by
    path; the root of a part is the module object inside ``root``. ``forms`` are captures of calls
    of other forms, with the same root. Targets of nodes are relative to ``root``; origins are full
    paths.
    """

    name: str
    root: nn.Module
    graphs: dict[str, Graph] = field(default_factory=dict)
    batches: tuple[Any, Any] | None = None
    sizes: tuple[int, int] | None = None
    fewer: _batches.Batches | None = None  # two of fewer rows, where these were cut from one
    kind: Literal["whole", "partial", "none"] = "none"
    parts: dict[str, Captured] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)  # parts left plain if nothing is gained
    forms: list[Captured] = field(default_factory=list)
    prefix: str = ""
    terms: Terms = field(default_factory=Terms)
    why: str | None = None
    where: str | None = None
    tries: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    misses: list[Missed] = field(default_factory=list)
    signature: Signature | None = None
    traced: dict[str, Traced] = field(default_factory=dict)
    seconds: float = 0.0


def capture(
    model: nn.Module, example: Any = None, *, forms: Sequence[Any] = (), inplace: bool = False,
    linked: bool = True, falls_back: bool = True, varying: Collection[str] = (),
) -> Captured:  # fmt: skip
    """Capture ``model``.

    ``example`` is one batch or a list of two (see :mod:`.batches`); without it the trace is plain
    symbolic tracing. ``forms`` are further examples, for calls of other forms. The model is not
    touched. ``linked``: parameters and buffers that are replaced later in ``model`` are replaced in
    the captured modules too, and the other way round. ``falls_back`` and ``varying``: see
    :class:`Terms`. Raises UsageError when an example does not fit.
    """
    model = uncompiled(model)
    root = model if inplace else shallow_copy(model, linked=linked)
    link_hooks(root, model)
    uncompile(root)
    name = type(model).__name__
    terms = Terms(falls_back, frozenset(varying))
    captured = _undisturbed(root, name, example, terms)
    for k, form in enumerate(forms):
        try:
            captured.forms.append(_undisturbed(root, name, form, terms))
        except UsageError as error:
            what = error.what.replace("example", f"forms[{k}]", 1)
            raise UsageError(what, where=error.where, why=error.why, tries=error.tries) from error
    return captured


def _undisturbed(root: nn.Module, name: str, example: Any, terms: Terms) -> Captured:
    """A capture that leaves random numbers, objects and tensors as they were."""
    started = time.perf_counter()
    same = same_random_numbers(*generators_of(root))
    state = restored_objects(root), restored_tensors(root), restored_globals(root)
    with same, state[0], state[1], state[2]:
        captured = _capture(root, name, example, terms)
    captured.seconds = time.perf_counter() - started
    return captured


def _capture(root: nn.Module, name: str, example: Any, terms: Terms) -> Captured:
    try:
        signature = _signature(root, example)
    except ValueError as error:
        return Captured(name, root, why=str(error), where=place_of(root))
    if example is None:
        return _without_example(root, name, signature)
    live = live_copy(root)
    for how, batch in zip(
        _batches.calls(example, signature), _batches.given(example, signature), strict=True
    ):
        _check_example(live, signature, batch, example, how)
    captured = _of_example(root, live, name, signature, example, terms)
    if captured.kind == "whole" or not signature.arrays:
        return captured
    no_arrays = replace(signature, arrays=())
    fixed = _of_example(root, live, name, no_arrays, example, terms)
    return fixed if fixed.kind == "whole" else captured  # its arrays are constants


def _of_example(
    root: nn.Module, live: nn.Module, name: str, signature: Signature, example: Any,
    terms: Terms,
) -> Captured:  # fmt: skip
    def accepts(args: tuple[Any, ...]) -> Any:
        return run_plain(live, signature, args)

    def trains(args: tuple[Any, ...]) -> bool:
        return rehearse(live_copy(root, training=True), signature, args)

    found = _batches.of_example(example, signature, accepts, trains)
    if found.second is None:
        return Captured(
            name, root, batches=None, why=found.how, where=place_of(root), tries=found.tries,
        )  # fmt: skip
    captured = capture_part(
        root, name, signature, found.first, found.second, found.sizes, "", terms
    )
    captured.notes += [found.note] if found.note else []
    captured.fewer = found.fewer
    return captured


def _signature(root: nn.Module, example: Any) -> Signature:
    """The parameters of forward. Where a decorator hands on arguments that the caller does not
    give, they are those of what the decorator made, not of what it wraps.
    """
    signature = of_forward(root)
    if example is not None:
        try:
            first = _batches.given(example, signature)[0]
        except UsageError:
            outer = of_forward(root, decorated=True)
            with suppress(UsageError):
                _batches.given(example, outer)
                return outer
            return signature
        signature.arrays = arrays_in(first[: len(signature.names)])
    return signature


def _check_example(
    live: nn.Module, signature: Signature, first: tuple[Any, ...], example: Any, how: str
) -> None:
    """Raise unless the plain model takes the example; ``first`` is what was made of it, and ``how``
    how the user would pass it.
    """
    tensors: list[Any] = []
    flatten(first, tensors, [])
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in tensors):
        raise UsageError(
            "example: it holds a tensor on meta",
            why="that has no numbers, and the result is compared with the model's on the example",
            tries=("a batch on the device of the model",),
        )
    try:
        run_plain(live, signature, first)
    except Exception as error:
        text = str(error).strip().splitlines()
        name = _batches.as_dict(first, signature)
        what = "it"
        tries: tuple[str, ...] = (f"call the plain model yourself: model({how})",)
        if isinstance(example, list) and first and type(first[0]) is list:
            what = f"a list of {len(example)}"
            tries = "example=batch", "example=[batch, batch_of_another_size], exactly two"
        elif name is not None and type(example) is not tuple:
            tries = f"model(example): a dict is the argument {name!r}", f"example={{{name!r}: ...}}"
        raise UsageError(
            f"example: the plain model raises on {what}",
            where=raised_at(error),
            why=f"{type(error).__name__}: {text[0] if text else ''}",
            tries=tries,
        ) from error


def _of_plain(error: ValueError) -> Refused:
    """Why a model that raises on the example is not captured whole."""
    tries = _MORE_ROWS if _ONE_ROW in str(error) else ()
    return Refused("capture", where=raised_at(error), why=str(error), tries=tries)


def capture_part(
    root: nn.Module, name: str, signature: Signature, first: tuple[Any, ...],
    second: tuple[Any, ...], sizes: tuple[int, int], prefix: str, terms: Terms,
) -> Captured:  # fmt: skip
    """Capture one module on two batches, or its submodules if it cannot be captured."""
    # On the second: if forward read other entries of the first, its graph would fail on this one.
    signature = replace(signature, unread=unread(root, signature, first, second))
    second = signature.settled(second)
    captured = Captured(name, root, batches=(first, second), sizes=sizes, prefix=prefix)
    captured.terms = terms
    opaque: set[str] = set()
    reasons: dict[str, Refused] = {}
    while True:
        try:
            whole, pairs = complete(signature, first, second)
            captured.traced = trace_modes(
                root, whole, first, second, pairs, sizes=sizes, opaque=frozenset(opaque),
                prefix=prefix, falls_back=terms.falls_back, varying=terms.varying_in(prefix),
            )  # fmt: skip
            why = disagreement(root, captured.traced, whole, first, second)
            name_of_moved = moved(root, captured.traced.values())
            if name_of_moved is not None:  # the cause, if they disagree
                why = f"forward changes {name_of_moved}, which it reads"
            why = why or elsewhere(root, captured.traced, whole, first, terms.varying_in(prefix))
            if why:
                raise Refused("capture", where=place_of(root), why=why)
            break
        except (Refused, ValueError) as error:
            refused = error if isinstance(error, Refused) else _of_plain(error)
            path = refused.path
            if path and path not in opaque and len(opaque) < ATTEMPTS:
                opaque.add(path)
                reasons[path] = refused
                continue
            captured.why, captured.where, captured.tries = refused.why, refused.where, refused.tries
            captured.traced = {}
            _parts(captured, signature, {""})
            captured.kind = "partial" if captured.parts else "none"
            return captured
    captured.signature = _relied_on(captured, whole, sizes)
    captured.graphs = {mode: t.graph for mode, t in captured.traced.items()}
    captured.notes += _taken_for_granted(captured)
    _opaque_parts(captured, signature, reasons)
    return captured


def _relied_on(captured: Captured, signature: Signature, sizes: tuple[int, int]) -> Signature:
    """``signature``, which tells all of the examples, as far as the traces rely on it."""
    traced = list(captured.traced.values())
    names = [n.name for n in traced[0].graph.nodes]
    baked = {names.index(n) for t in traced for n in t.baked}
    signature.fixed = tuple((k, held) for k, held in signature.fixed if k in baked)
    signature.strict_dtypes = any(t.strict_dtypes for t in traced)
    signature.computed_dtypes = any(t.computed_dtypes for t in traced)
    floats = (p.dtype for p in captured.root.parameters() if p.is_floating_point())
    signature.dtype = next(floats, None)
    return relying(signature, [t.squeezes for t in traced], captured.batches, sizes)


def _taken_for_granted(captured: Captured) -> list[str]:
    """What the report says about separate modes, guards and constants."""
    said = []
    if len(captured.graphs) == 2:
        flags = sorted({p or "the model" for t in captured.traced.values() for p in t.forks})
        said.append(f"train and eval have a graph each: python asks for training in {_few(flags)}")
    lines = dict.fromkeys(g.where for t in captured.traced.values() for g in t.guards if g.where)
    if lines:
        said.append(
            f"python branches on values: {_few(list(lines))}; what decided it is computed again at"
            " each call, and where it comes out otherwise the plain forward runs"
        )
    stores = {path for t in captured.traced.values() for path in t.stores}
    numbers = dict.fromkeys(path for t in captured.traced.values() for path in t.numbers)
    counts = [path for path in numbers if path in stores]
    if counts:
        paths = _full(captured, counts)
        said.append(f"numbers that forward changes, read and stored at each call: {_few(paths)}")
    if len(counts) < len(numbers):
        paths = _full(captured, (path for path in numbers if path not in stores))
        said.append(f"varying numbers, read at each call: {_few(paths)}")
    any_value = captured.signature.unread if captured.signature is not None else ()
    names = [name for one in any_value for name in one.constants]
    if names:
        said.append(f"entries of the batch that forward never reads may be any: {_few(names)}")
    prints = dict.fromkeys(line for t in captured.traced.values() for line in t.prints)
    if prints:
        said.append(f"printed or logged while captured, but not by the graph: {_few(list(prints))}")
    beyond = dict.fromkeys(text for t in captured.traced.values() for text in t.opaque_calls)
    if beyond:
        said.append(f"runs as it is, as one call, for it leaves torch: {_few(list(beyond))}")
    kept = {
        str(n.target)
        for g in captured.graphs.values()
        for n in g.nodes
        if n.op == "get_attr" and str(n.target).startswith("_recast_constants.")
    }
    if kept:
        many = "s that depend" if len(kept) > 1 else " that depends"
        said.append(f"{len(kept)} tensor{many} on no input: kept, not made at each call")
    return said


def _full(captured: Captured, paths: Iterable[str]) -> list[str]:
    """The paths in the model for those in what was captured."""
    return [".".join(filter(None, (captured.prefix, path))) for path in paths]


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _opaque_parts(captured: Captured, signature: Signature, reasons: dict[str, Refused]) -> None:
    """Note which modules run as they are, and capture what is inside them."""
    kept: dict[str, str] = {path: error.why for path, error in reasons.items()}
    called = {n.target for g in captured.graphs.values() for n in g.nodes if n.op == "call_module"}
    for path, module in modules_by_path(captured.root).items():
        if not path or path not in called:
            continue
        why = kept.get(path) or why_opaque(module)
        if why is None:
            continue
        full = ".".join(p for p in (captured.prefix, path) if p)
        error = reasons.get(path)
        where = error.where if error else place_of(module)
        tries = (
            error.tries
            if error
            else ("remove it before optimize(), or leave it: it runs as it is",)
        )
        captured.misses.append(Missed("capture", full, why, where, tries))
        captured.notes.append(f"{full} runs as it is: {why}")
        kept[path] = why
    holding = {path for path in kept if _worth(captured.root.get_submodule(path))}
    cells = {path for path in kept if path not in holding and _own_weights(captured.root, path)}
    apart = {path for path, error in reasons.items() if error.apart}
    if holding | cells | apart:
        _parts(captured, signature, holding | cells | apart, inside=set(reasons) - apart)
    for path in apart & set(captured.parts):  # it asks its questions of its own inputs
        full = ".".join(p for p in (captured.prefix, path) if p)
        captured.misses = [m for m in captured.misses if m.node != full]
        captured.notes = [n for n in captured.notes if n != f"{full} runs as it is: {kept[path]}"]
        holding.discard(path)
    below = tuple(f"{c}." for c in cells)
    captured.optional = {p for p in captured.parts if p in apart or p.startswith(below)}
    if set(captured.parts) - captured.optional or (holding & set(reasons)):
        captured.kind = "partial"
        first = next((p for p in reasons), None) or next(iter(holding))
        captured.why = captured.why or f"{first} runs as it is: {kept[first]}"
        error = reasons.get(first)
        captured.where = captured.where or (error.where if error else None)
        captured.tries = captured.tries or (error.tries if error else ())
    else:
        captured.kind = "whole"


def _worth(module: nn.Module) -> bool:
    """Whether a module contains other modules with something to rewrite."""
    inner = (m for p, m in module.named_modules() if p)
    return not torch_layer(type(module)) and any(
        isinstance(m, (nn.Linear, nn.Embedding, nn.EmbeddingBag)) for m in inner
    )


def _own_weights(root: nn.Module, path: str) -> bool:
    """Whether a module contains others with parameters of their own, such as recurrent cells."""
    module = root.get_submodule(path)
    inner = (m for p, m in module.named_modules() if p and not torch_layer(type(m)))
    return not torch_layer(type(module)) and any(m._parameters for m in inner)


def _parts(
    captured: Captured, signature: Signature, under: set[str], inside: set[str] | None = None
) -> None:
    """Capture submodules from the top down, on the inputs that they get.

    A module in ``under`` may itself become a part (even with a hook), unless it is in ``inside`` or
    is the root: of those only the submodules may.
    """
    assert captured.batches is not None
    assert captured.sizes is not None
    calls = record_calls(captured.root, signature, captured.batches)
    modules = modules_by_path(captured.root)
    done: list[str] = []
    for path, module in modules.items():
        full = ".".join(p for p in (captured.prefix, path) if p)
        below = any(u == "" or path == u or path.startswith(f"{u}.") for u in under)
        if not path or not below or path in (inside or ()):
            continue
        above = {d for d in done if path.startswith(f"{d}.")}
        outside = [[c for c in batch if not above & c.inside] for batch in calls.get(path, ())]
        if not any(outside):
            continue
        if torch_layer(type(module)) and not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        part = _part(module, full, outside, captured.sizes, captured.terms)
        if part is not None:
            captured.parts[path] = part
            done.append(path)


def _part(
    module: nn.Module, full: str, calls: list[list[Call]], sizes: tuple[int, int],
    terms: Terms,
) -> Captured | None:  # fmt: skip
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return None
    if shares_gradients(module):  # what is inside it may be a part
        return None
    try:
        signature = of_forward(module)
        ordered = [[signature.bind(c.args, c.kwargs) for c in batch] for batch in calls]
    except (ValueError, TypeError):
        return None
    keys = []
    for args in ordered[0]:
        key: list[Any] = []
        for value in args:
            flatten(value, [], key)
        keys.append(key)
    if not keys or not ordered[1] or any(k != keys[0] for k in keys):
        return None
    if renormalises(module):
        return None
    part = capture_part(
        module, type(module).__name__, signature, ordered[0][0], ordered[1][0], sizes, full,
        terms,
    )  # fmt: skip
    return part if part.graphs else None


def _without_example(root: nn.Module, name: str, signature: Signature) -> Captured:
    captured = Captured(name, root)
    try:
        captured.traced, captured.signature = trace_without_example(root, signature)
    except CaptureError as error:
        captured.why, captured.where, captured.tries = error.why, error.where, error.tries
        return captured
    captured.graphs = {mode: t.graph for mode, t in captured.traced.items()}
    captured.kind = "whole"
    captured.notes.append(_NO_EXAMPLE)
    return captured
