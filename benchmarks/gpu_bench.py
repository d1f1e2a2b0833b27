"""How fast on this GPU, beside eager PyTorch, torch.compile, and the floor of the machine.

    python benchmarks/gpu_bench.py                       # within 8 minutes; make gpu-bench
    python benchmarks/gpu_bench.py --groups tiny dlrm
    python benchmarks/gpu_bench.py --resume build/bench  # what an earlier call did not get to
    python benchmarks/gpu_bench.py --dry-run             # the same code on the emulator, tiny

First all that has to be compiled is, by processes side by side, which leave it in the caches on
disk (``--no-prepare``: not). Then each group has a process and the GPU to itself, the judged models
first. Peers run in the same process and take turns; times are medians of CUDA events. float32
products are TF32, for all. Of Small, whose tables fill the memory, peers are measured one after the
other, each gone before the next. Writes ``<date>-<gpu>-gpu-bench.json`` and ``.md``, as it goes; a
record that lacks something says so in its first line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
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
import gpu_groups
import gpu_measure
import gpu_page
import gpu_parts
import gpu_progress
import gpu_steps
import torch
from gpu_floor import Rates, rates
from gpu_groups import ROOT, Group, Item

BUDGET = 455.0  # seconds in all
PREPARING = 110.0  # of which to compile, at most
LANES = 7  # processes that compile what the ops need
# A compiler of its own for each process, which compiles there: pools of workers take seconds to
# come, and there is a process for every two cores.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def groups(known: Rates) -> dict[str, Group]:
    """All groups, what is judged by milliseconds first."""
    models = {
        name: partial(gpu_steps.synthetic, config, bar.ms, known)
        for name, (config, bar) in gpu_page.MODELS.items()
    }
    return {
        **models,
        "dlrm": partial(gpu_steps.dlrm, known),
        "dropout": partial(gpu_parts.dropout, known),
        "ops": partial(gpu_parts.ops, known),
        "updates": partial(gpu_parts.updates, known),
    }


NAMES = tuple(groups(Rates(1.0, {})))


# ---------------------------------------------------------------- compiling first


def lanes(names: Iterable[str]) -> list[str]:
    """The processes that prepare groups: each group is one, but the ops are shared out."""
    shares = [f"ops {k} of {LANES}" for k in range(LANES)]
    return [lane for name in names for lane in (shares if name == "ops" else [name])]


def lane(name: str, known: Rates) -> Group:
    """The group, or the share of one, that ``name`` says.

    Lookups, whose tables are of gigabytes, are one share: side by side they would not fit.
    """
    shared = re.fullmatch(r"(\w+) (\d+) of (\d+)", name)
    if shared is None:
        return groups(known)[name]
    group, own, count = groups(known)[shared[1]], int(shared[2]), int(shared[3])

    def some(device: torch.device, tiny: bool) -> Iterator[Item]:
        for k, item in enumerate(group(device, tiny)):
            if own == (0 if "lookups" in item.name else 1 + k % (count - 1)):
                yield item

    return some


def prepare(o: argparse.Namespace, names: Sequence[str], options: Sequence[str]) -> str:
    """Compile in processes side by side; what to tell of it."""
    started, asked = time.monotonic(), lanes(names)
    with tempfile.TemporaryDirectory() as kept:
        rows = gpu_groups.run(
            Path(__file__), asked, Path(kept), jobs=1 if o.dry_run else len(asked),
            options=[*options, "--preparing"], budget=min(PREPARING, o.budget / 3),
            more=ENVIRONMENT,
        )  # fmt: skip
    count = sum(r["status"] == "ok" for r in rows)
    lost = [f"{r['name']}: {r.get('detail', '')}"[:200] for r in rows if r["status"] != "ok"]
    told = f"compiled beforehand: {count} of {len(rows)}, {time.monotonic() - started:.0f} s"
    return "; ".join([told, *lost])


# ---------------------------------------------------------------- the command


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--groups", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    p.add_argument("--only", metavar="REGEX", help="items whose name it matches")
    p.add_argument("--budget", type=float, default=BUDGET, help="seconds, default %(default)s")
    p.add_argument("--dry-run", action="store_true", help="tiny, on the emulator; needs no GPU")
    p.add_argument("--resume", type=Path, metavar="FOLDER", help="keep items there, and go on")
    p.add_argument("--no-prepare", action="store_true", help="compile where it is needed")
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    for hidden in ("--group", "--rates"):
        p.add_argument(hidden, help=argparse.SUPPRESS)
    p.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--preparing", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args()
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

    # What was timed while others were at work on the GPU is not to be remembered.
    compiler.autotune_local_cache = False
    gpu_measure.preparing = o.preparing
    with contextlib.ExitStack() as inside:
        if o.dry_run:
            sys.path.insert(0, str(ROOT / "tests"))
            import emulated_gpu

            inside.enter_context(emulated_gpu.serve())
        group = lane(o.group, Rates(**json.loads(o.rates)))
        return gpu_groups.work(group, o.lines, device, o.dry_run, o.only)


def _bench_all(o: argparse.Namespace, device: torch.device) -> int:
    started = time.monotonic()
    notes = [f"missing: {line}" for line in gpu_groups.missing()]
    print(*notes, sep="\n", end="\n" if notes else "")
    built = time.monotonic() - started
    measured = rates(device, o.dry_run)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the groups are other processes
    options = ["--rates", json.dumps({"copy": measured.copy, "matrix": measured.matrix})]
    options += [*(["--dry-run"] if o.dry_run else []), *(["--only", o.only] if o.only else [])]
    names, machine = o.groups or list(NAMES), gpu_groups.machine(device)
    on = machine | {
        "copy TB/s": round(measured.copy / 1e12, 3),
        **{f"{k} TFLOP/s": round(v / 1e12, 1) for k, v in measured.matrix.items()},
    }
    notes.append(f"extension there after {built:.0f} s")
    if not (o.no_prepare or o.dry_run):
        notes.append(prepare(o, names, options))
        print(notes[-1], flush=True)

    def record(items: Sequence[gpu_groups.Row], left: Sequence[str]) -> Path:
        text = gpu_page.page(items, names, notes, time.monotonic() - started)
        lacks = [f"items but those of {o.only!r}"] if o.only else []
        lacks += [f"group {name}" for name in NAMES if name not in names]
        lacks += gpu_page.missing(items, names, left)
        return gpu_groups.write(
            o.out, "gpu-bench", "Steps and parts on a GPU", on, items, text, lacks, notes=notes
        )

    with tempfile.TemporaryDirectory() as kept:
        kind = {**machine, "dry run": o.dry_run}
        items = gpu_groups.run(
            Path(__file__), names, gpu_progress.folder_of(o.resume, Path(kept), kind), jobs=1,
            options=options, budget=o.budget - (time.monotonic() - started),
            resume=o.resume is not None, more=ENVIRONMENT,
            progress=gpu_progress.Progress(names, record, each=True),
        )  # fmt: skip
    print(record(items, []).read_text())
    lines = [row for r in items for row in r.get("rows", [])]
    return 1 if not lines or any(r["status"] == "failed" for r in items) else 0


if __name__ == "__main__":
    sys.exit(main())
