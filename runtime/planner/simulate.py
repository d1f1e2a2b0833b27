"""Models the step time of a published model on any machine, with the planner's cost model.

Next to each published step time are what the same arithmetic gives for the implementation that it
was measured with (:mod:`.published`), to check the model by, and by what factor ours is shorter.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

import numpy as np

from recast.errors import PlanError, UsageError

from ..plan import Plan, Table
from ..topology import GIB, Topology
from . import published as theirs
from .cost import FLOPS, LINK, MEMORY, Setting, exchanged
from .cost import dense as dense_work
from .load import Dense, TableLoad
from .make import RESERVE, plan
from .models import MODELS, Model
from .remedies import enough, ranks_of

BATCH = 65536  # global, of all published figures
DEVICES = (1, 8, 16, 32, 128)
ASSUMPTIONS = (
    f"modelled, not measured: {MEMORY:.0%} of the peak of memory, {LINK:.0%} of links,"
    f" {FLOPS:.0%} of arithmetic",
    "fp32 weights, outputs and wire; elementwise Adagrad; ids follow the model's power law and are"
    " spread evenly over the rows of a table; every rank has its part of the batch",
    "phases follow each other but for the bottom MLP, which runs beside communication; no data"
    " loading; Python and launches are hidden behind the device",
    "what does not fit is modelled on devices of just enough memory, the same otherwise",
    "published figures are of distributed-embeddings (TensorFlow) on DGX A100. 'for them' is what"
    " the same arithmetic says their implementation takes: tables dealt out by size, one lookup"
    " after the other, gradients written for every id, sums and Adagrad in passes of their own. Its"
    " three rates (ms of a step, ms of a table, part of the peak of memory) are fitted once for"
    " each release, on the steps of Tiny and Small; Medium, Large and Jumbo are predicted",
    "'ours' is how many times what this model says ours would take they took: it is not measured",
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """One model on one topology; times in ms, bytes per rank. ``problem``: why it does not fit; the
    plan is then for devices with just enough memory.
    """

    model: str
    topology: Topology
    plan: Plan
    wire: float = 0.0  # bytes that a rank receives and sends, on average
    published: tuple[tuple[str, float], ...] = ()
    for_them: tuple[tuple[str, float], ...] = ()  # the same, as this model computes them
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        made = self.plan
        data: dict[str, Any] = {
            "model": self.model, "ranks": self.topology.ranks, "topology": self.topology.name,
            "modelled": True, "fits": not self.problem, "published_ms": dict(self.published),
            "for_them_ms": dict(self.for_them),
            "ratio_for_them": {k: ms / dict(self.for_them)[k] for k, ms in self.published},
        }  # fmt: skip
        if self.problem:
            data["problem"] = self.problem
        slowest = max(made.loads, key=lambda load: load.step)
        return data | {
            "step_ms": made.cost, "compute_ms": slowest.compute,
            "communication_ms": slowest.communication, "bound_ms": made.lower_bound,
            "wire_bytes": self.wire,
            "device_bytes": max(load.device_bytes for load in made.loads),
            "host_bytes": max(load.host_bytes for load in made.loads),
            "ratio": {k: ms / (made.cost or 1) for k, ms in self.published},
        }  # fmt: skip


def simulate(name: str, topology: Topology, batch: int = BATCH) -> Simulated:
    """The model ``name`` with a global batch of ``batch``. Raises UsageError for an unknown model,
    or a batch smaller than the number of ranks.
    """
    model = _named(name)
    if batch < topology.ranks:
        raise UsageError(f"a batch of {batch} for {topology.ranks} ranks", why="each has a sample")
    loads = tables(model, batch)
    published = tuple(
        (source, ms[topology.ranks])
        for source, ms in model.published.items()
        if topology.ranks in ms and batch == BATCH and topology.name == "dgx-a100"
    )
    each = -(-batch // topology.ranks)
    part, setting = dense(model), Setting(topology, each)
    checked = tuple(
        (source, theirs.step(model, part, setting, theirs.RELEASES[source], distinct))
        for source, _ in published
    )
    reserve = int(RESERVE * topology.device_memory + dense_work(part, setting).memory)
    given, problem = topology, ""
    while True:
        try:
            made = plan(loads, given, batch=each, dense=part, reserve=reserve)
            break
        except PlanError as error:
            problem = problem or str(error)
            room = max(enough(loads, setting, reserve), given.device_memory * 1.1)
            given = replace(topology, device_memory=int(room))
    wire = _wire(made, loads, setting)
    return Simulated(name, topology, made, wire, published, checked, problem)


def text(rows: Sequence[Simulated]) -> str:
    """A table, another beside published figures, and what they assume; within 100 columns."""
    head = ["model", "ranks", "modelled ms", "compute", "wire ms", "wire MB", "GiB", "above bound"]
    lines, problems = [head], []
    published = [["model", "ranks", "published ms", "for them (ratio)", "ours"]]
    for row in rows:
        data, of = row.to_dict(), [row.model, str(row.topology.ranks)]
        memory = f"{data['device_bytes'] / GIB:.1f}"
        memory += f" + {data['host_bytes'] / GIB:.0f} host" if data["host_bytes"] else ""
        if row.problem:
            problems.append(f"{row.model} on {ranks_of(row.topology.ranks)}: {row.problem}")
            memory += ": does not fit"
        lines.append([
            *of, f"{data['step_ms']:.2f}",
            f"{data['compute_ms']:.2f}", f"{data['communication_ms']:.2f}",
            f"{row.wire / 1e6:.1f}", memory, f"{row.plan.gap or 0:.1%}",
        ])  # fmt: skip
        if row.published:
            published.append([
                *of,
                ", ".join(f"{source} {value:g}" for source, value in row.published),
                ", ".join(f"{ms:.1f} ({data['ratio_for_them'][k]:.2f})" for k, ms in row.for_them),
                ", ".join(f"{ratio:.1f}x" for ratio in data["ratio"].values()),
            ])  # fmt: skip
    beside = ["", *_columns(published)] if len(published) > 1 else []
    notes = ["", *ASSUMPTIONS, *(["", *problems] if problems else [])]
    told = (part for note in notes for line in note.split("\n") for part in _wrapped(line))
    return "\n".join([*_columns(lines), *beside, *told])


def _wrapped(line: str) -> list[str]:
    """Continued below its first words; the reasons of an error have a word before them."""
    indent = " " * (7 if line.startswith("  ") else 2)
    return textwrap.wrap(line, 100, subsequent_indent=indent, break_long_words=False) or [""]


def _columns(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return [line.rstrip() for line in padded]


def _named(name: str) -> Model:
    if name not in MODELS:
        raise UsageError(
            f"no model {name!r}",
            why=f"there are {', '.join(MODELS)}",
            tries=tuple(get_close_matches(name, MODELS, n=2)) or tuple(MODELS),
        )
    return MODELS[name]


def tables(model: Model, batch: int) -> list[TableLoad]:
    """The loads of the tables of ``model``, elementwise Adagrad, with the repeats of its ids."""
    made: list[TableLoad] = []
    known: dict[tuple[int, int], float] = {}
    for count, rows, dim, ids in model.groups:
        n = sum(ids)
        key = rows, n * batch
        if key not in known:
            known[key] = distinct(rows, n * batch, model.alpha) / (n * batch)
        for _ in range(count):
            made.append(
                TableLoad(
                    Table(f"t{len(made)}", rows, dim), ids=float(n), lookups=len(ids),
                    distinct=known[key], state_element=4.0,
                )
            )  # fmt: skip
    return made


@cache
def distinct(rows: int, ids: int, alpha: float) -> float:
    """E[distinct] = sum_i 1 - (1 - p_i)^ids, p of the truncated power law (0 is uniform).

    P(id < i) = ((i + 1)^g - 1) / ((rows + 1)^g - 1), g = 1 - alpha. Ranks up to 1e5 one by one, the
    tail in blocks of 0.1 % within which p hardly changes.
    """
    head = np.arange(min(rows, 100_000) + 1, dtype=float)
    steps = int(np.log(max(rows, 1) / head[-1]) / 1e-3) + 1 if rows > head[-1] else 0
    tail = np.geomspace(head[-1], rows, steps + 1)[1:] if steps else np.zeros(0)
    edges = np.concatenate([head, tail])
    if alpha == 0 or alpha == 1:
        below = edges / rows if alpha == 0 else np.log1p(edges) / np.log1p(rows)
    else:
        below = ((edges + 1) ** (1 - alpha) - 1) / ((rows + 1.0) ** (1 - alpha) - 1)
    width = np.diff(edges)
    p = np.diff(below) / width
    return float((width * -np.expm1(ids * np.log1p(-np.minimum(p, 1 - 1e-12)))).sum())


def dense(model: Model) -> Dense:
    """MLPs: 6 flops per multiply-add (forward and two backward); activations move 6 times."""
    width = sum(tables * dim * len(ids) for tables, _, dim, ids in model.groups)
    if model.bottom:
        entry = width + model.bottom[-1]
    else:
        entry = -(-width // model.stride) + model.numerical
    top, bottom = _products(entry, model.mlp), _products(model.numerical, model.bottom)
    macs = top + bottom + model.cross
    touched = 3 * entry + 6 * (sum(model.mlp) + sum(model.bottom))
    touched += 6 * entry * 3 if model.cross else 0
    return Dense(
        flops=6.0 * macs, traffic=4.0 * touched, parameters=4.0 * macs, hideable_flops=2.0 * bottom
    )


def _products(entry: int, layers: Sequence[int]) -> int:
    return sum(a * b for a, b in zip([entry, *layers], layers, strict=False))


def _wire(made: Plan, loads: Sequence[TableLoad], setting: Setting) -> float:
    """Bytes an average rank exchanges for its tables: ids, vectors, gradients, all-reduces."""
    ranks = setting.topology.ranks
    total = 0.0
    for load, placement in zip(loads, made.placements, strict=True):
        if placement.sharding_type == "data_parallel":
            total += 2 * load.table.rows * load.table.dim * 4.0 * ranks
            continue
        total += sum(sum(exchanged(load, setting, *s.size)) for s in placement.shards)
    return total / ranks * (ranks - 1) / ranks
