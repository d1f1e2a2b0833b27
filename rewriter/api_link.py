"""Rewrites captured graphs and makes the module that :func:`.api.optimize` returns."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from recast import passes as library
from recast.errors import RecastWarning, VerifyError
from recast.rewriter.capture.capture_model import Captured
from recast.rewriter.capture.frames import users_level
from recast.rewriter.capture.guards import without
from recast.rewriter.compiled import entries, known_calls
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.report.journal import Fired, Journal, Missed, Raised
from recast.rewriter.report.report import Report
from recast.runtime import checked, device
from recast.runtime.plan import single
from recast.runtime.recorded.state import same

from . import pipeline
from .assumed_sizes import assumed
from .ir import Graph
from .pipeline import Context, Fuel, Pass
from .report import output
from .spread import model as spread

_COVERED = "the graphs before it run such calls, too: it has none of its own"
_TORCHS_OWN = "called alone, outside of a graph, torch's own layer is as fast and runs as it is"

entries.same = same.same_items
entries.watch = same.WatchedDicts
known_calls.recognizer = same.known_calls


def link(
    captured: Captured,
    passes: Sequence[Pass],
    *,
    fuel: int | None = None,
    strict: bool = False,
    world_size: int = 1,
    after: Callable[[Pass, Graph], str] | None = None,
) -> Compiled:
    """Rewrite every graph of ``captured`` and make the module that runs them.

    ``fuel`` is the number of rewrites allowed in all graphs together. ``after(pass, graph)`` is
    called after every pass that changed something, and returns the dump to keep. Further forms have
    a journal and a report each, and no limit.
    """
    started = time.perf_counter()
    device.extension()  # in a checkout the first use compiles it; do not bill that to the passes
    built = time.perf_counter()
    journal = Journal()
    shared = Fuel(fuel)
    compiled = _link(captured, passes, journal, shared, strict, after)
    seconds = {
        "capture": captured.seconds,
        "kernels": built - started,
        "passes": time.perf_counter() - built,
    }
    report = Report(
        model=captured.name,
        captured=captured.kind,
        why=captured.why,
        where=captured.where,
        tries=captured.tries,
        journal=journal,
        notes=[
            *_notes(captured),
            *_rows_alike(compiled, captured),
            *_without_kernels(captured, journal),
        ],
        seconds=seconds,
        world_size=world_size,
        pictures=_pictures(captured, compiled, journal),
        asks=[partial(checked.since, checked.bad_ids())],
        bound=_bound(compiled, captured, journal),
    )
    compiled.report = report
    vars(compiled)["_ragged"] = library.ragged_inputs
    vars(compiled)["_looked_up"] = library.looked_up_inputs
    _link_forms(compiled, captured, passes, strict=strict, world_size=world_size, after=after)
    report.graph_text = output.text(compiled, captured.name)
    compiled.plan = single(spread.tables_of(compiled))
    return compiled


def _link_forms(
    compiled: Compiled, captured: Captured, passes: Sequence[Pass], *, strict: bool,
    world_size: int, after: Callable[[Pass, Graph], str] | None,
) -> None:  # fmt: skip
    """Let ``compiled`` run the further forms that have graphs, unless its own cover them. Its
    report has one for each.
    """
    started, report, further = time.perf_counter(), compiled.report, list[Compiled]()
    for k, form in enumerate(captured.forms):
        label = f"forms[{k}] ({_difference(captured, form)})"
        why, where, tries = form.why, form.where, form.tries
        if not captured.graphs:
            why, where, tries = "the example itself is not captured whole", None, ()
        if not captured.graphs or not form.graphs:
            report.forms.append(Report(label, "none", why, where, tries))
        elif any(_covers(one, form) for one in (compiled, *further)):
            report.forms.append(Report(label, "whole", notes=[_COVERED]))
        else:
            parts = {p: part for p, part in form.parts.items() if p not in captured.parts}
            form = replace(form, parts=parts)
            one = link(form, passes, strict=strict, world_size=world_size, after=after)
            one.report.model = label
            report.forms.append(one.report)
            further.append(one)
    compiled._add_forms(further)
    if captured.forms:
        seconds = sum(form.seconds for form in captured.forms)
        report.seconds["forms"] = seconds + time.perf_counter() - started


def _difference(captured: Captured, form: Captured) -> str:
    """What sets the calls of ``form`` apart from those of the example, in a few words."""
    if captured.signature is None or form.batches is None:
        return "not compared"
    return captured.signature.difference(form.batches[0])


def _covers(compiled: Compiled, form: Captured) -> bool:
    """Whether the graphs of ``compiled`` run the batches of ``form``, which has a signature."""
    assert form.signature is not None
    assert form.batches is not None
    calls = [form.signature.unbind(batch) for batch in form.batches]
    return all(compiled._runner.covers(*call) for call in calls)


def link_what_holds(
    captured: Captured, passes: Sequence[Pass], strict: bool, ranks: int
) -> Compiled:
    """:func:`link`, without any pass that fails or breaks an invariant; a warning and the report
    name those.
    """
    failed: list[Raised] = []
    while True:
        try:
            compiled = link(captured, passes, strict=strict, world_size=ranks)
        except VerifyError as error:
            kept = tuple(p for p in passes if p.name != error.culprit)
            if strict or len(kept) == len(passes):
                raise
            failed.append(Raised(str(error.culprit), captured.name, error.what, captured.where))
            warnings.warn(
                f"{captured.name} is rewritten without {error.culprit}: {error.what}. The numbers"
                " are the model's own; the pass is defective, please report it",
                RecastWarning,
                stacklevel=users_level(),
            )
            passes = kept
        else:
            compiled.report.journal.raised.extend(failed)
            return compiled


def _link(
    captured: Captured,
    passes: Sequence[Pass],
    journal: Journal,
    fuel: Fuel,
    strict: bool,
    after: Callable[[Pass, Graph], str] | None,
) -> Compiled:
    """Rewrite and link one module, and its parts where it was captured in parts."""
    for miss in captured.misses:
        journal.miss(miss)
    graphs = {mode: copy.deepcopy(graph) for mode, graph in captured.graphs.items()}
    start = journal.lookups_found, journal.lookups_fused
    counts = [start]
    fired = len(journal.fired)
    traced, signature = dict(captured.traced), captured.signature
    # one for each mode; all hold the same lookups: count them once
    for mode, graph in graphs.items():
        journal.lookups_found, journal.lookups_fused = start
        context = Context(captured.root, journal, captured.batches, captured.sizes, fuel, strict)
        for name, lines in (loop for g in traced[mode].guards for loop in g.loops):
            context.loops[name] = context.loops.get(name, frozenset()) | lines
        left = Fuel(fuel.left)
        pipeline.run(graph, passes, context, after=after)
        if signature is not None and captured.batches is not None:
            trial = replace(context, fuel=left)
            relies = assumed(
                captured.graphs[mode], graph, passes, trial, signature, fewer=captured.fewer,
                training=mode == "train",
            )  # fmt: skip
            signature = signature.relying(relies.fixed, relies.wide)
        guards, asks = without(traced[mode].guards, traced[mode].asks, context.whole)
        traced[mode] = replace(traced[mode], guards=guards, asks=asks)
        counts.append((journal.lookups_found, journal.lookups_fused))
        journal.fired[fired:] = _once(journal.fired[fired:])
    journal.lookups_found = max(found for found, _ in counts)
    journal.lookups_fused = journal.lookups_found - max(found - fused for found, fused in counts)
    own = slice(fired, len(journal.fired)), journal.lookups_fused - start[1]
    _link_parts(captured, passes, journal, fuel, strict, after)
    compiled = Compiled(replace(captured, traced=traced, signature=signature), graphs)
    # a saboteur is there for recast.diff to find; do not fall back here
    proves = graphs and not any(p.name.startswith("sabotage-") for p in passes)
    reason = compiled.prove() if proves else None
    if reason is None:
        return compiled
    journal.raised.append(Raised("pipeline", captured.name, reason, captured.where))
    warnings.warn(
        f"{captured.name} runs as it was captured, without a rewrite: {reason}. The numbers are the"
        " model's own, the speed is too; a pass is defective, please report it",
        RecastWarning,
        stacklevel=users_level(),
    )
    del journal.fired[own[0]]  # the captured graph runs instead: these rewrites are undone
    journal.lookups_fused -= own[1]
    return Compiled(captured, captured.graphs)


def _link_parts(
    captured: Captured,
    passes: Sequence[Pass],
    journal: Journal,
    fuel: Fuel,
    strict: bool,
    after: Callable[[Pass, Graph], str] | None,
) -> None:
    """Put every part in the place of its module, but for those in which nothing is gained."""
    for path, part in list(captured.parts.items()):
        known, fused = len(journal.fired), journal.lookups_fused
        linked = _link(part, passes, journal, fuel, strict, after)
        gains = journal.fired[known:]
        lone = _lone(part, gains)
        if any(e.saves for e in gains) or not (path in captured.optional or lone):
            captured.root.set_submodule(path, linked)
            continue
        del captured.parts[path], journal.fired[known:]
        journal.lookups_fused = fused
        for e in gains if lone else ():
            journal.miss(Missed(e.rule, part.prefix or path, _TORCHS_OWN, e.where))


def _lone(part: Captured, fired: Sequence[Fired]) -> bool:
    """Whether a part is one lookup without pooling, which torch's own layer does as fast."""
    return isinstance(part.root, nn.Embedding) and all(
        e.rule == library.GroupEmbeddings.name for e in fired
    )


