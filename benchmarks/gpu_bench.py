"""How fast on this GPU, compared with eager PyTorch, torch.compile, and the machine's floor.

    python benchmarks/gpu_bench.py                       # within 8 minutes; make gpu-bench
    python benchmarks/gpu_bench.py --groups tiny dlrm
    python benchmarks/gpu_bench.py --resume              # what the last call did not get to
    python benchmarks/gpu_bench.py --dry-run             # the same code on the emulator, tiny

First, processes side by side compile all that has to be compiled, into the caches on disk (not with
``--no-prepare``). Then each group has a process and the GPU to itself, the judged models first.
Peers run in the same process and take turns; times are medians of CUDA events. float32 products are
TF32, for all. The variants of Small, whose tables fill the memory, are measured one after the
other, each freed before the next. Writes ``<date>-<gpu>-gpu-bench.json`` and ``.md`` as it goes; an
incomplete record says so in its first line. The exit status is 1 if anything failed or a judged
case has no verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "models"))

import gpu_needs  # noqa: F401 (first: it tells what is missing)

# isort: split
import gpu_floor
import gpu_groups
import gpu_measure
import gpu_page
import gpu_parts
import gpu_progress
import gpu_record
import gpu_steps
import gpu_subjects
import torch
from gpu_floor import Rates
from gpu_groups import ROOT, Group, Item
from gpu_lines import Row

BUDGET, DRY = 455.0, 3600.0  # seconds in all; of a dry run
PREPARING = 110.0  # of which to compile, at most
LANES = {"tiny": 2, "ops": 7}  # processes that compile what a group needs; one for others
KEPT = ROOT / "build" / "gpu-bench"  # the lines of the last call
RATES, MORE = "rates", "more of "  # names, or begins of names, of groups
# Each process compiles by itself: pools of workers take seconds to start, and there is already a
# process for every two cores.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def groups(known: Rates) -> dict[str, Group]:
    """All groups: judged ones first (bars in milliseconds before ratios), long ones last."""
    subjects: dict[str, gpu_steps.Subjects] = {
        name: partial(gpu_subjects.synthetic, config, bar, known)
        for name, (config, bar) in gpu_page.MODELS.items()
    }
    subjects["dlrm"] = partial(gpu_subjects.dlrm, gpu_page.DLRM, known)
    return {
        "tiny": partial(gpu_steps.judged, subjects["tiny"]),
        "dlrm": partial(gpu_steps.judged, subjects["dlrm"]),
        "dropout": partial(gpu_parts.dropout, known),
        "small": partial(gpu_steps.judged, subjects["small"]),
        "ops": partial(gpu_parts.ops, known),
        "updates": partial(gpu_parts.updates, known),
        **{f"{MORE}{name}": partial(gpu_steps.more, subjects[name]) for name in sorted(subjects)},
    }


NAMES = tuple(groups(Rates(1.0, {})))


# ---------------------------------------------------------------- compiling first


def lanes(names: Iterable[str]) -> list[str]:
    """The processes that prepare groups: each group is one, but some are shared out."""
    found: list[str] = []
    for name in names:
        count = LANES.get(name, 0)
        found += [f"{name} {k} of {count}" for k in range(count)]
        if not count and not name.startswith(MORE):
            found.append(name)
    return found


def lane(name: str, known: Rates) -> Group:
    """The group, or the share of one, that ``name`` names; :data:`RATES` comes before all others.

    All cases of lookups alone, with gigabytes of tables each, are one share: side by side they
    would not fit.
    """
    if name == RATES:
        return gpu_floor.items
    shared = re.fullmatch(r"(\w+) (\d+) of (\d+)", name)
    if shared is None:
        return groups(known)[name]
    group, own, count = groups(known)[shared[1]], int(shared[2]), int(shared[3])

    def some(device: torch.device, tiny: bool) -> Iterator[Item]:
        items = list(group(device, tiny))
        heavy = [item for item in items if "lookups" in item.name]
        light = [item for item in items if item not in heavy]
        if heavy and own == 0:
            yield from heavy
            return
        at, parts = (own - 1, count - 1) if heavy else (own, count)
        yield from light[at * len(light) // parts : (at + 1) * len(light) // parts]

    return some


def prepare(
    o: argparse.Namespace, names: Sequence[str], options: Sequence[str], folder: Path
) -> str:
    """Compile in processes side by side; returns the notes for the record.

    Items that ``folder`` has from an earlier call are not compiled.
    """
    started, asked = time.monotonic(), lanes(names)
    with tempfile.TemporaryDirectory() as kept:
        for name in asked:
            done = folder / f"{name.partition(' ')[0]}.jsonl"
            if done.exists():
                shutil.copy(done, Path(kept) / f"{name}.jsonl")
        rows = gpu_groups.run(
            Path(__file__), asked, Path(kept), jobs=min(len(asked), os.cpu_count() or 1),
            options=[*options, "--preparing"], resume=True, more=ENVIRONMENT,
            budget=o.budget / 3 if o.dry_run else min(PREPARING, o.budget / 3),
        )  # fmt: skip
    count = sum(r["status"] == "ok" for r in rows)
    lost = [(r, r.get("detail", "")) for r in rows if r["status"] != "ok"]
    lost += [(r, said) for r in rows for said in r.get("warned", ())]
    told = f"compiled beforehand: {count} of {len(rows)}, {time.monotonic() - started:.0f} s"
    return "; ".join([told, *(f"{r['group']}, {r['name']}: {said}"[:200] for r, said in lost)])


# ---------------------------------------------------------------- the command


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--groups", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    p.add_argument("--only", metavar="REGEX", help="items whose name it matches")
    p.add_argument("--budget", type=float, help=f"seconds, default {BUDGET:.0f}; {DRY:.0f} if dry")
    p.add_argument("--dry-run", action="store_true", help="tiny, on the emulator; needs no GPU")
    p.add_argument(
        "--resume", type=Path, nargs="?", const=KEPT, metavar="FOLDER",
        help="go on with what an earlier call has left, there or in build/gpu-bench",
    )  # fmt: skip
    p.add_argument("--no-prepare", action="store_true", help="compile where it is needed")
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    for hidden in ("--group", "--rates"):
        p.add_argument(hidden, help=argparse.SUPPRESS)
    p.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--preparing", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args()
    o.budget = o.budget or (DRY if o.dry_run else BUDGET)
    gpu_groups.ends_when_told()
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
    gpu_measure.preparing = o.preparing
    with contextlib.ExitStack() as inside:
        if o.dry_run:
            sys.path.insert(0, str(ROOT / "tests"))
            import emulated_gpu

            inside.enter_context(emulated_gpu.serve())
        group = lane(o.group, Rates(**json.loads(o.rates or '{"copy": 1, "matrix": {}}')))
        patience = 3.0 if o.preparing else 1.0  # beside a dozen others, nothing compiled yet
        return gpu_groups.work(group, o.lines, device, o.dry_run, o.only, patience=patience)


def _bench_all(o: argparse.Namespace, device: torch.device) -> int:
    started = time.monotonic()
    notes = [f"missing: {line}" for line in gpu_record.missing()]
    notes.append(f"extension there after {time.monotonic() - started:.0f} s")
    print(*notes, sep="\n", flush=True)
    names, machine = o.groups or list(NAMES), gpu_record.machine(device)
    kind = {**machine, "dry run": o.dry_run}
    options = [*(["--dry-run"] if o.dry_run else []), *(["--only", o.only] if o.only else [])]

    def left() -> float:
        return float(o.budget) - (time.monotonic() - started)

    with gpu_progress.kept(o.resume, None if o.dry_run else KEPT, kind) as (folder, resume):
        rated = gpu_groups.run(
            Path(__file__), [RATES], folder, jobs=1, budget=left(), resume=resume,
            options=["--dry-run"] * o.dry_run,
        )[0]  # fmt: skip
        if rated["status"] != "ok":  # without them nothing has a floor
            print(f"the rates of this machine: {rated['detail']}")
            return 1
        on = machine | gpu_floor.words(rated)
        options += ["--rates", json.dumps({k: rated[k] for k in ("copy", "matrix")})]
        if not o.no_prepare:
            notes.append(prepare(o, names, options, folder))
            print(notes[-1], flush=True)

        def record(items: Sequence[Row], still: Sequence[str]) -> Path:
            text = gpu_page.page(items, names, notes, time.monotonic() - started)
            lacks = [gpu_record.DRY] if o.dry_run else []
            lacks += [f"items but those of {o.only!r}"] if o.only else []
            lacks += [f"group {name}" for name in NAMES if name not in names]
            lacks += gpu_page.missing(items, names, still)
            return gpu_record.write(
                o.out, "gpu-bench", "Steps and parts on a GPU", on, items, text, lacks, notes=notes
            )

        items = gpu_groups.run(
            Path(__file__), names, folder, jobs=1, options=options, budget=left(), resume=resume,
            more=ENVIRONMENT, progress=gpu_progress.Progress(names, record, each=True),
        )  # fmt: skip
    print(record(items, []).read_text())
    if o.only is None and gpu_page.unjudged(items, names):
        return 1
    return 1 if not items or any(r["status"] == "failed" for r in items) else 0


if __name__ == "__main__":
    sys.exit(main())
