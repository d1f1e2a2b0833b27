"""The command ``benchmarks/gpu_ahead.py``: its options, its processes, its report."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from gpu import ROOT
from gpu.ahead import CACHE, SCRIPT, extension
from gpu.ahead.compiling import Compiling, compiling
from gpu.bench import judged_models, op_cases, step_parts, timing
from gpu.bench.groups import groups as of_bench
from gpu.bench.roofline import Rates
from gpu.check import command as check
from gpu.check import kernel_coverage, optimizer_checks
from gpu.harness import runner, worker
from gpu.harness.items import Group, Item
from gpu.harness.progress import Progress
from recast.runtime.gpu import cublaslt, kernel_cache, nvrtc

BUDGET = 3600.0
ARCHS = ("sm_90",)
PATIENCE = 10.0  # times longer than on a GPU that an item may take: its products are a CPU's
BENCH = "bench "  # begins the names of groups of gpu_bench
# Groups whose kernels are launched by other processes; others have them too.
APART = (*check.TOOLS, "ranks")
# A model's batch in the bench, its rows, and multiprocessors in proportion: only what is launched
# on how much data is of interest, and the CPU multiplies.
BATCH, ROWS = 512, 1000
MULTIPROCESSORS = {False: 132, True: 1}


def groups() -> dict[str, Group]:
    """Those of ``gpu_check``, then those of ``gpu_bench``."""
    found = {name: of for name, of in check.groups().items() if name not in APART}
    known = Rates(1e12, {"float32": 1e14, "bfloat16": 1e14})
    return found | {BENCH + name: of for name, of in of_bench(known).items()}


def main(about: str) -> int:
    """``about``: what the command is for, in its first line."""
    p = argparse.ArgumentParser(description=about.splitlines()[0])
    p.add_argument("--arch", nargs="+", default=ARCHS, help="default: sm_90 (H100, H200)")
    p.add_argument("--python", default=sys.executable, help="of the version on that machine")
    p.add_argument("--groups", nargs="*", metavar="NAME", help="default: all")
    p.add_argument("--only", metavar="REGEX", help="items whose name it matches")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    p.add_argument("--budget", type=float, default=BUDGET, help="seconds, default 3600")
    p.add_argument("--cache", type=Path, default=CACHE, help="default: build/gpu-cache")
    p.add_argument("--group", help=argparse.SUPPRESS)
    p.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    o = p.parse_args()
    runner.end_on_sigterm()
    os.environ["RECAST_CACHE"] = str(o.cache.resolve())
    torch.set_float32_matmul_precision("high")  # TF32, as the bench
    if o.group is not None:
        return _work(o)
    if unknown := [name for name in o.groups or () if name not in groups()]:
        p.error(f"no group {unknown[0]!r}: of {', '.join(groups())}")
    if (why := nvrtc.why_missing()) is not None:
        print(f"no kernel can be compiled here: {why}")
        return 2
    return _compile_all(o)


# ---------------------------------------------------------------- a group


def _work(o: argparse.Namespace) -> int:
    bench = o.group.startswith(BENCH)
    if bench:
        timing.preparing = timing.only_ours = True
        judged_models.BATCH, judged_models.BATCHES = BATCH, 2
        step_parts.BATCH, step_parts.ROWS, op_cases.ROWS = BATCH, ROWS, ROWS
    else:
        torch.set_float32_matmul_precision("highest")
        optimizer_checks.ROWS = optimizer_checks.ROWS[:2]  # what else they cost is torch's steps
    with compiling(o.arch, MULTIPROCESSORS[bench]) as device, _cublaslt():
        group = partial(_quietly, groups()[o.group], device)
        told = partial(_told, device, set())
        cpu = torch.device("cpu")
        return worker.work(group, o.lines, cpu, False, o.only, told, patience=PATIENCE)


def _cublaslt() -> contextlib.AbstractContextManager[object]:
    """The tests' stand-in for cublasLt, so that kernels that go with its products are asked for."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cuda")]
    try:
        import cublaslt_stand_in

        return cublaslt.stand_in(cublaslt_stand_in.built())
    except (ImportError, RuntimeError) as error:
        print(f"no stand-in for cublasLt: {error}")
        return contextlib.nullcontext()


def _quietly(group: Group, compiled: Compiling, device: torch.device, tiny: bool) -> Iterator[Item]:
    """The items of ``group``, of which none fails, unless a kernel does not compile: no results are
    right where nothing is launched.
    """
    for item in group(device, tiny):
        yield item._replace(run=partial(_run, item.run, compiled))


def _run(run: Callable[[], object], device: Compiling) -> Mapping[str, object]:
    said = ""
    try:
        run()
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if device.refused:
        raise RuntimeError("; ".join(f"{what}: {why}" for what, why in device.refused.items()))
    return {"detail": said} if said else {}


def _told(device: Compiling, before: set[str]) -> dict[str, object]:
    new = set(device.launched) - before
    before |= new
    return {"kernels": sorted(new)} if new else {}


# ---------------------------------------------------------------- all of them


def _compile_all(o: argparse.Namespace) -> int:
    started, failed = time.monotonic(), False
    try:
        print(f"CPU kernels: {extension.build(o.python)}", flush=True)
    except RuntimeError as error:
        print(f"CPU kernels: {error}", flush=True)
        failed = True
    names = o.groups or list(groups())
    options = ["--arch", *o.arch, "--cache", str(o.cache)]
    options += ["--only", o.only] if o.only else []
    with tempfile.TemporaryDirectory() as folder:
        rows = runner.run(
            SCRIPT, names, Path(folder), jobs=o.jobs, options=options, budget=o.budget,
            progress=Progress(names, lambda items, still: None),
        )  # fmt: skip
    entries, size = kernel_cache.default().size()
    seen = {name for row in rows for name in row.get("kernels", ())}
    bad = [row for row in rows if row["status"] == "failed"]
    for row in bad:
        print(f"{row['group']}, {row['name']}: {row.get('detail', '')}")
    print(f"never asked for: {'; '.join(kernel_coverage.never_launched(seen)) or 'none'}")
    took = f"{time.monotonic() - started:.0f} s"
    print(f"{entries} programs, {size / 1e6:.0f} MB, NVRTC {nvrtc.version()}, in {took}")
    return 1 if bad or failed else 0
