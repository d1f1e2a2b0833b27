"""Models of public libraries, judged and timed: correct, captured whole, lookups fused, speed.

    make zoo                                         # all models of the libraries
    python benchmarks/zoo.py --only deepctr/DIN,rechub --rounds 3     # prints, records nothing
    python benchmarks/zoo.py --libraries torchfm,torchctr --out /tmp  # records those, there
    python benchmarks/zoo.py --resume                # goes on where a run was stopped

``speed`` is the time of a training step of the plain model over that of the optimised one, both in
one process, in turns: the median of their ratios (Adagrad). ``inference`` is the same of a call in
eval mode without gradients, of 128 rows. Writes ``<date>-<machine>-zoo.json``
and ``.md``, which also record the machine's load: other work slows both down, but not evenly. Each
library runs in a process of its own; a model that kills it, or does not answer, costs one wrong
line, and the others go on. Exit code 1 if a model is not right or a library is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import record
import torch
from one_by_one import answers

from recast.runtime import device

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "zoo"))
import zoo_models
from zoo_judge import Verdict, inference, judge, speed

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "torchfm": "torchfm", "torchctr": "torchctr", "deepctr": "deepctr-torch",
    "rechub": "torch-rechub", "widedeep": "pytorch-widedeep", "recbole": "recbole",
    "fuxictr": "fuxictr", "recpangu": "rec-pangu",
}  # fmt: skip
JOURNAL = ROOT / "out" / "zoo.jsonl"  # a line per model, as soon as it is done


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
        "inference": None if verdict.inference is None else f"x{verdict.inference:.2f}",
        "why": verdict.why or None,
    }


def summary(verdicts: list[Verdict]) -> dict[str, object]:
    """The last line: counts, and the geometric mean of the speeds."""
    total = len(verdicts)
    return {
        "model": "all",
        "right": f"{sum(v.right for v in verdicts)} of {total}",
        "share of limit": round(max(v.share for v in verdicts), 2),
        "captured": f"{sum(v.captured == 'whole' for v in verdicts)} of {total} whole",
        "lookups": f"all in {sum(v.all_fused for v in verdicts)} of {total}",
        "left to torch": sum(v.left for v in verdicts),
        "speed": _mean([v.speed for v in verdicts]),
        "inference": _mean([v.inference for v in verdicts]),
        "why": None,
    }


def _mean(speeds: list[float | None]) -> str | None:
    """The geometric mean of those that were measured, and the worst."""
    known = [speed for speed in speeds if speed is not None]
    return f"x{statistics.geometric_mean(known):.2f}, worst x{min(known):.2f}" if known else None


# ---------------------------------------------------------------- one library


def work(
    library: str, done: list[str], wanted: list[str], how: dict[str, int]
) -> Iterator[tuple[str, Any]]:
    """Runs in a process of its own. Yields ``("missing", why)``, or for each model ``("begin",
    name)`` and ``("end", line)``.

    A model that is in ``done``, or has none of ``wanted`` in its name, is left out.
    """
    torch.set_num_threads(how["threads"])
    models, missing = zoo_models.collect([library])
    if library in missing:
        yield "missing", missing[library]
    for subject in models:
        if subject.name in done or not any(part in subject.name for part in wanted):
            continue
        yield "begin", subject.name
        start, before = time.perf_counter(), os.getloadavg()[0]
        verdict = judge(subject)
        if how["rounds"] and verdict.right:
            try:
                verdict.speed = speed(subject, how["batch"], how["rounds"])
                verdict.inference = inference(subject)
            except Exception as error:
                verdict.right, verdict.why = False, f"timing: {type(error).__name__}: {error}"
        yield "end", _line(verdict, max(before, os.getloadavg()[0]), time.perf_counter() - start)


def run(library: str, done: list[str], o: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yields ``("end", line)`` for each model of ``library``, or ``("missing", why)``."""
    how = {key: getattr(o, key) for key in ("batch", "rounds", "threads")}
    done = list(done)
    while True:
        current, failed = "", ""
        for answer in answers(work, (library, done, o.only.split(","), how), o.limit):
            if isinstance(answer, Exception):
                failed = str(answer)
                continue
            kind, told = answer
            current = told if kind == "begin" else ""
            if kind != "begin":
                yield answer
            if kind == "end":
                done.append(told["name"])
        if not failed:
            return
        if not current:
            yield "missing", failed
            return
        done.append(current)
        yield "end", _line(Verdict(current, why=failed), os.getloadavg()[0], 0.0)


