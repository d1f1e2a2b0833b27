"""Ours against every peer that is installed, over a grid of sizes.

    python benchmarks/peers --judged              # the cells that have a limit
    python benchmarks/peers --minutes 30          # as much of the grid as fits, those first
    python benchmarks/peers --resume --minutes 30 # the next part
    python benchmarks/peers --cells 'b2048-*-t1' --variants recast,'FBGEMM exact'
    python benchmarks/peers --contenders --prepare  # compile for the peers, measure nothing
    python benchmarks/peers --contenders --rounds 7 --seconds 6   # all of the grid in an hour
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
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what lies beside this folder
import record

from peers import results
from peers.cells import Cell, chosen, grid, judged
from peers.contenders import neighbour
from peers.measure import Plan, prepare, run
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
    add(
        "--contenders",
        action="store_true",
        help="only who may be the fastest in a cell, by the"
        " reasons in contenders.py, which the record keeps",
    )
    add(
        "--prepare",
        action="store_true",
        help="fill torch.compile's cache on the disk"
        " (TORCHINDUCTOR_CACHE_DIR) for the cells, measure nothing",
    )
    add("--cpu-time", action="store_true", help="processor time: for one thread, busy machines")
    add("--resume", action="store_true", help="go on with the newest record of this machine")
    add("--show", action="store_true", help="print the newest record of this machine")
    add("--speed-page", action="store_true", help="print what docs/speed.md shows of it")
    add("--list", action="store_true", help="print the cells' names")
    add("--out", type=Path, default=HERE.parent / "results", help="folder (default %(default)s)")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    o = p.parse_args(arguments)
    o.names = tuple(n for n in o.variants.split(",") if n and n not in o.without.split(","))
    for name in (*o.names, *filter(None, o.without.split(","))):
        if name not in RECIPES:
            p.error(f"no variant {name!r}: {', '.join(RECIPES)}")
    return o


def main(arguments: list[str] | None = None) -> int:
    o = options(arguments)
    if o.child:
        return child(json.load(sys.stdin))
    path = record.path(o.out, "peers")
    kept = results.new()
    if o.resume or o.show or o.speed_page:
        older = sorted(o.out.glob(f"*{record.slug()}-peers.json"))
        if older:
            path = older[-1]
            kept = results.read(path)
    if o.show or o.speed_page:
        print(results.page(kept) if o.show else results.shown(kept))
        return 0
    cells = chosen(judged() if o.judged else grid(), o.cells)
    if o.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    if o.resume:
        cells = [cell for cell in cells if kept.find(cell) is None]
    end = time.monotonic() + 60 * o.minutes
    plan = Plan(o.names, o.rounds, o.seconds, o.gib, o.cpu_time, o.contenders)
    if o.prepare:
        return prepared(cells, plan, end)
    for result in measured(cells, plan, end, kept):
        kept.add(result)
        results.write(kept, path)
        print(line(result), file=sys.stderr, flush=True)
    print(results.judged(kept), results.summary(kept), f"{path}", sep="\n\n")
    return 1 if results.unequal(kept) else 0


def measured(
    cells: list[Cell], plan: Plan, end: float, kept: results.Record
) -> Iterator[dict[str, Any]]:
    """Results, from one process for each set of tables; a cell that kills it is left out."""
    left = list(cells)
    while left and time.monotonic() < end:
        group = _neighbours(left)
        before = [n for n in map(neighbour, group) if n is not None]
        known = [found for n in dict.fromkeys(before) if (found := kept.find(n)) is not None]
        done = []
        with _process(group, plan, end, known=known) as process:
            for text in process.stdout or ():
                if text.startswith("{"):
                    result = json.loads(text)
                    done.append(results.cell_of(result))
                    yield result
        if process.returncode and len(done) < len(group):
            lost = group[len(done)]
            print(f"{lost.name}: the process ended with {process.returncode}", file=sys.stderr)
            done.append(lost)
        left = [cell for cell in left if cell not in done]


def prepared(cells: list[Cell], plan: Plan, end: float) -> int:
    left = list(cells)
    while left and time.monotonic() < end:
        group = _neighbours(left)
        left = left[len(group) :]
        with _process(group, plan, end, prepare=True) as process:
            for text in process.stdout or ():
                print(text, end="", file=sys.stderr, flush=True)
        if process.returncode:
            return process.returncode
    return 0


def _neighbours(cells: list[Cell]) -> list[Cell]:
    """The first of ``cells``, and those after it that share its tables."""
    return list(takewhile(lambda cell: cell.tables == cells[0].tables, cells))


def _process(group: list[Cell], plan: Plan, end: float, **more: Any) -> subprocess.Popen[str]:
    given = {
        "cells": [asdict(cell) for cell in group],
        "plan": asdict(plan),
        "seconds": min(end - time.monotonic(), 1e9),
    }
    # Not as an argument: results of other cells are long.
    process = subprocess.Popen(
        [sys.executable, str(HERE), "--child"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    with process.stdin as pipe:
        json.dump(given | more, pipe)
    return process


def child(given: dict[str, Any]) -> int:
    """Measure cells until the time is over, printing a line of JSON each; or prepare them."""
    end = time.monotonic() + given["seconds"]
    plan = Plan(**given["plan"] | {"names": tuple(given["plan"]["names"])})
    cells = [Cell(**cell) for cell in given["cells"]]
    known = {results.cell_of(result): result for result in given.get("known", ())}
    prepares = given.get("prepare", False)
    for done in prepare(cells, plan) if prepares else run(cells, plan, known):
        print(
            f"{done.name} is prepared" if isinstance(done, Cell) else json.dumps(done), flush=True
        )
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
