"""The public entry: capture, rewrite, link. The one module that sees all layers."""

from __future__ import annotations

import copy
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import nn

from recast import passes as library
from recast.errors import RecastWarning, UsageError, VerifyError
from recast.runtime import (
    checked,
    device,
    kept_memory,
    precision_table,
    recorded_forward,
    tolerances,
)
from recast.runtime.dynamic import convert as dynamic_convert
from recast.runtime.dynamic import table as dynamic_table
from recast.runtime.dynamic.settings import Dynamic
from recast.runtime.plan import Plan, single
from recast.runtime.precision import PRECISIONS
from recast.runtime.ranks import lend, materialise, shards
from recast.runtime.rows import optimizer as row_optimizer
from recast.runtime.topology import Topology

from . import arguments, memory, output, pipeline, rounding, spread
from . import diff as _diff
from .capture import Captured, capture
from .compiled import Compiled
from .ir import Graph, note
from .journal import Fired, Journal, Raised
from .pipeline import Context, Fuel, Pass
from .report import Report

Passes = str | Sequence[Pass] | None
_ONE_AT_A_TIME = threading.Lock()  # tracing patches torch for all threads
_TABLES = (nn.Embedding, nn.EmbeddingBag)


_GRAPH = (
    'mode="graph": forwards, and their backwards, are recorded and replayed; to record loss and'
    " optimizer too, move the body of the loop into recast.TrainingStep(model, loss, optimizer)"
)
_NOT_WHOLE = "forward is not captured whole, and a replay would call nothing of its Python"


class Options(TypedDict, total=False):
    """The keyword arguments of :func:`optimize`, which explains them."""

    example: Any
    world_size: int | None
    plan: Plan | None
    topology: Topology | None
    tables: Mapping[str, Dynamic] | None
    sharding: str | Mapping[str, Any] | None
    wire: str | Mapping[str, str]
    precision: Literal["fp16", "bf16", "int8", "int4"] | None
    mode: Literal["default", "graph"]
    sparse_semantics: Literal["exact", "lazy"]
    passes: Passes
    inplace: bool
    strict: bool


