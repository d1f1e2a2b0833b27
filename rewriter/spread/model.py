"""One model over many ranks: the plan, the communication in its graphs, the tables in their places.

It runs after all other passes, on graphs that are proven to be the model; that the exchange adds no
error is proven by ``tests/ranks``, which compare with one process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recast import passes as library
from recast.errors import UsageError
from recast.passes.table_uses import Use, distinct, ids_of, load, repeats, uses
from recast.rewriter import arguments, pipeline
from recast.rewriter.capture.capture_model import Captured
from recast.rewriter.compiled.module import Compiled
from recast.rewriter.ir import Graph
from recast.rewriter.pipeline import Context
from recast.rewriter.report.journal import Journal
from recast.rewriter.report.short_lists import braces
from recast.runtime import topology
from recast.runtime.dynamic import ranks as dynamic_ranks
from recast.runtime.dynamic import table as dynamic_table
from recast.runtime.plan import Plan, Table
from recast.runtime.planner import Dense
from recast.runtime.planner import plan as make_plan
from recast.runtime.ranks import (
    collectives,
    dense_reduce,
    faults,
    faults_agree,
    late_optimizers,
    materialise,
    placeholders,
    shards,
    wire,
)

from . import check as spread_check
from . import stored
from .choice import (
    Choice,
    allowed,
    choice_of,
    choice_of_dynamic,
    fused,
    pins_of,
    state_of,
    thresholds,
)
from .reached import reached

_BATCH = 1024  # samples per rank, if there is no example
_SAME_GRAPH = (
    "an example of the same sizes but for the batch on every rank, or example=[a, b], two batches"
    " that differ in every size that varies"
)
_OWN = (
    "in a part without a graph, what pairs rows of the batch, as an in-batch softmax, or computes"
    " over them, as the mean of some, has those of this rank alone; random numbers that it draws"
    " are for this rank's own batch, and with one seed the same on all ranks"
)
_SPARSE = (
    "tables with sparse=True and no optimizer that is fused: their gradients are sparse tensors of"
    " this rank's rows, of which clip_grad_norm_ and GradScaler do not see the other ranks'"
)


@dataclass(frozen=True)
class Spread:
    """The arguments of ``optimize`` that concern several ranks."""

    plan: Plan | None = None
    topology: topology.Topology | str | None = None
    sharding: Any = None
    wire: Any = "fp32"
    precision: str | None = None
    semantics: str = "exact"

    @property
    def lazy(self) -> bool:
        return self.semantics == "lazy"


def run_here(ranks: int) -> bool:
    """Whether a process group of ``ranks`` ranks, more than one, is there."""
    return collectives.ranks() == ranks > 1


def check(asked: Spread, ranks: int) -> Spread:
    """``asked`` with as many of the machines as ``ranks`` need; called before anything is captured.
    Raises UsageError for invalid arguments.
    """
    if run_here(ranks):
        faults.start()  # from here on, a rank that fails is named to the others, which wait for it
    wire.parse(asked.wire)
    if asked.plan is not None and not isinstance(asked.plan, Plan):
        raise UsageError(
            f"optimize: plan is a {type(asked.plan).__name__}, not a recast.Plan",
            why="a plan says where every table lives",
            tries=("plan=recast.Plan.load(path)", "leave plan out"),
        )
    machines = asked.topology
    if isinstance(machines, str):
        machines = topology.detect(ranks) if machines == "here" else topology.named(machines)
    if machines is not None and not isinstance(machines, topology.Topology):
        raise UsageError(
            f"optimize: topology is a {type(machines).__name__}, not the name of one",
            why="it describes the machines: ranks, hosts, memory and bandwidths",
            tries=(
                "topology='dgx-a100', or another preset, or a JSON file",
                "leave topology out, for the present machine",
            ),
        )
    if asked.plan is not None and asked.plan.world_size != ranks:
        raise UsageError(
            f"optimize: the plan is for {asked.plan.world_size} ranks, and world_size is {ranks}",
            why="each rank of a plan has its own part of the tables",
            tries=(f"torchrun --nproc-per-node {asked.plan.world_size}", "leave plan out"),
        )
    if asked.plan is not None and asked.sharding is not None:
        raise UsageError(
            "optimize: plan and sharding are both given",
            why="a plan says where every table lives already",
            tries=("leave sharding out", "leave plan out"),
        )
    thresholds(asked.sharding)
    return asked if machines is None else replace(asked, topology=machines.of(ranks))


def spread(
    compiled: Compiled, captured: Captured, optimizer: Optimizer | None, ranks: int, asked: Spread
) -> None:
    """Turn ``compiled`` into one of ``ranks`` ranks; if that many run, its tables are sharded."""
    spread_check.check_forms(compiled)
    spread_check.check_lookups(compiled)
    used = _uses(compiled)
    tables = tables_of(compiled)
    choices = {
        t.name: choice_of_dynamic(t.name, used[t.name])
        if t.dynamic
        else choice_of(used[t.name], optimizer, stored.excluded(asked.precision, t), asked.lazy)
        for t in tables
    }
    codecs = tuple(codec.name for codec in wire.parse(asked.wire))
    sample = _sample(compiled, captured, tables)
    present = collectives.ranks() == ranks
    if present:  # before anything from one rank is used for all
        facts = _facts(compiled, optimizer, asked)
        graph = facts.pop("graph")
        faults_agree.agree(facts)
        faults_agree.agree({"graph": graph}, tries=_SAME_GRAPH)

    def make() -> str:
        plan = _planned(tables, used, choices, sample, optimizer, ranks, asked)
        return replace(plan, notes=(*plan.notes, *_kept_whole(plan, used))).to_json()

    if asked.plan is not None:
        plan = stored.recounted(asked.plan, asked.precision, tables)
    else:  # from the batch of one rank, not of each
        plan = Plan.from_json(collectives.from_first(make) if present else make())
    if present:
        faults_agree.agree({"plan": plan.to_json()})
    plan.check(tables)
    allowed([(p.table, p.sharding_type) for p in plan.placements], choices)
    counting = _counting(compiled)
    once = frozenset(
        t.name for t in tables if t.name not in counting and repeats(t, used[t.name], sample.values)
    )
    traffic = _traffic(plan, used, sample, wire.parse(asked.wire), once)
    passes = library.communication(plan, (codecs[0], codecs[1]), once)
    forms = [(compiled, captured), *((form, form._captured) for form in compiled._forms)]
    for form, of in forms:
        _communicate(form, of, passes, form.report.journal)
    compiled.plan = plan
    compiled.report.notes += [str(plan), *_kept_whole(plan, used), traffic]
    if compiled.report.captured != "whole":
        compiled.report.notes.append(_OWN)
    if any(u.lookups and u.sparse for u in used.values()) and not fused(optimizer):
        compiled.report.notes.append(_SPARSE)
    if present:
        _place(compiled, plan, optimizer)
    if asked.precision is not None:
        plain = [t.name for t in tables if not t.dynamic]
        stored.store(forms, plain, asked.precision, present)
    if present:
        _average_dense(compiled)
    else:
        placeholders.remove(compiled._root)
        compiled.refuse(arguments.launch(ranks))
        compiled.report.notes.append(
            f"not run here: there is no process group of {ranks} ranks; this result can be printed,"
            f" dumped, planned and saved, and `torchrun --nproc-per-node {ranks} train.py` runs it"
        )


def alone(compiled: Compiled, optimizer: Optimizer | None, asked: Spread) -> None:
    """Check arguments for several ranks when there is only one, and note that they have no effect.

    Raises:
        UsageError: what would be refused on several ranks, such as a table that does not exist.
    """
    said = [name for name in ("sharding", "topology") if getattr(asked, name) is not None]
    if any(codec.name != "fp32" for codec in wire.parse(asked.wire)):
        said.append("wire")
    if isinstance(asked.sharding, Mapping):
        used = _uses(compiled)
        choices = {
            t.name: Choice() if t.dynamic else choice_of(used[t.name], optimizer, lazy=asked.lazy)
            for t in tables_of(compiled)
        }
        pins_of(asked.sharding, choices)
    if said:
        have = "have" if len(said) > 1 else "has"
        compiled.report.notes.append(f"there is one rank: {', '.join(said)} {have} no effect")


# ---------------------------------------------------------------- the plan


def _uses(compiled: Compiled) -> dict[str, Use]:
    root, graph = compiled._root, _training(compiled)
    used = uses(_every_graph(compiled), root)
    for name, use in uses([graph] if graph is not None else [], root).items():
        used[name].lookups = use.lookups  # once, not once per mode and form
    if not compiled._graphs:  # else what runs as it is stands in one, with the tables that it holds
        report = compiled.report
        because = " at ".join(text for text in (report.why, report.where) if text)
        told = f" ({because})" if because else ""
        for use in used.values():
            use.whole = f"the model is not captured whole{told}, and what is left may read it"
    return used


def tables_of(compiled: Compiled) -> list[Table]:
    """Every distinct table of the model, under its first name, in the order of ``state_dict``."""
    used = uses(_every_graph(compiled), compiled._root)
    return [_table(n, p) for n, p in compiled._root.named_parameters() if n in used]


def _every_graph(compiled: Compiled) -> list[Graph]:
    return [g for one in (compiled, *compiled._forms) for g in one._graphs.values()]


def _table(name: str, parameter: nn.Parameter) -> Table:
    dynamic = dynamic_table.of(parameter)
    rows = int(parameter.shape[0]) if dynamic is None else dynamic.capacity
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Table(name, rows, int(parameter.shape[1]), dtype, dynamic is not None)


def _counting(compiled: Compiled) -> set[str]:
    """Dynamic tables that count how often an id is looked up: their ids are sent every time."""
    held = compiled._root.named_parameters()
    known = {name: dynamic_table.of(p) for name, p in held}
    return {name for name, table in known.items() if table is not None and table.counts_lookups}


def _planned(
    tables: list[Table],
    used: Mapping[str, Use],
    choices: Mapping[str, Choice],
    sample: Sample,
    optimizer: Optimizer | None,
    ranks: int,
    asked: Spread,
) -> Plan:
    row, element = state_of(optimizer)
    loads = [
        replace(
            load(
                t, used[t.name], sample.values, sample.size,
                (row + dynamic_ranks.BYTES_OF_AN_ID * t.dynamic, element), choices[t.name].types,
            ),
            only=choices[t.name].only,
            stored_row=stored.row_bytes(asked.precision, t),
        )
        for t in tables
    ]  # fmt: skip
    forward, backward = wire.parse(asked.wire)
    machines = asked.topology
    return make_plan(
        loads,
        machines if isinstance(machines, topology.Topology) else topology.detect(ranks),
        batch=sample.size,
        pins=pins_of(asked.sharding, choices),
        wire=(_value_bytes(forward), _value_bytes(backward)),
        dense=Dense(parameters=sample.dense),
        **thresholds(asked.sharding),
    )


def _value_bytes(codec: wire.Codec) -> float:
    return float((codec.dtype or torch.float32).itemsize)


@dataclass(frozen=True)
class Sample:
    """One batch, for the planner: its size, its inputs by name; the bytes of dense parameters."""

    size: int
    values: Mapping[str, Any]
    dense: float


def _sample(compiled: Compiled, captured: Captured, tables: list[Table]) -> Sample:
    held = {t.name for t in tables}
    dense = sum(
        p.numel() * p.element_size() for n, p in captured.root.named_parameters() if n not in held
    )
    graph = _training(compiled)
    if captured.batches is None or captured.signature is None or graph is None:
        return Sample(_BATCH, {}, dense)
    leaves, _ = captured.signature.leaves(captured.batches[0])
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    size = captured.sizes[0] if captured.sizes else _BATCH
    return Sample(size, dict(zip(names, leaves, strict=False)), dense)


def _training(compiled: Compiled) -> Graph | None:
    """The graph for train mode."""
    return compiled._graphs.get("both") or compiled._graphs.get("train")


# ---------------------------------------------------------------- graphs and tables


def _communicate(
    compiled: Compiled, captured: Captured, passes: Sequence[pipeline.Pass], journal: Journal
) -> None:
    _check_captured(compiled)
    for graph in compiled._graphs.values():
        context = Context(captured.root, journal, captured.batches, captured.sizes)
        pipeline.run(graph, passes, context)
    compiled.spread()
    # Captured parts have no sharded tables, but may compute statistics and masks of the batch.
    batchwise = [p for p in passes if isinstance(p, library.BATCHWISE)]
    for path, part in compiled._parts.items():
        _communicate(part, captured.parts[path], batchwise, journal)


def _check_captured(compiled: Compiled) -> None:
    """Raise UsageError for batch norm or dropout outside all graphs: it would see one rank only."""
    if compiled._graphs:
        return  # what is opaque in a graph is refused by the passes, in train mode
    for path, module in library.inner(compiled._root, ""):
        if library.batchwise(module):
            raise UsageError(
                f"{path or type(module).__name__} on several ranks",
                why="it is not captured, so its statistics or masks would be those of one rank",
                tries=("recast.explain(model, example=batch), for what is in the way",),
            )


def _place(compiled: Compiled, plan: Plan, optimizer: Optimizer | None) -> None:
    root, rank = compiled._root, collectives.rank()
    held = dict(root.named_parameters())
    parts = {
        t.name: shards.ShardedTable(t, plan.placement(t.name), rank, plan.world_size)
        for t in plan.tables
    }
    for name in [t.name for t in plan.tables if t.dynamic]:
        dynamic_ranks.place(held[name], parts.pop(name), optimizer)
    if materialise.on_meta(root):
        materialise.materialise(root, parts)
    else:
        dense_reduce.broadcast(root)
        for name, part in parts.items():
            shards.place(held[name], part)
    late_optimizers.start()
    if optimizer is not None:
        shards.place_state(optimizer)
        late_optimizers.prepare(optimizer)


def _average_dense(compiled: Compiled) -> None:
    """Average the gradients of what every rank has from now on; save and load parts as wholes."""
    from recast.runtime.ranks import shards_state  # it imports DTensor, two seconds

    root = compiled._root
    vars(compiled)["_places"] = shards_state.hook(root)
    held = dict(root.named_parameters())
    averaged = reached(_training(compiled), root)
    parted = [n for n, p in held.items() if shards.of(p) is not None]
    dense = [n for n in held if n in averaged and n not in parted]
    vars(compiled)["_dense"] = dense_reduce.DenseReduce(
        root, dense, parted, _flagged(compiled), stored=_stored(compiled),
        several=bool(compiled._forms),
    )  # fmt: skip


def _stored(compiled: Compiled) -> set[str]:
    """The paths of the attributes that a call writes, as of a loss that forward keeps."""
    cases = compiled._runner.traced.values()
    found = {path for case in cases for path in (*case.stores, *(at for at, _ in case.entries))}
    for form in compiled._forms:
        found |= _stored(form)
    for at, part in compiled._parts.items():
        found |= {f"{at}.{path}" for path in _stored(part)}
    return found


def _flagged(compiled: Compiled) -> tuple[str, ...]:
    """The modules whose training flags matter: statistics and masks of the batch, and what Python
    asks. The flags of others may differ between ranks.
    """
    root = compiled._root
    forms = compiled, *compiled._forms
    nodes = [node for graph in _every_graph(compiled) for node in graph.nodes]
    if not nodes or any(one._parts for one in forms):
        return tuple(path for path, _ in root.named_modules())
    read = (str(node.target) for node in nodes if node.op == "get_attr")
    flags = (path.rpartition(".") for path in read)
    found = {owner for owner, _, name in flags if name == "training"}
    traced = (case for one in forms for case in one._runner.traced.values())
    found.update(path for case in traced for path in case.forks)
    for called in {str(node.target) for node in nodes if node.op == "call_module"}:
        inside = library.inner(root.get_submodule(called), called)
        found.update(path for path, module in inside if library.batchwise(module))
    return tuple(sorted(found))


def _facts(compiled: Compiled, optimizer: Optimizer | None, asked: Spread) -> dict[str, str]:
    """What must be the same on every rank, as text."""
    root = compiled._root
    named = root.state_dict(keep_vars=True).items()
    model = [f"{n} {tuple(t.shape)} {t.dtype}" for n, t in named if isinstance(t, torch.Tensor)]
    groups = [] if optimizer is None else optimizer.param_groups
    sizes = [str([tuple(p.shape) for p in group["params"]]) for group in groups]
    return {
        "versions": f"torch {torch.__version__}, recast {sys.modules['recast'].__version__}",
        "model": "\n".join(model),
        "options": f"sharding={asked.sharding!r}\nwire={asked.wire!r}\ntopology={asked.topology!r}"
        f"\nplan={'given' if asked.plan is not None else None}\nprecision={asked.precision!r}"
        f"\nsparse_semantics={asked.semantics!r}",
        "graph": compiled.report.graph_text,
        "tables": "\n".join(dynamic_ranks.facts(root)),
        "optimizer": "\n".join([type(optimizer).__name__, *sizes]),
    }


# ---------------------------------------------------------------- what the report says


def _kept_whole(plan: Plan, used: Mapping[str, Use]) -> list[str]:
    """Why tables that could have been sharded stay on every rank: a sentence for each reason."""
    whole: dict[str, list[str]] = {}
    for placement in plan.placements:
        why = used[placement.table].whole
        if placement.sharding_type == "data_parallel" and why is not None:
            whole.setdefault(why, []).append(placement.table)
    return [
        f"{', '.join(braces(names))} {'is' if len(names) == 1 else 'are'} on every rank: {why}"
        for why, names in whole.items()
    ]


def _traffic(
    plan: Plan,
    used: Mapping[str, Use],
    sample: Sample,
    codecs: tuple[wire.Codec, wire.Codec],
    once: frozenset[str],
) -> str:
    """Bytes that are sent and received per sample, if the example tells how many ids it has."""
    ids = rows = back = 0.0
    for table in plan.tables:
        placement = plan.placement(table.name)
        if placement.sharding_type == "data_parallel":
            continue
        dtype = getattr(torch, table.dtype)
        columns = len({s.offset[1] for s in placement.shards})
        parts = len({s.offset[0] for s in placement.shards})
        for node, mode, _ in used[table.name].lookups:
            count = ids_of(node, sample.values, sample.size)
            if table.name in once and (mode == "none" or count == 1):
                count *= distinct(used[table.name], sample.values)
            answers = count if mode == "none" else min(count, parts)  # not of empty parts
            ids += 4.0 * count * columns
            rows += answers * codecs[0].bytes_per_row(table.dim, dtype)
            back += answers * codecs[1].bytes_per_row(table.dim, dtype)
    if not ids:
        return "no table is spread: nothing but dense gradients travels"
    return (
        f"on the wire a sample: {ids:,.0f} B of ids, {rows:,.0f} B of rows ({codecs[0].name}),"
        f" {back:,.0f} B of gradients ({codecs[1].name}); {plan.world_size - 1} of"
        f" {plan.world_size} of it to other ranks"
    )
