"""The command ``benchmarks/gpu_bench.py``: its options, its processes, its report."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu import ROOT, ahead
from gpu.bench import SCRIPT, results_page, roofline, timing
from gpu.bench.compile_ahead import PREPARING, environment, lane, prepare
from gpu.bench.groups import NAMES, RATES
from gpu.bench.roofline import Rates
from gpu.harness import results, runner, worker
from gpu.harness.item_log import Row
from gpu.harness.progress import Progress, results_folder

BUDGET, DRY = 455.0, 3600.0  # seconds in all; of a dry run
LAST_RUN = ROOT / "build" / "gpu-bench"  # the lines of the last call


def main(about: str) -> int:
    """``about``: what the command is for, in its first line."""
    p = argparse.ArgumentParser(description=about.splitlines()[0])
    p.add_argument("--groups", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    p.add_argument("--only", metavar="REGEX", help="items whose name it matches")
    p.add_argument("--budget", type=float, help=f"seconds, default {BUDGET:.0f}; {DRY:.0f} if dry")
    p.add_argument("--dry-run", action="store_true", help="tiny, on the emulator; needs no GPU")
    p.add_argument(
        "--resume", type=Path, nargs="?", const=LAST_RUN, metavar="FOLDER",
        help="go on with what an earlier call has left, there or in build/gpu-bench",
    )  # fmt: skip
    p.add_argument(
        "--prepare", action=argparse.BooleanOptionalAction,
        help="compile all beforehand: the default, but not of a dry run, where it takes as long",
    )  # fmt: skip
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    for hidden in ("--group", "--rates"):
        p.add_argument(hidden, help=argparse.SUPPRESS)
    p.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--preparing", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args()
    o.budget = o.budget or (DRY if o.dry_run else BUDGET)
    o.prepare = not o.dry_run if o.prepare is None else o.prepare
    ahead.use()
    runner.end_on_sigterm()
    device = torch.device("cpu" if o.dry_run else "cuda")
    torch.set_float32_matmul_precision("high")  # TF32, as the published runs
    if o.group is not None:
        return _work(o, device)
    if unknown := [name for name in o.groups or () if name not in NAMES]:
        p.error(f"no group {unknown[0]!r}: of {', '.join(NAMES)}")
    if not o.dry_run and not torch.cuda.is_available():
        print("torch sees no CUDA device; `--dry-run` tries the measurements themselves")
        return 2
    return _bench_all(o, device)


def _work(o: argparse.Namespace, device: torch.device) -> int:
    """A group, in a process of its own."""
    import torch._inductor.config as compiler

    # Choices timed while others use the GPU must not be remembered.
    compiler.autotune_local_cache = False
    timing.preparing = o.preparing
    with contextlib.ExitStack() as inside:
        if o.dry_run:
            sys.path.insert(0, str(ROOT / "tests"))
            import emulated_gpu

            inside.enter_context(emulated_gpu.serve())
        group = lane(o.group, Rates(**json.loads(o.rates or '{"copy": 1, "matrix": {}}')))
        patience = 3.0 if o.preparing else 1.0  # beside a dozen others, nothing compiled yet
        return worker.work(group, o.lines, device, o.dry_run, o.only, patience=patience)


def _bench_all(o: argparse.Namespace, device: torch.device) -> int:
    started = time.monotonic()
    notes = [f"missing: {line}" for line in results.missing()]
    notes.append(f"extension there after {time.monotonic() - started:.0f} s")
    print(*notes, sep="\n", flush=True)
    names, machine = o.groups or list(NAMES), results.machine(device)
    kind = {**machine, "dry run": o.dry_run}
    options = [*(["--dry-run"] if o.dry_run else []), *(["--only", o.only] if o.only else [])]

    def left() -> float:
        return float(o.budget) - (time.monotonic() - started)

    with results_folder(o.resume, None if o.dry_run else LAST_RUN, kind) as (folder, resume):
        rated = runner.run(
            SCRIPT, [RATES], folder, jobs=1, budget=left(), resume=resume,
            options=["--dry-run"] * o.dry_run,
        )[0]  # fmt: skip
        if rated["status"] != "ok":  # without them nothing has a floor
            print(f"the rates of this machine: {rated['detail']}")
            return 1
        on = machine | roofline.words(rated)
        options += ["--rates", json.dumps({k: rated[k] for k in ("copy", "matrix")})]
        if o.prepare:
            most = o.budget / 3 if o.dry_run else min(PREPARING, o.budget / 3)
            notes.append(prepare(most, names, options, folder))
            print(notes[-1], flush=True)

        def record(items: Sequence[Row], still: Sequence[str]) -> Path:
            text = results_page.page(items, names, notes, time.monotonic() - started)
            lacks = [results.DRY] if o.dry_run else []
            lacks += [f"items but those of {o.only!r}"] if o.only else []
            lacks += [f"group {name}" for name in NAMES if name not in names]
            lacks += results_page.missing(items, names, still)
            return results.write(
                o.out, "gpu-bench", "Steps and parts on a GPU", on, items, text, lacks, notes=notes
            )

        items = runner.run(
            SCRIPT, names, folder, jobs=1, options=options, budget=left(), resume=resume,
            more=environment(), progress=Progress(names, record, each=True),
        )  # fmt: skip
    print(record(items, []).read_text())
    if o.only is None and results_page.unjudged(items, names):
        return 1
    return 1 if not items or any(r["status"] == "failed" for r in items) else 0