@overload
def optimize(model: nn.Module, optimizer: None = None, **options: Unpack[Options]) -> Compiled: ...
@overload
def optimize(
    model: nn.Module, optimizer: torch.optim.Optimizer, **options: Unpack[Options]
) -> tuple[Compiled, torch.optim.Optimizer]: ...
def optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Any = None,
    world_size: int | None = None,
    plan: Plan | None = None,
    topology: Topology | None = None,
    tables: Mapping[str, Dynamic] | None = None,
    sharding: str | Mapping[str, Any] | None = None,
    wire: str | Mapping[str, str] = "fp32",
    precision: Literal["fp16", "bf16", "int8", "int4"] | None = None,
    mode: Literal["default", "graph"] = "default",
    sparse_semantics: Literal["exact", "lazy"] = "exact",
    passes: Passes = None,
    inplace: bool = False,
    strict: bool = False,
) -> Compiled | tuple[Compiled, torch.optim.Optimizer]:
    """The same model, faster: same numbers, same names, same habits.

    Args:
        model: a plain ``nn.Module``; it is not touched unless ``inplace``. Parameters and buffers
            stay the same objects, so training the result trains ``model``.
        optimizer: the optimizer of the training loop, over parameters of ``model``. The same
            object is returned; its tables are updated on touched rows only, to the same numbers.
        example: one batch (a tuple of the arguments of ``forward``, or its sole argument), or a
            list of two of different size when one does not tell which dimension is the batch.
        world_size: number of ranks; None is that of the initialised process group, else 1. Every
            rank calls this with the same model and the result with its own batch; with equal
            batches they train as one process does with all of them. Parameters and buffers are
            those of rank 0; tables that the plan spreads become this rank's parts, also in
            ``model``. More than the group has: the result can be read, dumped, planned and saved.
        plan: where every table lives; None makes one.
        topology: the machines that it is made for; None is the present one.
        tables: embedding modules that are dynamic, by path: ``{"user_emb": Dynamic(max_rows=9)}``
            takes any int64 id (see :mod:`recast.dynamic`). They become so in ``model`` itself, and
            their present rows are dropped. On many ranks each has a part of the ids, by their
            hash, and of the budget.
        sharding: one sharding type for all tables, or a dict of thresholds in elements
            (``column_slice_threshold, row_slice_threshold, data_parallel_threshold``) and of the
            sharding types of single tables by name.
        wire: what rows travel as: "fp32", "bf16", "fp16" or "int8", or one for each direction:
            ``{"forward": "fp16", "backward": "int8"}``.
        mode: "graph" records calls as CUDA graphs, one for each form of batch, and their backwards
            as others, and replays them: for a model on one CUDA device, in a loop left as it is.
            ``recast.TrainingStep(fast, loss, optimizer)`` records the whole step.
        sparse_semantics: of Adam and AdamW. "exact": their own numbers, which move every row of a
            table at every step. "lazy": rows that a batch does not look up stay as they are, as in
            ``torch.optim.SparseAdam``, whose numbers these are (with ``weight_decay`` on the rows
            that are looked up). Other optimizers are exact either way.
        precision: of tables, for serving: "fp16", "bf16", "int8" or "int4" (see
            ``recast.runtime.precision``), for a model in eval mode and without an optimizer. The
            tables of the result are rounded copies, which ``load_state_dict`` renews;
            ``state_dict()`` gives them as float32. Those of ``model`` stay as they are: memory is
            saved once nothing else holds ``model``, or at once with ``inplace``. All other
            parameters are shared.
        passes: a pipeline, as text (``"default"``, ``"normalize,fuse-mlp{max-layers=4}"``) or as
            a sequence of passes; None is the default one.
        inplace: rewrite ``model`` itself rather than a copy that shares its parameters: calls of
            ``model`` run the graph too.
        strict: raise what a rule raises, rather than skip the rule and say so in the report.

    Returns:
        the :class:`Compiled` model, and ``optimizer`` too when one was given.

    Raises:
        UsageError: a wrong argument. NotBuiltError: an argument whose part does not exist yet.
    """
    started = time.perf_counter()
    arguments.check_model(model)
    if tables is not None:
        arguments.check_semantics(sparse_semantics, optimizer)
        options = Options(
            example=example, world_size=world_size, plan=plan, topology=topology, sharding=sharding,
            wire=wire, precision=precision, mode=mode, sparse_semantics=sparse_semantics,
            passes=passes, inplace=inplace, strict=strict,
        )  # fmt: skip
        return _with_dynamic(model, optimizer, tables, options)
    arguments.check_mode(mode)
    if mode == "graph":
        recorded_forward.device_for(model)
    arguments.check_semantics(sparse_semantics, optimizer)
    arguments.check_precision(precision, PRECISIONS, model, optimizer)
    ranks = arguments.world_size(world_size)
    arguments.check_dynamic(dynamic_convert.tables_of(model), mode, precision)
    asked = spread.Spread(plan, topology, sharding, wire)
    spread.check(asked, ranks)
    if ranks > 1:
        arguments.check_alone(mode=mode, precision=precision)
    if optimizer is not None:
        arguments.check_optimizer(model, optimizer)
    chosen = pipeline_of(passes)
    if ranks > 1:  # the communication has its own way to overlap
        # Nor is exchanged what an interaction gathers, or a matrix has in its columns.
        own = library.OverlapLookups, library.GatherInDots, library.JoinLookups
        chosen = tuple(p for p in chosen if not isinstance(p, own))
    if precision is not None:
        # It looks for lookups by their name, which the last pass changes.
        last = tuple(p for p in chosen if isinstance(p, library.OverlapLookups))
        first = (p for p in chosen if p not in last and not isinstance(p, library.JoinLookups))
        chosen = (*first, library.QuantiseTables(precision), library.CleanUp(), *last)
    recorded = torch.inference_mode(False)  # gradients are part of the proof
    with _ONE_AT_A_TIME, dynamic_table.only_read(), memory.explained(model), recorded:
        lent = example is not None and materialise.prepare(model, example)
        try:
            captured = capture(model, example, inplace=inplace)
            compiled = _link_what_holds(captured, chosen, strict or passes is not None, ranks)
        except BaseException:
            lend.take_back(model)
            raise
    if optimizer is not None:
        memory.trains(captured.root, optimizer)
    if lent and ranks == 1:
        materialise.materialise(captured.root, {})
        if optimizer is not None:
            shards.place_state(optimizer)
    _only_looked_up(compiled)
    if ranks > 1:
        spread.spread(compiled, captured, optimizer, ranks, asked)
        compiled.report.graph_text = output.text(compiled, captured.name)
    elif plan is not None:
        plan.check(compiled.plan.tables)
        compiled.plan = plan
    compiled.report.asks.extend(t.told for t in dynamic_convert.tables_of(compiled).values())
    if mode == "graph":
        why = None if captured.kind == "whole" else _NOT_WHOLE
        vars(compiled)["_replays"] = recorded_forward.RecordedForward(compiled, why=why)
        why = why or compiled.unrecordable()
        compiled.report.notes.append(f'mode="graph": nothing is recorded: {why}' if why else _GRAPH)
    if inplace:
        compiled.take_over()
    if precision is not None:
        compiled.report.notes.append(_of_precision(precision, model, compiled, captured))
    if optimizer is not None:
        row_optimizer.attach(optimizer, lazy=sparse_semantics == "lazy")
        row_optimizer.when_full(optimizer, partial(memory.explain_of, weakref.ref(captured.root)))
        compiled.report.notes.extend(row_optimizer.notes(optimizer))
        compiled.report.notes.extend(_costs(captured.root, optimizer))
    compiled.report.seconds["total"] = time.perf_counter() - started
    weakref.finalize(compiled, kept_memory.clear).atexit = False
    return compiled if optimizer is None else (compiled, optimizer)


