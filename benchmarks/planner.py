"""Our planner against TorchRec's, with TorchRec's own estimates as the cost model and as the judge.

    python benchmarks/planner.py --problems PATH [--case mlperf,syn300_w8] [--record] [--resume]
    python benchmarks/planner.py --scale 20000 [--ranks 1024] [--record]

``--problems`` needs torchrec, and a folder with ``planner_bench.py`` (which turns a case into
TorchRec's problem), ``problems.json`` and ``torchrec_results.json``. TorchRec enumerates its
options (once for cases that differ only in memory) and estimates each shard's time and storage;
ours chooses among them; TorchRec rates the choice. A plan more than 3 % above the bound of the
relaxation is compared with a stronger bound (planner_proof.py) if the case is small enough.
``--record`` writes the record after every case; with ``--resume``, cases in the newest record that
were planned by the same sources are not planned again. ``--scale`` plans synthetic tables with our
own cost model.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import planner_proof
import record

from recast.runtime.plan import Table
from recast.runtime.planner import TableLoad, plan
from recast.runtime.planner.bound import lower_bound
from recast.runtime.planner.problem import Options, Problem, Solution, Where, undominated
from recast.runtime.planner.search import search
from recast.runtime.topology import named

RESULTS = Path(__file__).parent / "results"
PLANNER = Path(__file__).parents[1] / "runtime" / "planner"
GIB = 2**30
CLOSE = 0.03  # a gap beyond this is explained
TITLE = "Plans beside TorchRec's, by TorchRec's estimates"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--problems", type=Path, metavar="PATH")
    parser.add_argument("--case", default="", help="beginnings of case names, with commas")
    parser.add_argument("--scale", type=int, metavar="TABLES")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--record", action="store_true", help="keep the results, case by case")
    parser.add_argument("--resume", action="store_true", help="go on with the newest record")
    o = parser.parse_args()
    if not o.problems and not o.scale:
        parser.error("--problems PATH or --scale TABLES")
    if o.scale:
        rows = list(scaled(o.scale, o.ranks))
        show(rows, "planner-scale", "Planning many tables", {"scale": o.scale}, o.record)
    if o.problems:
        rows = []
        for line in beside_torchrec(o.problems, tuple(o.case.split(",")), kept(o.resume)):
            print(json.dumps(line), file=sys.stderr, flush=True)
            rows.append(line)
            if o.record:
                show(rows, "planner", TITLE, {"problems": "PATH"}, True)
        if not o.record:
            show(rows, "planner", TITLE, {"problems": "PATH"}, False)


def show(rows: list[dict[str, Any]], name: str, title: str, flags: dict, keep: bool) -> None:
    if keep:
        text = record.write(RESULTS, name, title, flags, rows).with_suffix(".md")
        text.write_text(text.read_text().replace("planner_scale.py", "planner.py"))
    else:
        print(record.table(rows))


def sources() -> str:
    """A short hash of the sources that plan and prove."""
    files = [*sorted(PLANNER.glob("*.py")), Path(planner_proof.__file__)]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:8]


def kept(resume: bool) -> dict[str, dict[str, Any]]:
    """The cases of the newest record of this machine that were planned by these sources."""
    files = sorted(RESULTS.glob(f"*-{record.slug()}-planner.json"))
    if not resume or not files:
        return {}
    rows = json.loads(files[-1].read_text())["rows"]
    return {r["case"]: r for r in rows if r.get("sources") == sources()}


# ---------------------------------------------------------------- beside TorchRec


def beside_torchrec(
    folder: Path, cases: tuple[str, ...], done: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A row for each case: our time, the rating of both plans, the bound and the gap."""
    sys.path.insert(0, str(folder))
    import planner_bench

    theirs = json.loads((folder / "torchrec_results.json").read_text())
    named_cases = [c["case"] for c in json.loads((folder / "problems.json").read_text())["cases"]]
    held: tuple[str, Any, float] = ("", None, 0.0)
    for case in named_cases:
        if case in done:
            yield done[case]
        if case in done or not case.startswith(cases):
            continue
        shape = case.rpartition("_h")[0]
        setup = planner_bench.setup(case)
        if held[0] != shape:
            started = time.process_time()
            held = shape, enumerated(setup), 0.0
            held = shape, held[1], time.process_time() - started
        yield row(case, setup, held[1], held[2], theirs.get(case, {}), planner_bench)


