"""What a diff found, as rows of a table, in words and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recast.errors import DiffError
from recast.rewriter.report.wrap import wrapped

from .judge import Row
from .side_by_side import Divergence

GROUPS = ("outputs", "gradients", "after k steps", "buffers")
_NONE_PARTS = "no node of the graphs parts before the outputs"
SHOWN = 8  # rows of a group in the text, when all is well


@dataclass
class DiffReport:
    """What :func:`diff` found."""

    model: str
    rows: list[Row] = field(default_factory=list)
    first: Divergence | None = None  # the first node that differs
    seed: int = 0
    steps: int = 3
    judge: str = "float64"  # or why none is named
    command: str = ""  # repeats this diff
    notes: list[str] = field(default_factory=list)
    unsought: str = ""  # why no node was looked for, if so

    @property
    def ok(self) -> bool:
        """Whether everything is equal within its limit."""
        return all(r.ok for r in self.rows)

    def check(self) -> DiffReport:
        """This report; raises DiffError, naming the first node that parts, when not ``ok``."""
        if self.ok:
            return self
        bad = [r for r in self.rows if not r.ok]
        worst = bad[0]
        raise DiffError(
            f"diff: {self.model} and its optimised twin part: {_sentence(worst)}"
            + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""),
            where=self.first.place if self.first else None,
            why=str(self.first) if self.first else self.unsought or _NONE_PARTS,
            tries=(
                f"to repeat: {self.command}",
                "recast bisect SPEC names the rewrite that did it",
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model,
            "ok": self.ok,
            "judge": self.judge,
            "seed": self.seed,
            "steps": self.steps,
            "first": asdict(self.first) if self.first else None,
            "rows": [r.to_dict() for r in self.rows],
            "notes": list(self.notes),
            "unsought": self.unsought,
            "command": self.command,
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, *, width: int | None = None) -> str:
        """The report as text. ``width``: the columns of a terminal to wrap it for."""
        head = ("tensor", "shape", "max abs", "max rel", "at", "limit", "ok")
        judge = "the plain model in float64" if self.judge == "float64" else self.judge
        lines = [f"diff of {self.model}, judge: {judge}"]
        for group in GROUPS:
            rows = [r for r in self.rows if r.group == group]
            if rows:
                title = group.replace(" k steps", f" {self.steps} step{'s' * (self.steps != 1)}")
                lines += ["", *_table(title, head, rows, width)]
        lines += ["", *self.notes, *([self.unsought] if self.unsought and not self.ok else [])]
        lines.append("equal within limits" if self.ok else f"NOT equal: {self._first()}")
        lines.append(f"to repeat: {self.command}")
        text = "\n".join(lines)
        return text if width is None else wrapped(text, width)

    def _first(self) -> str:
        return str(self.first) if self.first else _sentence(next(r for r in self.rows if not r.ok))


def _sentence(row: Row) -> str:
    if row.why:
        return f"{row.tensor} ({row.when}): {row.why}"
    at = f" at {list(row.at)}" if row.at is not None else ""
    return f"{row.tensor} ({row.when}) is off by {row.max_abs:.2g}{at}, limit {row.limit:.2g}"


def _table(title: str, head: Sequence[str], rows: list[Row], width: int | None) -> list[str]:
    shown = rows
    if len(rows) > SHOWN:
        worst = set(sorted(range(len(rows)), key=lambda k: -rows[k].share)[:SHOWN])
        shown = [r for k, r in enumerate(rows) if k in worst]
    cells = [tuple(head), *(_cells(r) for r in shown)]
    tensors = f"{len(rows)} tensor{'' if len(rows) == 1 else 's'}"
    lines = [f"{title}: {tensors}, {sum(not r.ok for r in rows)} past the limit"]
    table = _columns(cells, "  ")
    if width is not None and max(map(len, table)) > width:  # each name above its numbers
        numbers = _columns([cell[1:] for cell in cells], "      ")
        table = [line for c, n in zip(cells, numbers, strict=True) for line in (f"  {c[0]}", n)]
    lines += table
    if len(shown) < len(rows):
        lines.append(
            f"  ... the worst {len(shown)} of {len(rows)}; all of them: --json, or to_dict()"
        )
    return lines


def _columns(cells: Sequence[Sequence[str]], indent: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        indent + "  ".join(c.ljust(w) for c, w in zip(cell, widths, strict=True)).rstrip()
        for cell in cells
    ]


def _cells(row: Row) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    at = "-" if row.at is None else ",".join(map(str, row.at)) or "-"
    if row.why:
        return (row.tensor, shape, "-", "-", at, "-", f"no: {row.why} ({row.when})")
    relative = f"{row.max_rel:.1e}" if row.max_rel < 1 or not row.ok else "of 0"  # but for rounding
    numbers = (f"{row.max_abs:.1e}", relative, at, f"{row.limit:.1e}")
    return (row.tensor, shape, *numbers, "yes" if row.ok else f"no ({row.when})")
