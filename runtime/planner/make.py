"""``plan``: options, search, and the result as placements with their reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np

from recast.errors import UsageError

from ..plan import Load, Placement, Plan, Why, fingerprint, shards
from ..topology import Topology
from . import cost, remedies
from .bound import Bound, lower_bound
from .load import Dense, TableLoad
from .options import Choice, Option, Thresholds, choice, fixed, options_of, pack
from .problem import Problem, Solution, undominated
from .search import search

RESERVE = 0.1  # of device memory: context, allocator, workspaces


def plan(
    loads: Sequence[TableLoad],
    topology: Topology,
    *,
    batch: int,
    pins: Mapping[str, str | Placement] | None = None,
    column_slice_threshold: int | None = None,
    row_slice_threshold: int | None = None,
    data_parallel_threshold: int | None = None,
    wire: tuple[float, float] = (4.0, 4.0),
    dense: Dense | None = None,
    reserve: int | None = None,
) -> Plan:
    """The plan that fits into memory and makes the slowest rank of a training step fastest.

    Args:
        loads: what each table demands in a step: ids, lookups, optimizer state.
        topology: the machines; its ``ranks`` are those of the plan.
        batch: samples per rank.
        pins: by table name, a sharding type or a whole Placement.
        column_slice_threshold, row_slice_threshold, data_parallel_threshold: in elements, see
            :class:`Thresholds`.
        wire: bytes per value sent between ranks, forward and backward.
        dense: what the rest of the model demands of a rank.
        reserve: device bytes per rank that tables may not use; None: a tenth, and what ``dense``
            takes.

    Tables are put into host memory only if the devices cannot hold all of them. Deterministic:
    equal arguments give equal plans, on every machine and rank.

    Returns:
        A plan whose ``cost`` is the modelled time of a step on the slowest rank, and whose
        ``lower_bound`` no plan with the same options can go below, both in milliseconds.

    Raises:
        UsageError: wrong arguments.
        PlanError: no plan fits, with numbered remedies.
    """
    limits = Thresholds(data_parallel_threshold, row_slice_threshold, column_slice_threshold)
    if batch < 1:
        raise UsageError(f"batch={batch}", why="it is the samples of one rank, at least 1")
    pins = dict(pins or {})
    _known(pins, loads)
    setting = cost.Setting(topology, batch, *wire)
    work = cost.dense(dense or Dense(), setting)
    if reserve is None:
        reserve = int(RESERVE * topology.device_memory + work.memory)
    placed = {
        k: p for k, t in enumerate(loads) if isinstance(p := pins.get(t.table.name), Placement)
    }
    names = {k: p for k, t in enumerate(loads) if isinstance(p := pins.get(t.table.name), str)}
    free = [k for k in range(len(loads)) if k not in placed]
    choices = {k: choice(loads[k], setting, limits, names.get(k)) for k in free}
    start = _start(work, setting, fixed(placed, loads, setting), reserve)
    for spill in (False, True):
        options = [
            o
            for at, k in enumerate(free)
            for o in options_of(at, loads[k], setting, choices[k], spill)
        ]
        found = _solve(options, len(free), start, setting)
        if found is not None or not topology.host_memory:
            break
    if found is None:
        raise remedies.infeasible(loads, setting, reserve)
    chosen = [found.options[k] for k in found.solution.option.tolist()]
    placements = {
        k: _placement(loads[k], o, found.solution.ranks[o.table], found, choices[k])
        for k, o in zip(free, chosen, strict=True)
    } | {
        k: replace(p, state_bytes=loads[k].state_bytes, stored_row=loads[k].stored_row)
        for k, p in placed.items()
    }
    tables = tuple(t.table for t in loads)
    return Plan(
        world_size=topology.ranks,
        fingerprint=fingerprint(tables),
        tables=tables,
        placements=tuple(placements[k] for k in range(len(loads))),
        topology=topology,
        cost=found.solution.score,
        lower_bound=_proven(found),
        loads=_loads(chosen, found.solution, start, work.hidden),
        reserved=reserve,
        notes=_notes(setting, work, placements.values()),
    )


def _proven(found: _Found) -> float:
    """A lower bound: no plan with these options costs less."""
    own = found.solution.score
    return own if found.solution.proven else min(found.bound.value, own)


def _known(pins: Mapping[str, object], loads: Sequence[TableLoad]) -> None:
    names = [t.table.name for t in loads]
    double = sorted({n for n in names if names.count(n) > 1}) if len({*names}) < len(names) else []
    if double:
        raise UsageError(f"two tables are named {double[0]!r}")
    for name in pins:
        if name not in set(names):
            near = get_close_matches(name, names, n=1)
            raise UsageError(f"pins: no table {name!r}", tries=near)


@dataclass(frozen=True, slots=True)
class _Start:
    """The load of ranks before any table is placed: time and memory."""

    compute: np.ndarray
    communication: np.ndarray
    device: np.ndarray
    host: np.ndarray  # of each host
    hidden: float

    @property
    def terms(self) -> np.ndarray:
        both = self.compute + self.communication - self.hidden
        return np.stack([self.compute, both]) if self.hidden else both[None]


def _start(
    work: cost.DenseWork,
    setting: cost.Setting,
    pinned: Iterable[tuple[int, cost.Work]],
    reserve: int,
) -> _Start:
    t = setting.topology
    made = _Start(
        np.full(t.ranks, work.compute), np.full(t.ranks, work.communication),
        np.full(t.ranks, float(reserve)), np.zeros(t.hosts), work.hidden,
    )  # fmt: skip
    for rank, w in pinned:
        made.compute[rank] += w.compute
        made.communication[rank] += w.communication
        made.device[rank] += w.device
        made.host[t.host(rank)] += w.host
    return made


@dataclass(frozen=True, slots=True)
class _Found:
    options: list[Option]
    problem: Problem
    first: list[int]  # of each table, its first option
    solution: Solution
    bound: Bound


def _solve(
    options: list[Option], tables: int, start: _Start, setting: cost.Setting
) -> _Found | None:
    t = setting.topology
    problem = Problem(
        tables, pack(options, bool(start.hidden)), t.ranks, t.ranks_per_host, t.ranks_per_host,
        float(t.device_memory), float(t.host_memory), start.terms, start.device, start.host,
    )  # fmt: skip
    if not tables:  # all pinned
        scores = start.terms.max(0)
        none = Solution(np.zeros(0, dtype=np.int64), (), float(scores.max()), scores)
        return _Found(
            [], problem, [0], none, Bound(none.score, np.ones(1), 0.0, np.zeros(0, dtype=bool))
        )
    kept = undominated(problem)
    problem = replace(problem, options=problem.options.take(kept))
    if len(np.unique(problem.options.table)) < tables:
        return None
    bound = lower_bound(problem)
    solution = None if bound is None else search(problem, bound)
    if bound is None or solution is None:
        return None
    left = [options[k] for k in kept.tolist()]
    return _Found(left, problem, problem.first.tolist(), solution, bound)


def _placement(
    load: TableLoad, option: Option, ranks: np.ndarray, found: _Found, allowed: Choice
) -> Placement:
    return Placement(
        table=load.table.name,
        sharding_type=option.kind,
        shards=shards(load.table, option.kind, ranks.tolist()),
        memory=option.memory,
        why=_why(option, found, allowed),
        state_bytes=load.state_bytes,
        stored_row=load.stored_row,
    )


def _why(option: Option, found: _Found, allowed: Choice) -> Why:
    """The chosen option and the best of another name, compared by time and, if short, by memory."""
    mine = range(found.first[option.table], found.first[option.table + 1])
    o, price = found.problem.options, found.bound.price
    cost = {k: float(o.total[-1, k]) for k in mine}
    priced = {k: cost[k] + price * float(o.total_device[k]) for k in mine}
    name = {k: found.options[k].name for k in mine}
    own = next(k for k in mine if found.options[k] is option)
    rest = sorted((k for k in mine if name[k] != option.name), key=lambda k: priced[k])
    reason = allowed.reason
    if not reason and rest and cost[rest[0]] < cost[own]:
        reason = "device memory is short" if price else "it evens out the ranks"
    if not reason and not rest:
        reason = "no other fits or is as good in anything"
    next_best = rest[0] if rest else None
    return Why(
        chosen=option.name,
        cost=cost[own],
        runner_up=None if next_best is None else name[next_best],
        runner_up_cost=None if next_best is None else cost[next_best],
        reason=reason,
    )


def _loads(
    chosen: Sequence[Option], solution: Solution, start: _Start, hidden: float
) -> tuple[Load, ...]:
    """The load of every rank; each shard counts as the largest of its table."""
    compute, communication = start.compute.copy(), start.communication.copy()
    device, host = start.device.copy(), np.zeros(len(start.device))
    for o, ranks in zip(chosen, solution.ranks, strict=True):
        compute[ranks] += o.work.compute
        communication[ranks] += o.work.communication
        device[ranks] += o.work.device
        host[ranks] += o.work.host
    step = np.maximum(compute, compute + communication - hidden)
    return tuple(
        Load(float(c), float(m), float(s), int(d), int(h))
        for c, m, s, d, h in zip(compute, communication, step, device, host, strict=True)
    )


def _notes(
    setting: cost.Setting, work: cost.DenseWork, placements: Collection[Placement]
) -> tuple[str, ...]:
    hosted = sum(p.memory == "host" for p in placements)
    notes = [
        f"modelled, not measured: {setting.batch} samples a rank, {cost.MEMORY:.0%} of the peak of"
        f" memory, {cost.LINK:.0%} of links, {cost.FLOPS:.0%} of arithmetic; ids spread evenly over"
        " the rows of a table"
    ]
    if work.hidden:
        notes.append(f"{work.hidden:.3g} ms of communication run beside the bottom MLP")
    if hosted:
        notes.append(f"{hosted} tables are in host memory: the devices cannot hold all")
    return tuple(notes)
