"""Is everything right on this GPU? One command, for a bare machine with torch and no network.

    python benchmarks/gpu_check.py                       # within 8 minutes; make gpu-check
    python benchmarks/gpu_check.py --groups models zoo   # some of it
    python benchmarks/gpu_check.py --resume              # what the last call did not get to
    python benchmarks/gpu_check.py --dry-run             # the same code on the emulator, tiny

Every op x sample x dtype against float64, optimizers, whole models diffed with training steps,
recorded steps against plain ones, dynamic tables, ranks that share the GPU, prefetching, bad ids,
kernels under compute-sanitizer, and the tests marked ``gpu`` if pytest is installed. At the end, it
names the kernels that nothing has launched. Each group has its own processes (``gpu_groups``).
Writes ``<date>-<gpu>-gpu-check.json`` and ``.md`` as it goes; the exit status is 1 if anything
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_needs  # noqa: F401 (first: it tells what is missing)

# isort: split
import gpu_check_dynamic
import gpu_check_graphs
import gpu_check_models
import gpu_check_ops
import gpu_groups
import gpu_launches
import gpu_lines
import gpu_progress
import gpu_record
import torch
from gpu_groups import REST, ROOT, Group, Item, Skip
from gpu_lines import Row

BUDGET, DRY = 450.0, 3600.0  # seconds in all; of a dry run
KEPT = ROOT / "build" / "gpu-check"  # the lines of the last call
SANITIZED = "sanitized"
TOOLS = "tests", "racecheck", "memcheck", "tests of ops"  # groups that need more than torch


def groups() -> dict[str, Group]:
    """All groups. Those of one long item first, as all others fit beside them; then the ops."""
    of_ops = {f"op {op.name}": partial(gpu_check_ops.items, op.name) for op in gpu_check_ops.ops()}
    return {
        "tests": tests,
        "racecheck": partial(sanitizer, "racecheck"),
        "memcheck": partial(sanitizer, "memcheck"),
        "ranks": gpu_check_dynamic.ranks,
        "optimizers": gpu_check_models.optimizers,
        **of_ops,
        "models": gpu_check_models.models,
        "graphs": gpu_check_graphs.graphs,
        "dynamic": gpu_check_dynamic.dynamic,
        "zoo": gpu_check_models.zoo,
        "batches": gpu_check_models.batches,
        "tests of ops": tests_of_ops,
    }


# ---------------------------------------------------------------- other tools


def sanitizer(tool: str, device: torch.device, tiny: bool) -> Iterator[Item]:
    """Kernels on small samples, with every memory access checked."""
    yield Item(f"compute-sanitizer {tool}", partial(_sanitize, tool, device), limit=410)


def _sanitize(tool: str, device: torch.device) -> dict[str, object]:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if device.type != "cuda" or not Path(program).exists():
        raise Skip("no compute-sanitizer, or no GPU")
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        asked = [
            program, "--tool", tool, "--error-exitcode", str(_COMPLAINS), "--print-limit", "10000",
            "--launch-timeout", "300",
            sys.executable, __file__, "--group", SANITIZED, "--lines", str(lines),
        ]  # fmt: skip
        status, said = gpu_groups.program(asked, 400, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        if "Device not supported" in said or "LibraryNotLoaded" in said:
            raise Skip(f"{tool} does not work on this machine: {said.splitlines()[-1]}")
        rows, whole = gpu_lines.read(lines), gpu_lines.is_whole(lines)
    bad = [f"{r['name']}: {r.get('detail', '')}" for r in rows if r["status"] == "failed"]
    assert rows, f"nothing ran: {said[-800:]}"
    found = complaints(said)
    if found or not whole or status not in (0, _COMPLAINS):
        bad.append(f"status {status}: {' | '.join(found) or said[-800:]}")
    assert not bad, "; ".join(bad)
    lacking = said.count(_ASKED)
    more = f"; {lacking} symbols asked for that the driver lacks" if lacking else ""
    return {"detail": f"{len(rows)} kernels' samples{more}"}


def complaints(said: str) -> list[str]:
    """The faults that compute-sanitizer finds: each kind once per kernel, with its count.

    A complaint is a line ``========= words`` and the indented lines below it: the kernel, the
    thread, the address, the host's stack. Libraries ask a driver for symbols that an older one
    lacks, and do without them: errors of those calls are not ours.
    """
    blocks: list[tuple[str, list[str]]] = []
    for line in said.splitlines():
        mark, bar, words = line.partition("=========")
        if mark or not bar:
            continue
        if words.startswith("     ") and blocks:
            blocks[-1][1].append(words.strip())
        elif words.strip() and not words.strip().startswith(_QUIET):
            blocks.append((words.strip(), []))
    harmless = sum(_ASKED in head for head, _ in blocks)
    summary = re.compile(rf"ERROR SUMMARY: {harmless} errors?\b")
    blocks = [b for b in blocks if _ASKED not in b[0] and not summary.match(b[0])]
    counts: dict[tuple[str, str], int] = {}
    near: dict[tuple[str, str], str] = {}
    for head, rest in blocks:
        kernel = next((x.partition("(")[0] for x in rest if x.startswith("at ")), "")
        kind = head, kernel[:160]
        counts[kind] = counts.get(kind, 0) + 1
        near.setdefault(kind, next((x for x in rest if "nearest allocation" in x), ""))
    told = [f"{n} x {head} {kernel} {near[head, kernel]}" for (head, kernel), n in counts.items()]
    return [re.sub(r"( at)? 0x[0-9a-f]+", "", line).strip() for line in told][:12]


_COMPLAINS = 9  # exit status of the sanitizer if it has found something
_ASKED = "on CUDA API call to cuGetProcAddress"
_QUIET = ("COMPUTE-SANITIZER", "RACECHECK SUMMARY: 0")
_WARNED = "RecastWarning: "


# Samples that have their own kernels in bfloat16, and some in TF32.
ON_TENSOR_CORES = {
    ("compressed_interaction", "layer"), ("dot_interaction", "dlrm padded"),
    ("field_attention", "views"), ("gathered_dots", "a warp a sample"),
    ("scaled_einsum", "many columns"),
}  # fmt: skip


def sanitized(device: torch.device, tiny: bool) -> Iterator[Item]:
    """What runs under the sanitizer: a few samples of every op, and row updates."""
    for op in gpu_check_ops.ops():
        chosen = [s for k, s in enumerate(op.samples()) if k % 4 == 0]
        for sample in chosen:
            check = partial(gpu_check_ops.check, op, sample, torch.float32, device)
            yield Item(f"{op.name}, {sample.label}", check)
        for sample in op.samples():
            if (op.name, sample.label) not in ON_TENSOR_CORES:
                continue
            check = partial(gpu_check_ops.check, op, sample, torch.bfloat16, device)
            yield Item(f"{op.name}, {sample.label}, bfloat16", check)
            if op.name in gpu_check_ops.TF32:
                check = partial(gpu_check_ops.tiles, op, sample, device)
                yield Item(f"{op.name}, {sample.label}, TF32", check)
    yield from (i for i in gpu_check_models.optimizers(device, True))


def tests(device: torch.device, tiny: bool) -> Iterator[Item]:
    """The tests that need a GPU, if pytest is installed."""
    # Tests of ranks are the group "ranks", which needs no pytest.
    apart = ["--ignore", "tests/gpu/test_ranks_on_gpu.py"]
    apart += ["--ignore", "tests/gpu/test_dynamic_ranks_on_gpu.py"]
    chosen = ["tests/cuda", "tests/gpu", "-m", "gpu", *apart]
    yield Item("tests marked gpu", partial(_pytest, device, chosen), limit=310)


def tests_of_ops(device: torch.device, tiny: bool) -> Iterator[Item]:
    """The tests of the ops on the GPU, likewise."""
    chosen = ["tests/ops/test_ops.py", "-k", "cuda and not emulated"]
    yield Item("tests of ops, on the GPU", partial(_pytest, device, chosen), limit=310)


def _pytest(device: torch.device, chosen: list[str]) -> dict[str, object]:
    if device.type != "cuda":
        raise Skip("no GPU")
    if importlib.util.find_spec("pytest") is None:
        raise Skip("no pytest")
    # A configuration of its own: the project's asks for plugins that may not be there.
    # With -v the last line names the test that runs when the time is over.
    asked = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(ROOT), "-v"]
    asked += ["--tb=short", "-p", "no:cacheprovider", *chosen]
    status, said = gpu_groups.program(asked, 300, COLUMNS="200")
    assert status == 0, f"status {status}: {' | '.join(failures(said))}"
    return {"detail": said.splitlines()[-1].strip("= ")}


def failures(said: str) -> list[str]:
    """What pytest says of tests that failed: their names, errors, warnings; else its last lines."""
    lines = [line.strip()[:240] for line in said.splitlines()]
    found = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not found:
        return lines[-6:]
    return [*found, *dict.fromkeys(x for x in lines if x.startswith("E  ") or _WARNED in x)]


# ---------------------------------------------------------------- the command


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--groups", nargs="*", metavar="NAME", help="default: all")
    p.add_argument("--only", metavar="REGEX", help="items whose name it matches")
    p.add_argument("--budget", type=float, help=f"seconds, default {BUDGET:.0f}; {DRY:.0f} if dry")
    p.add_argument("--jobs", type=int, help="processes at once; default 8, 1 in a dry run")
    p.add_argument("--dry-run", action="store_true", help="tiny, on the emulator; needs no GPU")
    p.add_argument(
        "--resume", type=Path, nargs="?", const=KEPT, metavar="FOLDER",
        help="go on with what an earlier call has left, there or in build/gpu-check",
    )  # fmt: skip
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    p.add_argument("--group", help=argparse.SUPPRESS)
    p.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    o = p.parse_args()
    o.budget = o.budget or (DRY if o.dry_run else BUDGET)
    gpu_groups.ends_when_told()
    device = torch.device("cpu" if o.dry_run else "cuda")
    if o.group is not None:
        group = sanitized if o.group == SANITIZED else groups()[o.group]
        with _served(o.dry_run):
            return gpu_groups.work(group, o.lines, device, o.dry_run, o.only, _Launched())
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
        new = gpu_launches.used() - self._told
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
    lacks = list(gpu_record.missing())
    for line in lacks:
        print(f"missing: {line}")
    options = [*(["--dry-run"] if o.dry_run else []), *(["--only", o.only] if o.only else [])]
    names, on = o.groups or list(groups()), gpu_record.machine(device)

    def record(rows: Sequence[Row], left: Sequence[str]) -> Path:
        notes = [*(f"missing: {line}" for line in lacks), _unused(rows)]
        text = _page(rows, notes, time.monotonic() - started)
        absent = [gpu_record.DRY] if o.dry_run else []
        absent += [f"items but those of {o.only!r}"] if o.only else []
        absent += [f"group {name}" for name in groups() if name not in names]
        absent += [f"group {name} to its end" for name in left]
        absent += [f"rest of {r['group']} ({r['detail']})" for r in rows if r["name"] == REST]
        skipped = (r for r in rows if r["status"] == "skipped" and r["group"] in TOOLS)
        absent += [f"{r['name']} ({r['detail']})" for r in skipped]
        return gpu_record.write(
            o.out, "gpu-check", "Checks on a GPU", on, rows, text, absent, notes=notes
        )

    kind = {**on, "dry run": o.dry_run}
    with gpu_progress.kept(o.resume, None if o.dry_run else KEPT, kind) as (folder, resume):
        rows = gpu_groups.run(
            Path(__file__), names, folder, budget=o.budget - (time.monotonic() - started),
            resume=resume,
            jobs=o.jobs or (1 if o.dry_run else 8), options=options,
            progress=gpu_progress.Progress(names, record),
        )  # fmt: skip
    if not (o.dry_run or o.only or o.groups):
        left = gpu_launches.unused(name for r in rows for name in r.get("kernels", ()))
        row = {"group": "kernels", "name": "every kernel was launched", "status": "ok"}
        rows.append(row | ({"status": "failed", "detail": "; ".join(left)} if left else {}))
    print(record(rows, []).read_text())
    failed = [r for r in rows if r["status"] == "failed"]
    return 1 if failed or not rows else 0


def _unused(rows: Sequence[Row]) -> str:
    """The kernels that no item has launched, and which were therefore not checked."""
    left = gpu_launches.unused(name for r in rows for name in r.get("kernels", ()))
    return f"kernels that nothing launched: {'; '.join(left) or 'none'}"


def _page(rows: Sequence[Row], more: Sequence[str], seconds: float) -> str:
    failed = [r for r in rows if r["status"] == "failed"]
    skipped = [r for r in rows if r["status"] == "skipped"]
    return "\n\n".join(
        [
            gpu_record.table(summary(rows)),
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


if __name__ == "__main__":
    sys.exit(main())
