"""Ours beside every peer that is installed, over a grid of sizes.

    python benchmarks/peers --judged              # the cells that are held to a number
    python benchmarks/peers --minutes 30          # as much of the grid as fits, those first
    python benchmarks/peers --resume --minutes 30 # the next part
    python benchmarks/peers --cells 'b2048-*-t1' --variants recast,'FBGEMM exact'
    python benchmarks/peers --show                # the tables of the newest record

Cells that share their tables are measured in a process of their own. Writes
``benchmarks/results/<date>-<machine>-peers.json`` and ``.md`` after every cell. Exit code 1 when a
variant's losses are not ours, 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what lies beside this folder
import record

from peers import results
from peers.cells import Cell, chosen, grid, judged
from peers.measure import Plan, run
from peers.variants import RECIPES

HERE = Path(__file__).resolve().parent


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = p.add_argument
    add("--judged", action="store_true", help="only the cells that are held to a number")
    add("--cells", action="append", default=[], metavar="GLOB", help="only cells of such a name")
    add("--variants", default=",".join(RECIPES), help="default %(default)s")
    add("--without", default="", metavar="NAMES", help="variants to leave out")
    add("--rounds", type=int, default=15, help="at most, of each cell (default %(default)s)")
    add("--seconds", type=float, default=20, help="of each cell's rounds (default %(default)s)")
    add("--minutes", type=float, default=float("inf"), help="of all; no cell begins later")
    add("--gib", type=float, default=2.5, help="tables and a state, if cut (default %(default)s)")
    add("--cpu-time", action="store_true", help="processor time: for one thread, busy machines")
    add("--resume", action="store_true", help="go on with the newest record of this machine")
    add("--show", action="store_true", help="print the newest record of this machine")
    add("--readme", action="store_true", help="print what README.md shows of that record")
    add("--list", action="store_true", help="print the cells' names")
    add("--out", type=Path, default=HERE.parent / "results", help="folder (default %(default)s)")
    add("--child", help=argparse.SUPPRESS)
    o = p.parse_args(arguments)
    o.names = tuple(n for n in o.variants.split(",") if n and n not in o.without.split(","))
    for name in (*o.names, *filter(None, o.without.split(","))):
        if name not in RECIPES:
            p.error(f"no variant {name!r}: {', '.join(RECIPES)}")
    return o


def main(arguments: list[str] | None = None) -> int:
    o = options(arguments)
    if o.child:
        return child(json.loads(o.child))
    path = record.path(o.out, "peers")
    kept = results.new()
    if o.resume or o.show or o.readme:
        older = sorted(o.out.glob(f"*{record.slug()}-peers.json"))
        if older:
            path = older[-1]
            kept = results.read(path)
    if o.show or o.readme:
        print(results.page(kept) if o.show else results.readme(kept))
        return 0
    cells = chosen(judged() if o.judged else grid(), o.cells)
    if o.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    if o.resume:
        cells = [cell for cell in cells if kept.find(cell) is None]
    end = time.monotonic() + 60 * o.minutes
    plan = Plan(o.names, o.rounds, o.seconds, o.gib, o.cpu_time)
    for result in measured(cells, plan, end):
        kept.add(result)
        results.write(kept, path)
        print(line(result), file=sys.stderr, flush=True)
    print(results.judged(kept), results.summary(kept), f"{path}", sep="\n\n")
    return 1 if results.unequal(kept) else 0


def measured(cells: list[Cell], plan: Plan, end: float) -> Iterator[dict[str, Any]]:
    """Results, from one process for each set of tables; a cell that kills it is left out."""
    left = list(cells)
    while left and time.monotonic() < end:
        first = left[0]
        # A run of neighbours: what is wanted first comes first.
        group = []
        for cell in left:
            if (cell.data, cell.dim) != (first.data, first.dim):
                break
            group.append(cell)
        given = {
            "cells": [asdict(cell) for cell in group],
            "plan": asdict(plan),
            "seconds": min(end - time.monotonic(), 1e9),
        }
        command = [sys.executable, str(HERE), "--child", json.dumps(given)]
        done = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for text in process.stdout or ():
                if text.startswith("{"):
                    result = json.loads(text)
                    done.append(results.cell_of(result))
                    yield result
        code = process.returncode
        if code and len(done) < len(group):
            lost = group[len(done)]
            print(f"{lost.name}: the process ended with {code}", file=sys.stderr)
            done.append(lost)
        left = [cell for cell in left if cell not in done]


def child(given: dict[str, Any]) -> int:
    """Measure cells, a line of JSON each, until the time is over."""
    end = time.monotonic() + given["seconds"]
    plan = Plan(**given["plan"] | {"names": tuple(given["plan"]["names"])})
    for result in run([Cell(**cell) for cell in given["cells"]], plan):
        print(json.dumps(result), flush=True)
        if time.monotonic() > end:
            break
    return 0


def line(result: dict[str, Any]) -> str:
    found = [results.contest(result, what) for what in results.WHATS]
    parts = [
        f"{c.what} {c.ours:.3g} ms, {c.peer} {c.theirs:.3g} ({c.ratio:.2f})" for c in found if c
    ]
    return f"{results.cell_of(result).name}: {'; '.join(parts) or 'no peer to compare with'}"


if __name__ == "__main__":
    raise SystemExit(main())