def explain(model: nn.Module, **options: Unpack[Options]) -> Report:
    """The report of :func:`optimize`, without keeping its result."""
    tables = options.pop("tables", None)
    if tables is None:
        return optimize(model, None, **options).report
    parts = arguments.world_size(options.get("world_size"))
    with dynamic_convert.made(model, tables, None, lazy=False, keep=False, parts=parts) as notes:
        report = optimize(model, None, **options).report
    report.notes.extend(notes)
    return report


def _only_looked_up(compiled: Compiled) -> None:
    """Raise UsageError where forward reads the weight of a dynamic table as a matrix."""
    for one in (compiled, *compiled.parts.values()):
        for graph in one.graphs.values():
            node = library.misread(graph, one._root)
            if node is not None:
                raise UsageError(
                    "tables: the weight of a dynamic table is read as a matrix",
                    where=note(node).where or node.name,
                    why="its rows stand in the order in which ids came, not by id",
                    tries=("call the embedding module itself", "leave this table plain"),
                )


def _with_dynamic(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, tables: Any, options: Options
) -> Compiled | tuple[Compiled, torch.optim.Optimizer]:
    """:func:`optimize` of a model whose ``tables`` become dynamic first."""
    lazy = options["sparse_semantics"] == "lazy"
    if optimizer is not None:
        arguments.check_optimizer(model, optimizer)
    parts = arguments.world_size(options["world_size"])
    with dynamic_convert.made(model, tables, optimizer, lazy=lazy, parts=parts) as notes:
        if optimizer is None:
            compiled = optimize(model, None, **options)
        else:
            compiled, _ = optimize(model, optimizer, **options)
    compiled.report.notes.extend(notes)
    return compiled if optimizer is None else (compiled, optimizer)