def _line(verdict: Verdict, load: float, seconds: float) -> dict[str, Any]:
    return {**asdict(verdict), "load": load, "seconds": seconds}


# ---------------------------------------------------------------- all of them


def resumed(o: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a run that was stopped; if there are none, a new journal is begun."""
    JOURNAL.parent.mkdir(exist_ok=True)
    head = json.dumps({"options": options, **record.machine()})
    lines = JOURNAL.read_text().splitlines() if o.resume and JOURNAL.exists() else []
    if lines and lines[0] == head:
        return [json.loads(line) for line in lines[1:]]
    if lines:
        print("the run that was stopped had other options; beginning anew", file=sys.stderr)
    JOURNAL.write_text(head + "\n")
    return []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="models with one of these in their names")
    parser.add_argument("--libraries", default=",".join(zoo_models.LIBRARIES))
    parser.add_argument("--batch", type=int, default=2048, help="rows of a training step")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps; 0: no timing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, help="seconds a model may take")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    parser.add_argument("--out", type=Path, help="folder of the record; written for parts too")
    o = parser.parse_args()
    unknown = set(o.libraries.split(",")) - set(zoo_models.LIBRARIES)
    if unknown:
        parser.error(f"no library {', '.join(unknown)}: {', '.join(zoo_models.LIBRARIES)}")
    return o


def main() -> int:
    o = arguments()
    options = {key: getattr(o, key) for key in ("batch", "rounds", "threads")}
    chosen = {key: getattr(o, key) for key in ("only", "libraries")}
    whole = not o.only and set(o.libraries.split(",")) == set(zoo_models.LIBRARIES)
    rows, missing = resumed(o, {**options, **chosen}), []
    start = time.perf_counter()
    device.extension()  # a checkout compiles it on first use: no model's time may include that
    print(f"kernels: {device.why_missing() or f'{time.perf_counter() - start:.0f} s'}", flush=True)
    for library in o.libraries.split(","):
        for kind, found in run(library, [r["name"] for r in rows], o):
            if kind == "missing":
                missing.append(library)
                print(f"{library} is missing: {found}; try: make zoo", file=sys.stderr)
                continue
            rows.append(found)
            with JOURNAL.open("a") as journal:
                journal.write(json.dumps(found) + "\n")
            shown = " ".join(str(v) for v in row(_verdict(found)).values() if v is not None)
            print(f"{len(rows):3} {shown} ({found['seconds']:.0f} s)", flush=True)
    if not rows:
        print("no model to judge; `make zoo` installs the libraries", file=sys.stderr)
        return 1
    verdicts = [_verdict(found) for found in rows]
    table = [*map(row, verdicts), summary(verdicts)]
    took = f"{(time.perf_counter() - start) / 60:.1f} minutes"
    if whole or o.out:
        loads = [found["load"] for found in rows]
        load = f"{statistics.median(loads):.1f} ({min(loads):.1f} to {max(loads):.1f})"
        used = ", ".join(
            f"{package} {version(package)}" for library, package in PACKAGES.items()
            if library in o.libraries.split(",") and library not in missing
        )  # fmt: skip
        title = f"Models of {used}; under a load of {load} processes on {os.cpu_count()} cores"
        told = options if whole else {**options, **{k: v for k, v in chosen.items() if v}}
        print(record.write(o.out or ROOT / "benchmarks" / "results", "zoo", title, told, table))
        JOURNAL.unlink()  # the run is recorded: nothing to resume
    else:
        print(record.table(table))
    print(f"took {took}")
    return int(bool(missing) or not all(v.right for v in verdicts))


def _verdict(found: dict[str, Any]) -> Verdict:
    return Verdict(**{k: v for k, v in found.items() if k not in ("load", "seconds")})


if __name__ == "__main__":
    sys.exit(main())