def enumerated(setup: Any) -> tuple[Any, list[Any]]:
    """TorchRec's enumerator and its options, grouped by table, in table order."""
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    c, tables, model, topology, constraints, sharders = setup
    enumerator = EmbeddingEnumerator(
        topology=topology, batch_size=c["batch_per_rank"], constraints=constraints
    )
    order = {t["name"]: k for k, t in enumerate(tables)}
    return enumerator, sorted(enumerator.enumerate(model, sharders), key=lambda o: order[o.name])


def row(
    case: str,
    setup: Any,
    made: tuple[Any, list[Any]],
    seconds: float,
    theirs: dict[str, Any],
    bench: Any,
) -> dict[str, Any]:
    enumerator, space = made
    wall, started = time.perf_counter(), time.process_time()
    problem = adapt(setup, space)
    kept = undominated(problem)
    problem = replace(problem, options=problem.options.take(kept))
    names = len({int(t) for t in problem.options.table})
    bound = lower_bound(problem) if names == problem.tables else None
    found = search(problem, bound) if bound is not None else None
    mine, wall = time.process_time() - started, time.perf_counter() - wall
    line: dict[str, Any] = {
        "case": case, "tables": problem.tables, "ranks": problem.ranks,
        "torchrec enumeration CPU s": round(seconds, 1), "our CPU s": round(mine, 2),
        "our wall s": round(wall, 2), "torchrec CPU s": theirs.get("plan_cpu_s", "-"),
        "torchrec rating": theirs.get("rating") or "none", "our rating": "none", "bound": "-",
        "bound by": "-", "gap": "-", "HBM GiB": "-",
        "of GiB": round(problem.device_capacity / GIB, 1), "plan": "", "why": "",
        "sources": sources(),
    }  # fmt: skip
    if bound is None or found is None:
        return line | {"plan": "none", "why": impossible(problem, bound is None)}
    chosen = [space[kept[k]] for k in found.option.tolist()]
    rated = judged(enumerator, chosen, found, bench.rate, setup[3])
    least, by = (found.score, "all plans") if found.proven else (bound.value, "relaxation")
    strong = planner_proof.proven(problem, found.score) if least < 0.97 * found.score else None
    why = ""
    if strong is not None and strong > least:
        why = (
            f"the relaxation reaches {least:.4g}: it cuts a shard over ranks as if it were sand;"
            f" an integer program of hosts and whole shards proves {strong:.4g}"
        )
        least, by = strong, "integer program"
    gap = rated["rating"] / least - 1
    if gap > CLOSE:
        why += f"{'; ' if why else ''}{gap:.1%} are not explained"
    return line | {
        "our rating": round(rated["rating"], 4), "bound": round(least, 4), "bound by": by,
        "gap": f"{gap:.1%}", "HBM GiB": round(rated["hbm_max_gib"], 1),
        "plan": words(chosen), "why": why,
    }  # fmt: skip


def impossible(problem: Problem, proven: bool) -> str:
    """Why there is no plan, in GiB."""
    o = problem.options
    need = np.minimum.reduceat(o.total_device + o.total_host, problem.first[:-1]).sum() / GIB
    room = problem.ranks * (problem.device_capacity + problem.host_capacity) / GIB
    if need > room:
        return (
            f"proven: the smallest options need {need:.0f} GiB, devices and hosts have {room:.0f}"
        )
    return "proven by the relaxation" if proven else "no plan found, and none ruled out"