def diff(
    plain: nn.Module, fast: nn.Module, example: Any, *, steps: int = 3, **options: Any
) -> _diff.DiffReport:
    """Prove that two models agree, or name the first node where they part.

    Compares outputs, all gradients, parameters and optimizer state after ``steps`` optimizer
    steps, and buffers, with the float64 run of ``plain`` as the judge. Ids outside their tables
    are an error on a GPU too. Where ``fast`` has tables below float32 (``precision=``),
    those of ``plain`` and of the judge are rounded in the same way, eval mode alone is compared,
    and the notes say what the rounding does to the outputs. For the options see
    :func:`recast.rewriter.diff.diff`.
    """
    options.setdefault("limits", tolerances)
    stored = precision_table.stored(fast)
    if stored:
        return _diff_stored(plain, fast, example, stored, options)
    with checked.checked():
        return _diff.diff(plain, fast, example, steps=steps, **options)


def _diff_stored(
    plain: nn.Module,
    fast: nn.Module,
    example: Any,
    stored: Mapping[str, precision_table.StoredTable],
    options: dict[str, Any],
) -> _diff.DiffReport:
    same = precision_table.rounded(plain, stored)
    options |= {"steps": 0, "training": False}
    report = _diff.diff(same, fast, example, **options)
    names = ", ".join(sorted({t.precision for t in stored.values()}))
    calls: list[rounding.Call] = [(batch, {}) for batch in _diff.batches_of(example)]
    report.notes[:0] = [
        f"{len(stored)} tables of the second model are in {names}, for inference: those of the"
        " first were rounded in the same way, and eval mode alone was compared",
        f"of this rounding: {rounding.sentence(plain, fast, calls)}",
    ]
    return report


