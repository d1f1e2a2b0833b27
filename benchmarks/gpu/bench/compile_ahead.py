"""Compiles all that a run needs in processes side by side, into the caches on disk.

Each group is prepared by one process, or by several that share its items.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from gpu import ahead
from gpu.bench import SCRIPT, roofline
from gpu.bench.groups import MORE, RATES, groups
from gpu.bench.roofline import Rates
from gpu.harness import runner
from gpu.harness.items import Group, Item
from gpu.harness.progress import Progress

PREPARING = 110.0  # of which to compile, at most
LANES = {"tiny": 2, "ops": 7}  # processes that compile what a group needs; one for others
LARGE_MEMORY = 120e9  # bytes
# Each process compiles by itself: pools of workers take seconds to start, and there is already a
# process for every two cores.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def environment() -> dict[str, str]:
    """Of the processes: where there is a cache from another machine, what peers compile is kept
    there, for the next one.
    """
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(ahead.CACHE / "inductor")}
    there = ahead.CACHE.is_dir() and not kept.keys() & os.environ.keys()
    return ENVIRONMENT | (kept if there else {})


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

    Cases of lookups alone, each with up to 40 GB of tables and gradients, have shares of their own,
    as many as fit side by side.
    """
    if name == RATES:
        return roofline.items
    shared = re.fullmatch(r"(\w+) (\d+) of (\d+)", name)
    if shared is None:
        return groups(known)[name]
    group, own, count = groups(known)[shared[1]], int(shared[2]), int(shared[3])

    def some(device: torch.device, tiny: bool) -> Iterator[Item]:
        items = list(group(device, tiny))
        heavy = [item for item in items if "lookups" in item.name]
        light = [item for item in items if item not in heavy]
        apart = min(_beside(device), count - 1) if heavy else 0
        if own < apart:
            yield from heavy[own::apart]
            return
        at, parts = own - apart, count - apart
        yield from light[at * len(light) // parts : (at + 1) * len(light) // parts]

    return some


def _beside(device: torch.device) -> int:
    """How many cases of lookups fit into the memory beside each other and all else."""
    if device.type != "cuda":
        return 1
    return 2 if torch.cuda.get_device_properties(device).total_memory > LARGE_MEMORY else 1


def prepare(budget: float, names: Sequence[str], options: Sequence[str], folder: Path) -> str:
    """Compile in processes side by side; returns the notes for the record.

    Items that ``folder`` has from an earlier call are not compiled.
    """
    started, asked = time.monotonic(), lanes(names)
    print(f"compiling, for {budget:.0f} s at most", flush=True)
    with tempfile.TemporaryDirectory() as kept:
        for name in asked:
            done = folder / f"{name.partition(' ')[0]}.jsonl"
            if done.exists():
                shutil.copy(done, Path(kept) / f"{name}.jsonl")
        rows = runner.run(
            SCRIPT, asked, Path(kept), jobs=min(len(asked), os.cpu_count() or 1),
            options=[*options, "--preparing"], resume=True, more=environment(),
            budget=budget, progress=Progress(asked, lambda rows, still: None),
        )  # fmt: skip
    count = sum(r["status"] == "ok" for r in rows)
    lost = [(r, r.get("detail", "")) for r in rows if r["status"] != "ok"]
    lost += [(r, said) for r in rows for said in r.get("warned", ())]
    told = f"compiled beforehand: {count} of {len(rows)}, {time.monotonic() - started:.0f} s"
    return "; ".join([told, *(f"{r['group']}, {r['name']}: {said}"[:200] for r, said in lost)])