def adapt(setup: Any, space: list[Any]) -> Problem:
    """TorchRec's options and storage, after its reservations, as a problem of ours."""
    from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation

    c, tables, model, topology, constraints, sharders = setup
    reserved = HeuristicalStorageReservation(percentage=0.15).reserve(
        topology=topology,
        batch_size=c["batch_per_rank"],
        module=model,
        sharders=sharders,
        constraints=constraints,
    )
    storage = reserved.devices[0].storage
    ranks, host = topology.world_size, topology.local_world_size
    index = {t["name"]: k for k, t in enumerate(tables)}
    perf = [np.array([s.perf.total for s in o.shards]) for o in space]
    hbm = [np.array([s.storage.hbm for s in o.shards], dtype=float) for o in space]
    ddr = [np.array([s.storage.ddr for s in o.shards], dtype=float) for o in space]
    options = Options(
        table=np.array([index[o.name] for o in space]),
        where=np.array([int(where(o, ranks, host)) for o in space]),
        count=np.array([len(o.shards) for o in space]),
        cost=np.array([p.max() for p in perf])[None],
        device=np.array([m.max() for m in hbm]),
        host=np.array([m.max() for m in ddr]),
        total=np.array([p.sum() for p in perf])[None],
        total_device=np.array([m.sum() for m in hbm]),
        total_host=np.array([m.sum() for m in ddr]),
    )
    nothing = np.zeros(ranks)
    return Problem(
        len(tables), options, ranks, host, 1, float(storage.hbm), float(storage.ddr),
        nothing[None], nothing, nothing,
    )  # fmt: skip


def where(option: Any, ranks: int, host: int) -> Where:
    """Where TorchRec may put the shards of its option."""
    kind, count = option.sharding_type, len(option.shards)
    if count == 1:
        return Where.ANY
    if count == ranks and kind in ("data_parallel", "row_wise", "table_row_wise"):
        return Where.ALL
    if kind == "table_row_wise":
        return Where.HOST
    return Where.WITHIN if kind == "table_column_wise" else Where.ANY


def judged(
    enumerator: Any, chosen: list[Any], found: Solution, rate: Any, topology: Any
) -> dict[str, Any]:
    """The rating by TorchRec's estimator, computed anew with the shards on our ranks."""
    options = []
    for option, ranks in zip(chosen, found.ranks, strict=True):
        o = copy.copy(option)
        o.shards = [copy.copy(s) for s in option.shards]
        for s, rank in zip(o.shards, ranks.tolist(), strict=True):
            s.rank, s.perf, s.storage = rank, None, None
        options.append(o)
    enumerator.populate_estimates(options)
    rated: dict[str, Any] = rate(options, topology)
    return rated


def words(chosen: list[Any]) -> str:
    kinds = Counter(
        o.sharding_type + ("" if o.compute_kernel in ("fused", "dense") else f" {o.compute_kernel}")
        for o in chosen
    )
    return ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())


# ---------------------------------------------------------------- scale


def scaled(tables: int, ranks: int) -> Iterator[dict[str, Any]]:
    """Our own cost model on a quarter, a half and all of the tables."""
    topology = named(f"dgx-a100x{ranks}")
    plan(synthetic(20), topology.of(8), batch=512)  # imports and caches
    for n in (tables // 4, tables // 2, tables):
        loads = synthetic(n)
        wall, cpu = time.perf_counter(), time.process_time()
        made = plan(loads, topology, batch=512)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        made.check([load.table for load in loads])
        yield {
            "tables": n, "ranks": ranks, "TiB": round(sum(t.bytes for t in loads) / 2**40, 1),
            "CPU s": round(cpu, 2), "wall s": round(wall, 2),
            "us per table and log2(tables)": round(cpu * 1e6 / (n * math.log2(n)), 1),
            "slowest rank ms": round(made.cost or 0, 2),
            "bound ms": round(made.lower_bound or 0, 2),
            "gap": f"{made.gap:.1%}",
        }  # fmt: skip


def synthetic(tables: int, alpha: float = 1.25) -> list[TableLoad]:
    """Rows from 1e3 to 2e8 with density rows^-alpha; dims 8 to 256; 1 to 50 ids; row-wise state."""
    drawn = random.Random(tables)
    low, high = 1e3 ** (1 - alpha), 2e8 ** (1 - alpha)
    rows = [int((low + drawn.random() * (high - low)) ** (1 / (1 - alpha))) for _ in range(tables)]
    dims = [8, 16, 32, 32, 64, 64, 64, 96, 128, 128, 192, 256]
    ids = [1, 1, 1, 1, 2, 3, 5, 10, 20, 50]
    return [
        TableLoad(
            Table(f"t{k}", n, drawn.choice(dims)), ids=float(drawn.choice(ids)), state_row=4.0
        )
        for k, n in enumerate(rows)
    ]


if __name__ == "__main__":
    main()