def pipeline_of(passes: Passes) -> tuple[Pass, ...]:
    """The pipeline that ``passes`` names. Raises UsageError for an unknown pass."""
    if passes is None:
        return library.PIPELINE
    if isinstance(passes, str):
        return pipeline.parse(passes, library.REGISTRY, library.PIPELINE)
    return tuple(passes)


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

    ``fuel`` is the number of rewrites allowed over all graphs; ``after`` is asked for a dump after
    every pass that changed something.
    """
    started = time.perf_counter()
    device.extension()  # in a checkout the first use compiles it: not the passes' time
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
        notes=_notes(captured),
        seconds=seconds,
        world_size=world_size,
        graph_text=output.text(compiled, captured.name),
        pictures=_pictures(captured, compiled, journal),
        asks=[partial(checked.since, checked.bad_ids())],
        bound=_bound(compiled, captured, journal),
    )
    compiled.report = report
    vars(compiled)["_ragged"] = library.ragged_inputs
    compiled.plan = single(spread.tables_of(compiled))
    return compiled


def _bound(compiled: Compiled, captured: Captured, journal: Journal) -> str | None:
    """Whether products bound the model; one whose costs cannot be told still runs."""
    try:
        return library.bound(compiled.graphs, captured.root)
    except Exception as error:
        journal.notes.append(f"what bounds it is not known: {type(error).__name__}: {error}")
        return None


def _pictures(captured: Captured, compiled: Compiled, journal: Journal) -> dict[str, str]:
    """The pictures of the report; a model that cannot be drawn is still a model that runs."""
    try:
        return output.pictures(captured, compiled, journal)
    except Exception as error:
        journal.notes.append(f"no pictures: {type(error).__name__}: {error}")
        return {}


def _link_what_holds(
    captured: Captured, passes: Sequence[Pass], strict: bool, ranks: int
) -> Compiled:
    """Link without the passes that turn out to be defective; the report names them."""
    failed: list[Raised] = []
    while True:
        try:
            compiled = link(captured, passes, strict=strict, world_size=ranks)
        except VerifyError as error:
            kept = tuple(p for p in passes if p.name != error.culprit)
            if strict or len(kept) == len(passes):
                raise
            failed.append(Raised(str(error.culprit), captured.name, error.what, captured.where))
            passes = kept
        else:
            compiled.report.journal.raised.extend(failed)
            return compiled


def _once(fired: list[Fired]) -> list[Fired]:
    """What fired in the graphs of several modes, told once."""
    told: dict[tuple[object, ...], Fired] = {}
    for entry in fired:
        told.setdefault((entry.rule, entry.node, entry.origin, entry.what), entry)
    return list(told.values())


def _link(
    captured: Captured,
    passes: Sequence[Pass],
    journal: Journal,
    fuel: Fuel,
    strict: bool,
    after: Callable[[Pass, Graph], str] | None,
) -> Compiled:
    for miss in captured.misses:
        journal.miss(miss)
    graphs = {mode: copy.deepcopy(graph) for mode, graph in captured.graphs.items()}
    start = journal.lookups_found, journal.lookups_fused
    counts = [start]
    fired = len(journal.fired)
    for graph in graphs.values():  # the graphs of two modes hold the same lookups: counted once
        journal.lookups_found, journal.lookups_fused = start
        context = Context(captured.root, journal, captured.batches, captured.sizes, fuel, strict)
        pipeline.run(graph, passes, context, after=after)
        counts.append((journal.lookups_found, journal.lookups_fused))
        journal.fired[:] = _once(journal.fired)
    journal.lookups_found = max(found for found, _ in counts)
    journal.lookups_fused = journal.lookups_found - max(found - fused for found, fused in counts)
    own = slice(fired, len(journal.fired)), journal.lookups_fused - start[1]
    for path, part in list(captured.parts.items()):
        known = len(journal.fired)
        linked = _link(part, passes, journal, fuel, strict, after)
        if path in captured.optional and not any(e.saves for e in journal.fired[known:]):
            del captured.parts[path], journal.fired[known:]
            continue
        captured.root.set_submodule(path, linked)
    compiled = Compiled(captured, graphs)
    # a saboteur is there to be found by a diff, not to be mended here
    proves = graphs and not any(p.name.startswith("sabotage-") for p in passes)
    reason = compiled.disagrees() if proves else None
    if reason is None:
        return compiled
    journal.raised.append(Raised("pipeline", captured.name, reason, captured.where))
    warnings.warn(
        f"{captured.name} runs as it was captured, without a rewrite: {reason}. The numbers are the"
        " model's own, the speed is too; a pass is defective, please report it",
        RecastWarning,
        stacklevel=2,
    )
    del journal.fired[own[0]]  # the captured graph runs instead: nothing of this came to be
    journal.lookups_fused -= own[1]
    return Compiled(captured, captured.graphs)


# ---------------------------------------------------------------- what the report says besides


def _of_precision(precision: str, model: nn.Module, compiled: Compiled, captured: Captured) -> str:
    """What the tables below float32 do to the outputs, where that can be measured."""
    if not compiled.report.journal.stored:
        return f"precision={precision!r}: no table is stored in it; see what was missed and why"
    if captured.batches is None or captured.signature is None or model is captured.root:
        return (
            f"precision={precision!r}: recast.diff(model, fast, batch) tells its effect on outputs"
        )
    calls = [captured.signature.unbind(batch) for batch in captured.batches]
    return rounding.sentence(model, compiled, calls)


def _costs(root: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """A sentence for each reason why tables get a dense gradient after all."""
    names = {id(t): name for name, t in root.named_parameters()}
    tables = {id(m.weight) for m in root.modules() if isinstance(m, _TABLES)}
    dense: dict[str, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        reason = row_optimizer.support(optimizer, group)
        if reason is not None:
            held = [p for p in group["params"] if id(p) in tables and id(p) in names]
            dense.setdefault(reason, []).extend(held)
    return [
        f"{reason}: {len(held)} tables get a dense gradient, "
        f"{sum(t.numel() * t.element_size() for t in held) / 1e6:.1f} MB a step"
        for reason, held in dense.items()
        if held
    ]


def _notes(captured: Captured) -> list[str]:
    prefix = f"{captured.prefix}: " if captured.prefix else ""
    own = [prefix + sentence for sentence in captured.notes]
    return own + [sentence for part in captured.parts.values() for sentence in _notes(part)]
