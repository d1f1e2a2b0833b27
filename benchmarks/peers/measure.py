"""Measures the cells of one set of tables in one process: first compares losses, then takes times.

If steps are long, the steps that compare losses count as a round already, and a variant that is far
behind in them gets no other.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from peers.cells import Cell, table_rows
from peers.contenders import Left, left_out, neighbour
from peers.floor import floor
from peers.model import Batch, Tables, batch
from peers.rounds import COMPARISON, WHATS, Times, Work, drop_behind, summaries, take_turns
from peers.variants import OURS, RECIPES, Built, Variant, build, failure, given

# Losses of the first steps, and the clicks of a forward, may differ by this much: sums are taken in
# another order.
SAME = 2e-5
CHECKED = 4  # steps; half as many if they are long
LONG = 0.4  # seconds of a step of ours from which steps are long
LAST = 1.4  # times the fastest peer: if steps are long, slower variants only compare losses
_MOST_IDS = 1 << 22  # ids kept in batches, all tables together


@dataclass(frozen=True)
class Plan:
    """How long to measure each cell, and what."""

    names: tuple[str, ...] = tuple(RECIPES)
    rounds: int = 15
    seconds: float = 20.0
    gib: float = 2.5  # tables and one state are cut to this size
    cpu_time: bool = False  # of the process, instead of wall time
    contenders: bool = False  # only variants that may be the fastest in a cell


def run(
    cells: Sequence[Cell], plan: Plan, known: Mapping[Cell, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """A result for each of ``cells``, which share their tables; ``known``: results so far."""
    results = dict(known or {})
    tables, built = _built(cells, plan, plan.names)
    for cell in cells:
        torch.set_num_threads(cell.threads)
        before = neighbour(cell)
        left: Left = {}
        if plan.contenders:
            left = left_out(cell, None if before is None else results.get(before), plan.gib)
        results[cell] = _cell(cell, tables, built, plan, left)
        yield results[cell]
        gc.collect()


def prepare(cells: Sequence[Cell], plan: Plan) -> Iterator[Cell]:
    """Run all compiled variants once, so that torch.compile's cache on disk has them."""
    names = [n for n in plan.names if "compile" in n]
    tables, built = _built(cells, plan, names)
    for cell in cells:
        torch.set_num_threads(cell.threads)
        left = left_out(cell, None, plan.gib) if plan.contenders else {}
        one = batch(cell, tables.rows, seed=100)
        for name, variant in built.variants.items():
            ids = given(variant.form, one)
            if "forward" not in left.get(name, {}):
                variant.module.eval()
                variant.infer(one.dense, ids)
            if cell.trains and "step" not in left.get(name, {}):
                variant.module.train()
                variant.train(one.dense, ids, one.label)
        yield cell


def _built(cells: Sequence[Cell], plan: Plan, names: Sequence[str]) -> tuple[Tables, Built]:
    """The tables and, on them, the variants that any of ``cells`` may need."""
    if plan.contenders:
        left = [left_out(cell, None, plan.gib) for cell in cells]
        names = [n for n in names if any(len(of.get(n, {})) < len(WHATS) for of in left)]
    tables = Tables(table_rows(cells[0].data, cells[0].dim, plan.gib), cells[0].dim)
    torch.set_num_threads(cells[0].threads)
    return tables, build(tables, cells[0], names)


def _cell(cell: Cell, tables: Tables, built: Built, plan: Plan, left: Left) -> dict[str, Any]:
    each = cell.batch * cell.ids * len(tables.rows)
    number = max(3, min(len(built.variants) + 2, _MOST_IDS // each))
    batches = [batch(cell, tables.rows, seed=100 + k) for k in range(number)]
    work = _work(cell, built, left)
    live = {name: built.variants[name] for name in work}
    inputs = {form: [given(form, b) for b in batches] for form in {v.form for v in live.values()}}
    absent = dict(built.absent)
    losses: dict[str, list[float]] = {}
    checked: dict[str, dict[str, float]] = {}
    clock = time.process_time if plan.cpu_time else time.perf_counter
    ids = [i.unique() for i in batches[0].ids]
    saved = tables.saved(ids)
    long = False
    for name, variant in list(live.items()):
        variant.reset()
        try:
            losses[name], checked[name] = _check(
                work[name], variant, batches[0], inputs[variant.form][0], long, clock
            )
            long = long or checked[name].get("step", 0.0) > LONG
        except Exception as error:  # a peer's own failure is a result
            if name in OURS.values():
                raise
            absent[name] = failure(error)
            del live[name], work[name]
        tables.restore(ids, saved)
    del saved
    limit = floor(cell, tables, batches[0], clock)
    times = {name: Times() for name in live}
    if long:
        for name, spent in checked.items():
            for what, seconds in spent.items():
                times[name].of(what)[COMPARISON] = seconds
        drop_behind(work, times, LAST)
    take_turns(live, work, batches, inputs, clock, times, plan.rounds, plan.seconds)
    absent |= {name: "left out by an option" for name in RECIPES if name not in plan.names}
    return {
        "cell": asdict(cell),
        "load": round(os.getloadavg()[0], 2),
        "floor": {k: float(f"{v:.4g}") for k, v in limit._asdict().items()},
        "differ": {name: float(f"{_apart(name, losses):.2g}") for name in live},
        "variants": summaries(times),
        "absent": absent,
        "left": {n: of for n, of in left.items() if n not in absent},
    }


def _work(cell: Cell, built: Built, left: Left) -> Work:
    """What each variant runs; without those that run nothing."""
    whats = WHATS if cell.trains else ("forward",)
    runs = {name: {w for w in whats if w not in left.get(name, {})} for name in built.variants}
    return {name: of for name, of in runs.items() if of}


def _check(
    runs: set[str],
    variant: Variant,
    one: Batch,
    ids: Any,
    long: bool,
    clock: Callable[[], float],
) -> tuple[list[float], dict[str, float]]:
    """What all variants of the same semantics must agree on: losses, or clicks without training;
    and the seconds of a forward and the last step.
    """
    # The same batch each time, so that what a step does to its rows shows in the next loss.
    variant.module.eval()
    clicks = variant.infer(one.dense, ids).double()
    found = [clicks.mean().item(), clicks.max().item()]
    spent = {}
    if "forward" in runs:
        started = clock()
        variant.infer(one.dense, ids)
        spent["forward"] = clock() - started
    variant.module.train()
    for _ in range((CHECKED // 2 if long else CHECKED) if "step" in runs else 0):
        started = clock()
        found.append(variant.train(one.dense, ids, one.label).item())
        spent["step"] = clock() - started
    return found, spent


def _apart(name: str, losses: dict[str, list[float]]) -> float:
    """The largest difference from ours of the same semantics, or from the first of them."""
    same = [n for n in losses if RECIPES[n].semantics == RECIPES[name].semantics]
    judge = OURS[RECIPES[name].semantics]
    judge = judge if judge in losses else same[0]
    # A variant that is checked before steps are known to be long runs more of them.
    return max(abs(a - b) for a, b in zip(losses[name], losses[judge], strict=False))
