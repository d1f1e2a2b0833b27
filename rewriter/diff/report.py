"""What a diff found, as rows of a table, in words and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recast.errors import DiffError

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
            "command": self.command,
        }

    def __str__(self) -> str:
        head = ("tensor", "shape", "max abs", "max rel", "at", "limit", "ok")
        lines = [f"diff of {self.model}, judge: {self.judge}"]
        for group in GROUPS:
            rows = [r for r in self.rows if r.group == group]
            if rows:
                title = group.replace(" k ", f" {self.steps} ")
                lines += ["", *_table(title, head, rows)]
        lines += ["", *self.notes]
        lines.append("equal within limits" if self.ok else f"NOT equal: {self._first()}")
        lines.append(f"to repeat: {self.command}")
        return "\n".join(lines)

    def _first(self) -> str:
        return str(self.first) if self.first else _sentence(next(r for r in self.rows if not r.ok))


def _sentence(row: Row) -> str:
    if row.why:
        return f"{row.tensor} ({row.when}): {row.why}"
    at = f" at {list(row.at)}" if row.at is not None else ""
    return f"{row.tensor} ({row.when}) is off by {row.max_abs:.2g}{at}, limit {row.limit:.2g}"


def _table(title: str, head: Sequence[str], rows: list[Row]) -> list[str]:
    shown = rows
    if len(rows) > SHOWN:
        worst = set(sorted(range(len(rows)), key=lambda k: -rows[k].share)[:SHOWN])
        shown = [r for k, r in enumerate(rows) if k in worst]
    cells = [tuple(head), *(_cells(r) for r in shown)]
    widths = [max(len(c[k]) for c in cells) for k in range(len(head))]
    lines = [f"{title}: {len(rows)} tensors, {sum(not r.ok for r in rows)} past the limit"]
    lines += [
        "  " + "  ".join(c.ljust(w) for c, w in zip(cell, widths, strict=True)).rstrip()
        for cell in cells
    ]
    if len(shown) < len(rows):
        lines.append(f"  ... the worst {len(shown)} of {len(rows)}; all of them in to_dict()")
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    at = "-" if row.at is None else ",".join(map(str, row.at)) or "-"
    if row.why:
        return (row.tensor, shape, "-", "-", at, "-", f"no: {row.why} ({row.when})")
    numbers = (f"{row.max_abs:.1e}", f"{row.max_rel:.1e}", at, f"{row.limit:.1e}")
    return (row.tensor, shape, *numbers, "yes" if row.ok else f"no ({row.when})")
