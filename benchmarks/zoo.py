"""Models that nobody here wrote, judged and timed: right, captured whole, lookups fused, speed.

    make zoo                                         # all models of the five libraries
    python benchmarks/zoo.py --only deepctr --rounds 3     # prints, and records nothing

``speed`` is a training step of the plain model over one of the optimised, both in one process and
in turns: the median of their ratios (Adagrad). Writes ``<date>-<machine>-zoo.json`` and ``.md``,
which tell under which load: what else ran on the machine troubles both alike, but not evenly.
Exit code 1: a model is not right, or a library is missing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

import record
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "zoo"))
import zoo_models
from zoo_judge import Verdict, judge, speed

PACKAGES = {
    "torchfm": "torchfm", "torchctr": "torchctr", "deepctr-torch": "deepctr",
    "torch-rechub": "rechub", "pytorch-widedeep": "widedeep",
}  # fmt: skip


def row(verdict: Verdict) -> dict[str, object]:
    """One line of the table."""
    return {
        "model": verdict.name,
        "right": "yes" if verdict.right else "NO",
        "share of limit": round(verdict.share, 2),
        "captured": verdict.captured + (" (2 batches)" if verdict.batches == 2 else ""),
        "lookups": f"{verdict.fused} of {verdict.found}",
        "left to torch": verdict.left,
        "speed": None if verdict.speed is None else f"x{verdict.speed:.2f}",
        "why": verdict.why or None,
    }


def summary(verdicts: list[Verdict]) -> dict[str, object]:
    """The last line: counts, and the geometric mean of the speeds."""
    total = len(verdicts)
    speeds = [v.speed for v in verdicts if v.speed is not None]
    mean = f"x{statistics.geometric_mean(speeds):.2f}, worst x{min(speeds):.2f}" if speeds else None
    return {
        "model": "all",
        "right": f"{sum(v.right for v in verdicts)} of {total}",
        "share of limit": round(max(v.share for v in verdicts), 2),
        "captured": f"{sum(v.captured == 'whole' for v in verdicts)} of {total} whole",
        "lookups": f"all in {sum(v.all_fused for v in verdicts)} of {total}",
        "left to torch": sum(v.left for v in verdicts),
        "speed": mean,
        "why": None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="models with this in their names")
    parser.add_argument("--batch", type=int, default=2048, help="rows of a training step")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps; 0: no timing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    models, missing = zoo_models.collect()
    for library, why in missing.items():
        print(f"{library} does not import: {why}", file=sys.stderr)
    chosen = [subject for subject in models if o.only in subject.name]
    if not chosen:
        print("no model to judge; `make zoo` installs the libraries", file=sys.stderr)
        return 1
    verdicts = []
    loads = [os.getloadavg()[0]]
    for k, subject in enumerate(chosen, 1):
        verdict = judge(subject)
        if o.rounds and verdict.right:
            verdict.speed = speed(subject, o.batch, o.rounds)
        verdicts.append(verdict)
        loads.append(os.getloadavg()[0])
        shown = " ".join(str(value) for value in row(verdict).values() if value is not None)
        print(f"{k:3}/{len(chosen)} {shown}", flush=True)
    rows = [*map(row, verdicts), summary(verdicts)]
    if o.only:  # the record is of the whole zoo
        print(record.table(rows))
        return int(not all(v.right for v in verdicts))
    options = {key: getattr(o, key) for key in ("batch", "rounds", "threads")}
    used = ", ".join(
        f"{p} {version(p)}" for p, library in PACKAGES.items() if library not in missing
    )
    load = f"{statistics.median(loads):.1f} ({min(loads):.1f} to {max(loads):.1f})"
    title = f"Models of {used}; under a load of {load} processes on {os.cpu_count()} cores"
    record.write(o.out, "zoo", title, options, rows)
    return int(bool(missing) or not all(v.right for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
