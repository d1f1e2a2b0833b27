"""The command ``benchmarks/gpu_check.py``: its groups, its options, its report."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from gpu import ROOT, ahead
from gpu.check import (
    SCRIPT,
    batch_checks,
    dynamic_checks,
    external_tools,
    kernel_coverage,
    model_checks,
    op_checks,
    optimizer_checks,
    recorded_checks,
)
from gpu.harness import results, runner, worker
from gpu.harness.item_log import Row
from gpu.harness.items import REST, Group
from gpu.harness.progress import Progress, results_folder

BUDGET, DRY = 450.0, 3600.0  # seconds in all; of a dry run
LAST_RUN = ROOT / "build" / "gpu-check"  # the lines of the last call
TOOLS = "tests", "racecheck", "memcheck", "tests of ops"  # groups that need more than torch


def groups() -> dict[str, Group]:
    """All groups. Those of one long item first, as all others fit beside them; then the ops."""
    of_ops = {f"op {op.name}": partial(op_checks.items, op.name) for op in op_checks.ops()}
    return {
        "tests": external_tools.tests,
        "racecheck": partial(external_tools.sanitizer, "racecheck"),
        "memcheck": partial(external_tools.sanitizer, "memcheck"),
        "ranks": dynamic_checks.ranks,
        "optimizers": optimizer_checks.optimizers,
        **of_ops,
        "models": model_checks.models,
        "graphs": recorded_checks.graphs,
        "dynamic": dynamic_checks.dynamic,
        "zoo": model_checks.zoo,
        "batches": batch_checks.batches,
        "tests of ops": external_tools.tests_of_ops,
    }


def main(about: str) -> int:
    """``about``: what the command is for, in its first line."""
    p = argparse.ArgumentParser(description=about.splitlines()[0])
    p.add_argument("--groups", nargs="*", metavar="NAME", help="default: all")
    p.add_argument("--only", metavar="REGEX", help="items whose name it matches")
    p.add_argument("--budget", type=float, help=f"seconds, default {BUDGET:.0f}; {DRY:.0f} if dry")
    p.add_argument("--jobs", type=int, help="processes at once; default 8, 1 in a dry run")
    p.add_argument("--dry-run", action="store_true", help="tiny, on the emulator; needs no GPU")
    p.add_argument(
        "--resume", type=Path, nargs="?", const=LAST_RUN, metavar="FOLDER",
        help="go on with what an earlier call has left, there or in build/gpu-check",
    )  # fmt: skip
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    p.add_argument("--group", help=argparse.SUPPRESS)
    p.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    o = p.parse_args()
    o.budget = o.budget or (DRY if o.dry_run else BUDGET)
    ahead.use()
    runner.end_on_sigterm()
    device = torch.device("cpu" if o.dry_run else "cuda")
    if o.group is not None:
        group = {external_tools.SANITIZED: external_tools.sanitized, **groups()}[o.group]
        with _served(o.dry_run):
            return worker.work(group, o.lines, device, o.dry_run, o.only, _Launched())
    if unknown := [name for name in o.groups or () if name not in groups()]:
        p.error(f"no group {unknown[0]!r}: of {', '.join(groups())}")
    if not o.dry_run and not torch.cuda.is_available():
        print("torch sees no CUDA device; `--dry-run` tries the checks themselves")
        return 2
    return _check_all(o, device)


class _Launched:
    """The names of the kernels launched since the last call."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self) -> dict[str, object]:
        new = kernel_coverage.launched() - self._told
        self._told |= new
        return {"kernels": sorted(new)} if new else {}


def _served(dry: bool) -> contextlib.AbstractContextManager[object]:
    """The emulator in place of a GPU."""
    if not dry:
        return contextlib.nullcontext()
    sys.path.insert(0, str(ROOT / "tests"))
    import emulated_gpu

    return emulated_gpu.serve()


def _check_all(o: argparse.Namespace, device: torch.device) -> int:
    started = time.monotonic()
    lacks = list(results.missing())
    for line in lacks:
        print(f"missing: {line}")
    options = [*(["--dry-run"] if o.dry_run else []), *(["--only", o.only] if o.only else [])]
    names, on = o.groups or list(groups()), results.machine(device)

    def record(rows: Sequence[Row], left: Sequence[str]) -> Path:
        notes = [*(f"missing: {line}" for line in lacks), _unused(rows)]
        text = _page(rows, notes, time.monotonic() - started)
        absent = [results.DRY] if o.dry_run else []
        absent += [f"items but those of {o.only!r}"] if o.only else []
        absent += [f"group {name}" for name in groups() if name not in names]
        absent += [f"group {name} to its end" for name in left]
        absent += [f"rest of {r['group']} ({r['detail']})" for r in rows if r["name"] == REST]
        skipped = (r for r in rows if r["status"] == "skipped" and r["group"] in TOOLS)
        absent += [f"{r['name']} ({r['detail']})" for r in skipped]
        return results.write(
            o.out, "gpu-check", "Checks on a GPU", on, rows, text, absent, notes=notes
        )

    kind = {**on, "dry run": o.dry_run}
    with results_folder(o.resume, None if o.dry_run else LAST_RUN, kind) as (folder, resume):
        rows = runner.run(
            SCRIPT, names, folder, budget=o.budget - (time.monotonic() - started),
            resume=resume,
            jobs=o.jobs or (1 if o.dry_run else 8), options=options,
            progress=Progress(names, record),
        )  # fmt: skip
    if not (o.dry_run or o.only or o.groups):
        left = kernel_coverage.never_launched(name for r in rows for name in r.get("kernels", ()))
        row = {"group": "kernels", "name": "every kernel was launched", "status": "ok"}
        rows.append(row | ({"status": "failed", "detail": "; ".join(left)} if left else {}))
    print(record(rows, []).read_text())
    failed = [r for r in rows if r["status"] == "failed"]
    return 1 if failed or not rows else 0


def _unused(rows: Sequence[Row]) -> str:
    """The kernels that no item has launched, and which were therefore not checked."""
    left = kernel_coverage.never_launched(name for r in rows for name in r.get("kernels", ()))
    return f"kernels that nothing launched: {'; '.join(left) or 'none'}"


def _page(rows: Sequence[Row], more: Sequence[str], seconds: float) -> str:
    failed = [r for r in rows if r["status"] == "failed"]
    skipped = [r for r in rows if r["status"] == "skipped"]
    return "\n\n".join(
        [
            results.table(summary(rows)),
            *more,
            f"{len(rows)} items in {seconds:.0f} s; {len(failed)} failed",
            *(f"- {r['group']}: **{r['name']}**: {r.get('detail', '')}" for r in failed),
            *(f"- {r['group']}: {r['name']} skipped: {r.get('detail', '')}" for r in skipped),
        ]
    )


def summary(rows: Sequence[Row]) -> list[dict[str, object]]:
    """A line for each group."""
    found = []
    for group in dict.fromkeys(r["group"] for r in rows):
        mine = [r for r in rows if r["group"] == group]
        count = {s: sum(r["status"] == s for r in mine) for s in ("ok", "failed", "skipped")}
        shares = [r["share of the limit"] for r in mine if "share of the limit" in r]
        found.append(
            {
                "group": group,
                **count,
                "seconds": round(sum(r.get("seconds", 0) for r in mine)),
                "nearest to its limit": max(shares) if shares else "",
            }
        )
    return found