def _once(fired: list[Fired]) -> list[Fired]:
    """``fired`` without the repetitions that stem from the graphs of several modes."""
    told: dict[tuple[object, ...], Fired] = {}
    for entry in fired:
        told.setdefault((entry.rule, entry.node, entry.origin, entry.what), entry)
    return list(told.values())


# ---------------------------------------------------------------- further notes of the report


def _notes(captured: Captured) -> list[str]:
    prefix = f"{captured.prefix}: " if captured.prefix else ""
    own = [prefix + sentence for sentence in captured.notes]
    return own + [sentence for part in captured.parts.values() for sentence in _notes(part)]


def _rows_alike(compiled: Compiled, captured: Captured) -> list[str]:
    """A note that two examples of as many rows were given, and the graph relies on their number."""
    signature = compiled._runner.signature
    if signature is None or captured.sizes != (0, 0):
        return []
    held = (
        (signature.labels[k], size) for k, sizes in signature.fixed for d, size in sizes if not d
    )
    return [
        f"both examples have {size} in dimension 0 of {label}, on which the graph relies: other"
        " sizes run the plain forward. Two that differ in their number of rows, too, cover any"
        for label, size in held
    ][:1]


def _without_kernels(captured: Captured, journal: Journal) -> list[str]:
    """A note that the CPU kernels, and so most of the speed, are missing, if a rewrite fired."""
    why = device.why_missing()
    here = any(p.device.type == "cpu" for p in captured.root.parameters())
    if why is None or not journal.fired or not here:
        return []
    return [
        f"the CPU kernels are not in use: {why}. All of this runs in plain torch, with the same"
        " numbers and less speed; recast env says more"
    ]


def _bound(compiled: Compiled, captured: Captured, journal: Journal) -> str | None:
    """What bounds the model; a failure to tell is noted, since the model still runs."""
    try:
        return library.bound(compiled._graphs, captured.root)
    except Exception as error:
        journal.notes.append(f"what bounds it is not known: {type(error).__name__}: {error}")
        return None


def _pictures(captured: Captured, compiled: Compiled, journal: Journal) -> dict[str, str]:
    """The pictures of the report; a failure to draw is noted, since the model still runs."""
    try:
        return output.pictures(captured, compiled, journal)
    except Exception as error:
        journal.notes.append(f"no pictures: {type(error).__name__}: {error}")
        return {}
