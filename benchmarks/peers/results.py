"""The results: kept as JSON, one cell per line, and shown as tables, lost contests included."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import record

from peers.cells import Bar, Cell, bars, grid
from peers.measure import SAME
from peers.variants import OURS, RECIPES, Semantics

_MOST_NAMED = 6  # cells, after which they are counted
MEAN, WORST = 0.85, 1.0  # of the whole grid: the geometric mean, and any cell
WHATS = ("step", "row-wise step", "forward")


class Contest(NamedTuple):
    """Ours against the fastest peer in one cell; milliseconds.

    ratio: the median of the ratios within rounds, so not that of the two medians.
    """

    cell: Cell
    what: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    floor: float


@dataclass
class Record:
    """All results of one machine, versions and date with them."""

    date: str
    machine: dict[str, Any]
    results: list[dict[str, Any]]

    def find(self, cell: Cell) -> dict[str, Any] | None:
        return next((r for r in self.results if cell_of(r) == cell), None)

    def add(self, result: dict[str, Any]) -> None:
        """A cell measured again replaces what it was."""
        self.results = [r for r in self.results if cell_of(r) != cell_of(result)]
        self.results.append(result)
        order = {cell: k for k, cell in enumerate(grid())}
        self.results.sort(key=lambda r: order.get(cell_of(r), len(order)))


def cell_of(result: dict[str, Any]) -> Cell:
    return Cell(**result["cell"])


def new() -> Record:
    """An empty record of this machine, today."""
    versions = {}
    for package, name in (("fbgemm-gpu-cpu", "fbgemm"), ("torchrec", "torchrec")):
        try:
            versions[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Record(record.today(), record.machine() | versions, [])


def read(path: Path) -> Record:
    held = json.loads(path.read_text())
    left, results = held.get("left"), held["results"]
    if left is not None:
        results = [r | {"left": left[r["left"]]} if "left" in r else r for r in results]
    return Record(held["date"], held["machine"], results)


def write(kept: Record, path: Path) -> None:
    """Write ``path``, one cell per line, and the tables as ``.md`` beside it; both or neither.

    Which variants are left out, and why, is said once for all cells with the same reasons.
    """
    left: list[Any] = []
    for of in (r["left"] for r in kept.results if "left" in r):
        left += [] if of in left else [of]
    held = {"date": kept.date, "machine": kept.machine, "left": left}
    head = json.dumps(held, separators=(",", ":"))[:-1]
    results = (r | {"left": left.index(r["left"])} if "left" in r else r for r in kept.results)
    lines = ",\n".join(json.dumps(r, separators=(",", ":")) for r in results)
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in ((path, f'{head}, "results": [\n{lines}\n]}}\n'), (_page(path), page(kept))):
        part = file.with_suffix(file.suffix + ".part")
        part.write_text(text)
        part.replace(file)


def _page(path: Path) -> Path:
    return path.with_suffix(".md")


# ---------------------------------------------------------------- what the numbers say


def contest(result: dict[str, Any], what: str, peer: str | None = None) -> Contest | None:
    """Ours against ``peer``, or the fastest one; None if one of them was not measured."""
    key = "forward" if what == "forward" else "step"
    semantics: Semantics = "row-wise" if what == "row-wise step" else "exact"
    times = {n: v[key][0] for n, v in result["variants"].items() if key in v}
    mine = times.pop(OURS[semantics], None)
    rivals = {
        n: t
        for n, t in times.items()
        if n not in OURS.values() and (key == "forward" or RECIPES[n].semantics == semantics)
    }
    if peer is not None:
        rivals = {n: t for n, t in rivals.items() if n == peer}
    if mine is None or not rivals:
        return None
    ratios = {n: _ratio(result["variants"][n], key, mine / t) for n, t in rivals.items()}
    best = max(ratios, key=ratios.__getitem__)
    least = result["floor"][what.replace("-", "_").replace(" ", "_")]
    return Contest(cell_of(result), what, mine, best, rivals[best], ratios[best], least)


def _ratio(of: dict[str, Any], key: str, of_medians: float) -> float:
    """The median ratio of the rounds; records before the evening of 2026-11-22 have none."""
    known = of.get("ratio", {}).get(key)
    return of_medians if known is None else float(known[0])


def contests(kept: Record) -> Iterator[Contest]:
    """All of the record: the step, the row-wise step and the forward of every cell."""
    for result in kept.results:
        for what in WHATS:
            found = contest(result, what)
            if found is not None:
                yield found


def unequal(kept: Record) -> list[str]:
    """Variants whose numbers are not ours."""
    return [
        f"{cell_of(r).name}: {name} is {apart:g} off"
        for r in kept.results
        for name, apart in r["differ"].items()
        if not apart <= SAME
    ]


def mean(ratios: Iterable[float]) -> float:
    """The geometric one."""
    logs = [math.log(r) for r in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


# ---------------------------------------------------------------- tables


def page(kept: Record) -> str:
    """All of it, for people."""
    where = ", ".join(f"{key} {value}" for key, value in kept.machine.items())
    found = list(contests(kept))
    wrong = unequal(kept)
    parts = [
        "# A training step and a forward of DLRM on a CPU, beside the peers",
        f"{kept.date}; {where}",
        "    python benchmarks/peers",
        "26 tables, bottom MLP 13-512-256-dim, dot interaction, top MLP 512-256-1; Adagrad, or"
        " row-wise Adagrad on the tables. Medians, in milliseconds, of rounds in which all variants"
        " take turns on the same tables; `ratio` is ours over the fastest peer of the same"
        " semantics, the median of the ratios within rounds; `floor` what share of our time the"
        " machine's own limits explain.",
        "## Held to a number",
        judged(kept),
        "## All cells",
        summary(kept),
        _contest_table(found),
        "## Where a peer is faster",
        _contest_table([c for c in found if c.ratio > WORST]) or "Nowhere.",
        "## Numbers",
        f"The losses of the first steps and the clicks agree to {SAME:g} in every cell."
        if not wrong
        else "Not equal:\n\n" + "\n".join(f"- {line}" for line in wrong),
        "## Every variant",
        _every(kept),
        "## Absent",
        _absent(kept),
        "## Left out",
        "Who was not measured in a cell, because it could not be the fastest there.",
        _left(kept),
    ]
    return "\n\n".join(parts) + "\n"


def shown(kept: Record) -> str:
    """What docs/speed.md shows of it: the judged cells, and a summary of all cells."""
    return f"{judged(kept)}\n\n{summary(kept)}"


def judged(kept: Record) -> str:
    """The bars and where we stand; measured cells only."""
    rows = []
    for bar in bars():
        result = kept.find(bar.cell)
        found = None if result is None else contest(result, bar.what, bar.peer)
        if found is not None:
            rows.append(_judged_row(bar, found))
    return record.table(rows) if rows else "Not measured."


def _judged_row(bar: Bar, found: Contest) -> dict[str, object]:
    return {
        "what": bar.what,
        **_place(bar.cell),
        "recast": _ms(found.ours),
        "peer": found.peer,
        "its time": _ms(found.theirs),
        "ratio": f"{found.ratio:.2f}",
        "at most": f"{bar.most:.2f}",
        "": "" if found.ratio <= bar.most else "missed",
    }


def summary(kept: Record) -> str:
    """One line for each kind of contest."""
    lines = []
    total = len(grid())
    for what in WHATS:
        ratios = [c.ratio for c in contests(kept) if c.what == what]
        if ratios:
            lost = sum(r > WORST for r in ratios)
            lines.append(
                f"- {what}: {len(ratios)} cells, geometric mean of the ratios {mean(ratios):.2f},"
                f" {min(ratios):.2f} to {max(ratios):.2f}, a peer is faster in {lost}"
            )
    found = list(contests(kept))
    if found:
        worst = max(found, key=lambda c: c.ratio)
        lines.append(
            f"- all: geometric mean {mean(c.ratio for c in found):.2f} (at most {MEAN:.2f});"
            f" worst {worst.ratio:.2f} (at most {WORST:.2f}), the {worst.what} of"
            f" {worst.cell.name} beside {worst.peer}"
        )
    lines.append(f"- measured: {len(kept.results)} of {total} cells{_unmeasured(kept)}")
    return "\n".join(lines)


def _unmeasured(kept: Record) -> str:
    """The cells that were not measured, by batch and ids per bag."""
    missing: dict[tuple[int, int], int] = {}
    for cell in grid():
        if kept.find(cell) is None:
            key = cell.batch, cell.ids
            missing[key] = missing.get(key, 0) + 1
    each = len(grid()) // 8
    parts = [
        f"batch {batch} with {ids} id{'s' * (ids > 1)} ({n} of {each})"
        for (batch, ids), n in sorted(missing.items())
    ]
    return f"; not measured: {', '.join(parts)}" if parts else ""


def _contest_table(found: list[Contest]) -> str:
    rows = [
        {
            "what": c.what,
            **_place(c.cell),
            "recast": _ms(c.ours),
            "fastest peer": c.peer,
            "its time": _ms(c.theirs),
            "ratio": f"{c.ratio:.2f}",
            "floor": f"{c.floor / c.ours:.0%}",
        }
        for c in found
    ]
    return record.table(rows) if rows else ""


def _every(kept: Record) -> str:
    rows = []
    for result in kept.results:
        for key in ("step", "forward"):
            times = {n: v[key] for n, v in result["variants"].items() if key in v}
            if times:
                row = {"what": key, **_place(cell_of(result)), "load": result["load"]}
                rows.append(row | {n: _ms(times[n][0]) if n in times else "" for n in RECIPES})
    return record.table(rows) if rows else "Nothing."


def _absent(kept: Record) -> str:
    why: dict[str, list[str]] = {}
    for result in kept.results:
        for name, text in result["absent"].items():
            why.setdefault(f"{name}: {text}", []).append(cell_of(result).name)
    return _listed(why, len(kept.results)) or "None."


def _left(kept: Record) -> str:
    why: dict[str, list[str]] = {}
    for result in kept.results:
        for name, of in result.get("left", {}).items():
            for what, text in of.items():
                if what == "forward" or cell_of(result).trains:
                    why.setdefault(f"{name}, {what}: {text}", []).append(cell_of(result).name)
    return _listed(dict(sorted(why.items())), len(kept.results)) or "Nobody."


def _listed(why: dict[str, list[str]], total: int) -> str:
    """A line per reason, with the cells it applies to."""
    lines = []
    for text, cells in why.items():
        where = f"{len(cells)} cells" if len(cells) > _MOST_NAMED else ", ".join(cells)
        lines.append(f"- {text}" if len(cells) == total else f"- {text} ({where})")
    return "\n".join(lines)


def _place(cell: Cell) -> dict[str, object]:
    return {
        "batch": cell.batch, "dim": cell.dim, "ids": cell.ids, "data": cell.data,
        "threads": cell.threads,
    }  # fmt: skip


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"
