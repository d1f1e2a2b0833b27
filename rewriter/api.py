"""The public entry, :func:`optimize`: capture the model, rewrite its graphs, link the result."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn

from recast import passes as library
from recast.errors import UsageError
from recast.rewriter.capture.capture_model import Captured, capture
from recast.rewriter.capture.plain_model import uncompiled
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.report.report import Report
from recast.runtime import kept_memory
from recast.runtime.dynamic import convert as dynamic_convert
from recast.runtime.dynamic import table as dynamic_table
from recast.runtime.dynamic.settings import Dynamic
from recast.runtime.embedding import precision_table
from recast.runtime.embedding.precision import PRECISIONS
from recast.runtime.plan import Plan
from recast.runtime.ranks import materialise, placeholders, shards
from recast.runtime.recorded import forward as recorded_forward
from recast.runtime.rows import optimizer as row_optimizer
from recast.runtime.topology import Topology

from . import api_stored, arguments, memory, pipeline
from .api_link import link_what_holds
from .diff import rounding
from .ir import note
from .pipeline import Pass
from .report import output
from .spread import check as spread_check
from .spread import model as spread
from .spread import stored

Passes = str | Sequence[Pass] | None
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
_ONE_AT_A_TIME = threading.Lock()  # torch's tracer (used without an example) patches all threads
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_GRAPH = (
    'mode="graph": forwards, their backwards and the steps of optimizers are recorded and replayed;'
    " to record the loss too, move the body of the loop into recast.TrainingStep(model, loss,"
    " optimizer)"
)
_NOT_WHOLE = "forward is not captured whole, and a replay would call nothing of its Python"


class Options(TypedDict, total=False):
    """The keyword arguments of :func:`optimize`, which explains them."""

    example: Any
    forms: Sequence[Any]
    varying: Sequence[str]
    world_size: int | None
    plan: Plan | None
    topology: Topology | str | None
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
    model: nn.Module, optimizer: _Optimizer, **options: Unpack[Options]
) -> tuple[Compiled, _Optimizer]: ...
def optimize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Any = None,
    forms: Sequence[Any] = (),
    varying: Sequence[str] = (),
    world_size: int | None = None,
    plan: Plan | None = None,
    topology: Topology | str | None = None,
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
    """The same model, faster: same numbers, same names, used in the same way.

    Args:
        model: a plain ``nn.Module``; it is not changed unless ``inplace``. Parameters and buffers
            stay the same objects, so training the result trains ``model``.
        optimizer: the optimizer of the training loop, over parameters of ``model``. The same
            object is returned; it updates only looked-up rows of tables, with the same result, and
            steps dense gradients on a CPU by torch's fused kernels.
        example: one batch (a tuple of the arguments of ``forward``, its sole argument, or a dict of
            its arguments by name), or a list of two of different size when one does not tell which
            dimension is the batch, or a rewrite relies on a length that varies. Sizes that differ
            between the two are free; those that are equal in both may be relied upon.
        forms: further examples, each like ``example``, for calls of other forms: without labels, as
            a model that trains with them is evaluated, say. Each gets graphs of its own, over the
            same parameters, and a call runs those that take its arguments. On several ranks all
            make calls of one form at a time.
        varying: numbers of modules that are set between calls, by path: ``["temperature",
            "head.beta"]``. They are read at each call. Of others a graph relies on the value that
            they have now, and once one is changed the plain forward runs.
        world_size: number of ranks; None means that of the initialised process group, else 1.
            Every rank calls this with the same model, and then calls the result with its own batch;
            with batches of equal size they train as one process with all of them would. Parameters
            and buffers are those of rank 0; tables that the plan shards are replaced by this rank's
            parts, in ``model`` too. With more ranks than the group has, the result can be printed,
            dumped, planned and saved, but not run.
        plan: where every table lives; None makes one.
        topology: the machines that the plan is made for: a preset such as "dgx-a100", a JSON
            file, or a :class:`recast.planner.Topology`, as many of them as the ranks need; None
            means the present one.
        tables: embedding modules that become dynamic, by path:
            ``{"user_emb": Dynamic(max_rows=9)}`` takes any int64 id (see :mod:`recast.dynamic`).
            They are replaced in ``model`` itself, and their present rows are dropped. With several
            ranks, each owns a part of the ids, by hash, and has its part of the budget.
        sharding: one sharding type for all tables ("table_wise", "row_wise", "column_wise",
            "table_row_wise", "table_column_wise" or "data_parallel"), or a dict that holds
            thresholds in elements (``column_slice_threshold, row_slice_threshold,
            data_parallel_threshold``) and the sharding types of single tables by name.
        wire: the format in which rows travel: "fp32", "bf16", "fp16" or "int8", or one for each
            direction: ``{"forward": "fp16", "backward": "int8"}``.
        precision: store tables in "fp16", "bf16", "int8" or "int4" for serving (see
            ``recast.runtime.embedding.precision``); for a model in eval mode, without an optimizer.
            The tables of the result are rounded copies, which ``load_state_dict`` renews and
            ``state_dict()`` returns as float32. Those of ``model`` stay as they are: memory is
            saved once nothing else holds ``model``, or at once with ``inplace``. All other
            parameters are shared, and dynamic tables stay in their dtype. On several ranks each
            stores its parts of the tables, with the numbers of one rank; in "int8" and "int4" no
            table is cut by columns. Of several ``forms``, a table that one reads as a whole is
            stored for none.
        mode: "graph" records forwards as CUDA graphs, one for each form of batch, and backwards
            and optimizer steps as others, and replays them. For a model on one CUDA device; the
            training loop stays as it is. ``recast.TrainingStep(fast, loss, optimizer)`` records a
            whole step instead.
        sparse_semantics: for Adam and AdamW. "exact": their own numbers, which move a row for many
            steps after its last gradient. "lazy": rows that a batch does not look up stay as they
            are; the numbers are those of ``torch.optim.SparseAdam`` (with ``weight_decay`` on the
            looked-up rows). A dense gradient of a table steps all of its rows: that of a batch on
            the plain forward, of a table that is read as a whole, and under DDP. Other optimizers
            are exact either way.
        passes: a pipeline, as text (``"default"``, ``"default,-fuse-mlp"`` for all but one,
            ``"normalize,fuse-mlp{max-layers=4}"``) or as a sequence of passes, which then run as
            under ``strict``; None means the default one.
        inplace: rewrite ``model`` itself rather than a copy that shares its parameters, so that
            calls of ``model`` run the graph too.
        strict: raise what a rule or a pass raises, rather than skip it and say so in the report.

    Returns:
        the :class:`Compiled` model, or the tuple ``(compiled, optimizer)`` when an optimizer was
        given.

    What cannot be captured runs unchanged, and ``report`` says why; that is not an error. Meanwhile
    no other thread should draw random numbers or multiply: generators and settings of TF32, which
    the process has but once, are set while the example runs, and restored.

    Raises:
        UsageError: a wrong argument, or an example that ``model`` does not take.
        NotBuiltError: a combination of arguments that is not implemented yet.
        PlanError: the tables do not fit the machines; the error says what would.
        VerifyError: with ``passes`` or ``strict``, a pass leaves a graph that breaks an invariant.
        RankError: on several ranks, another one died, hangs or left.
    """
    started = time.perf_counter()
    arguments.check_model(model)
    arguments.check_stored(precision_table.stored(model))
    arguments.check_switches(inplace=inplace, strict=strict)
    arguments.check_forms(forms, example)
    varying = arguments.check_varying(varying, uncompiled(model), example)
    if tables is not None:
        arguments.check_semantics(sparse_semantics, optimizer)
        options = Options(
            example=example, forms=forms, varying=varying, world_size=world_size, plan=plan,
            topology=topology, sharding=sharding, wire=wire, precision=precision, mode=mode,
            sparse_semantics=sparse_semantics, passes=passes, inplace=inplace, strict=strict,
        )  # fmt: skip
        return _with_dynamic(model, optimizer, tables, options)
    arguments.check_mode(mode)
    if mode == "graph":
        recorded_forward.device_for(model)
    arguments.check_semantics(sparse_semantics, optimizer)
    arguments.check_precision(precision, PRECISIONS, model, optimizer)
    ranks = arguments.world_size(world_size)
    arguments.check_dynamic(dynamic_convert.tables_of(model), mode)
    asked = spread.check(
        spread.Spread(plan, topology, sharding, wire, precision, sparse_semantics), ranks
    )
    spread_check.check_model(model)
    named = pipeline_of(passes)
    if ranks > 1:
        arguments.check_alone(mode, [p.name for p in named])
    if optimizer is not None:
        arguments.check_optimizer(model, optimizer)
    chosen = _passes_for(named, ranks, precision)

    lent, captured, compiled = _rewritten(
        model, example, forms, varying, chosen, ranks,
        inplace=inplace, strict=strict or passes is not None,
    )  # fmt: skip
    if optimizer is not None:
        memory.trains(captured.root, optimizer)
    if lent and ranks == 1:
        materialise.materialise(captured.root, {})
        if optimizer is not None:
            shards.place_state(optimizer)
    _only_looked_up(compiled)
    effect = None
    if ranks > 1:
        if precision is not None:
            effect = stored.Effect(model, captured, runs=not lent and spread.run_here(ranks))
        spread.spread(compiled, captured, optimizer, ranks, asked)
        spread_check.close(model, compiled)
        compiled.report.graph_text = output.text(compiled, captured.name)
    else:
        spread.alone(compiled, optimizer, asked)
        if plan is not None:
            plan.check(compiled.plan.tables)
            compiled.plan = plan
    dynamic = dict.fromkeys(dynamic_convert.tables_of(compiled).values())  # one for all its names
    compiled.report.asks.extend(t.told for t in dynamic)
    if mode == "graph":
        _record_forwards(compiled, captured)
    if inplace:
        compiled.take_over()
    if precision is not None:
        told = _of_precision(precision, model, compiled, captured, ranks, effect)
        compiled.report.notes.append(told)
    if optimizer is not None:
        _attach(optimizer, compiled, captured, lazy=sparse_semantics == "lazy")
    compiled.report.seconds["total"] = time.perf_counter() - started
    weakref.finalize(compiled, kept_memory.clear).atexit = False
    return compiled if optimizer is None else (compiled, optimizer)


def _rewritten(
    model: nn.Module, example: Any, forms: Sequence[Any], varying: Sequence[str],
    passes: Sequence[Pass], ranks: int, *, inplace: bool, strict: bool,
) -> tuple[bool, Captured, Compiled]:  # fmt: skip
    """``model`` captured, and rewritten; and whether it is on meta, its tables lent for that."""
    recorded = torch.inference_mode(False)  # gradients are part of the proof
    with _ONE_AT_A_TIME, dynamic_table.only_read(), memory.explained(model), recorded:
        lent = example is not None and materialise.prepare(model, [example, *forms])
        stores = any(isinstance(p, library.QuantiseTables) for p in passes)
        if lent and stores:
            materialise.materialise(model, {})  # it packs the rows that there are
        try:
            # A result with tables of its own must not hand them to the user's model.
            linked = ranks == 1 and not stores
            captured = capture(
                model, example, forms=forms, inplace=inplace, linked=linked,
                falls_back=ranks == 1, varying=varying,
            )  # fmt: skip
            agreed = api_stored.agreed(captured, passes)
            return lent, captured, link_what_holds(captured, agreed, strict, ranks)
        except BaseException:
            placeholders.remove(model)
            raise


def _attach(
    optimizer: torch.optim.Optimizer, compiled: Compiled, captured: Captured, *, lazy: bool
) -> None:
    """Let ``optimizer`` step rows, and the report say what it does."""
    row_optimizer.attach(optimizer, lazy=lazy)
    lazy = lazy and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    for one in compiled._with_graphs():
        one._runner.lazy = lazy
    row_optimizer.when_full(optimizer, partial(memory.explain_of, weakref.ref(captured.root)))
    compiled.report.notes.extend(row_optimizer.notes(optimizer))
    compiled.report.notes.extend(_costs(captured.root, optimizer))


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


def _passes_for(passes: tuple[Pass, ...], ranks: int, precision: str | None) -> tuple[Pass, ...]:
    """The pipeline, adapted to several ranks, or to tables below float32 on one."""
    if ranks > 1:
        # Communication overlaps in its own way, and only plain lookups can be exchanged: not those
        # inside an interaction or a joined matrix.
        own = library.OverlapLookups, library.GatherInDots, library.JoinLookups
        passes = tuple(p for p in passes if not isinstance(p, own))
    elif precision is not None:  # on several, each rank stores its parts, once they are there
        # QuantiseTables knows lookups by their name, which OverlapLookups changes.
        last = tuple(p for p in passes if isinstance(p, library.OverlapLookups))
        first = (p for p in passes if p not in last and not isinstance(p, library.JoinLookups))
        passes = (*first, library.QuantiseTables(precision), library.CleanUp(), *last)
    return passes


def _record_forwards(compiled: Compiled, captured: Captured) -> None:
    """Let ``compiled`` replay its forwards from CUDA graphs, or note why it cannot."""
    why = None if captured.kind == "whole" else _NOT_WHOLE
    vars(compiled)["_replays"] = recorded_forward.RecordedForward(compiled, why=why)
    why = why or compiled.why_not_recordable()
    compiled.report.notes.append(f'mode="graph": nothing is recorded: {why}' if why else _GRAPH)


def _only_looked_up(compiled: Compiled) -> None:
    """Raise UsageError where forward reads the weight of a dynamic table as a matrix."""
    for one in compiled._with_graphs():
        for graph in one._graphs.values():
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
    """:func:`optimize` for a model whose ``tables`` are made dynamic first."""
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


def pipeline_of(passes: Passes) -> tuple[Pass, ...]:
    """The pipeline that ``passes`` names. Raises UsageError for an unknown pass."""
    if passes is None:
        return library.PIPELINE
    if isinstance(passes, str):
        return pipeline.parse(passes, library.REGISTRY, library.PIPELINE)
    return pipeline.given(passes)


# ---------------------------------------------------------------- further notes of the report


def _of_precision(
    precision: str, model: nn.Module, compiled: Compiled, captured: Captured, ranks: int,
    effect: stored.Effect | None,
) -> str:  # fmt: skip
    """How much storing tables below float32 changes the outputs, where that can be measured: on
    several ranks by ``effect``.
    """
    stores = any(one.report.journal.stored for one in (compiled, *compiled._forms))
    if not stores and ranks > 1 and materialise.on_meta(model):
        return f"precision={precision!r}: tables on meta are stored when the ranks run"
    if not stores:
        return f"precision={precision!r}: no table is stored in it; see what was missed and why"
    told = effect.told(compiled) if effect is not None and spread.run_here(ranks) else None
    if told is not None:
        return told
    whole = ranks == 1 and model is not captured.root
    if captured.batches is None or captured.signature is None or not whole:
        return (
            f"precision={precision!r}: recast.diff(model, fast, batch) tells its effect on outputs"
        )
    return rounding.sentence(model, compiled, rounding.calls_of(captured))


def _costs(root: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """One sentence for each reason why some tables still get a dense gradient."""
    names = {id(t): name for name, t in root.named_parameters()}
    tables = {id(m._parameters.get("weight")) for m in root.modules() if isinstance(m, _TABLES)}
    dense: dict[str, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            reason = row_optimizer.why_dense(optimizer, group, p)
            if reason is not None and id(p) in tables and id(p) in names:
                dense.setdefault(reason, []).append(p)
    return [
        f"{reason}: {len(held)} table{'s get' if len(held) > 1 else ' gets'} a dense gradient all"
        f" the same, {sum(t.numel() * t.element_size() for t in held) / 1e6:.1f} MB a step that are"
        " not saved"
        for reason, held in dense.items()
    ]
