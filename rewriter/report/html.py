"""The report as one self-contained page: no network, no scripts, opens from disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recast.errors import RecastError, UsageError

from . import draw

if TYPE_CHECKING:
    from .report import Report

_LONG = 0.02  # seconds: passes that did nothing in less time share one row
_COLUMN = 560  # pixels: wider pictures stand below each other
_TEMPLATE = Path(__file__).parent / "templates" / "report.html"


def page(report: Report) -> str:
    """The page for ``report``. Raises UsageError when jinja2 is not installed."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise UsageError(
            "html: the page needs the package jinja2",
            why="it is not installed",
            tries=("pip install 'torch-recast[viz]'", "--format text,json"),
        ) from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    pictures, trouble = _pictures(report)
    headline = report.text(times=False).splitlines()[0].removeprefix(f"{report.model}: ")
    return template.render(
        report=report,
        headline=headline,
        found=report.journal.lookups_found,
        fused=report.journal.lookups_fused,
        rewrites=sorted(_rewrites(report), key=lambda row: not row["saves"]),
        missed=list(_missed(report)),
        to_change=any(e.tries for e in report.journal.missed),
        notes=list(dict.fromkeys(_told(report))),
        graphs=[(title, Markup(picture)) for title, picture in pictures],
        wide=any(_width(picture) > _COLUMN for _, picture in pictures),
        no_picture=trouble,
        total=report.seconds.get("total"),
        steps=_steps(report),
    )


def _told(report: Report) -> list[str]:
    """Every sentence of the report that does not belong to one rule."""
    forms = (form.text(times=False).splitlines()[0] for form in report.forms)
    return [*report.told_notes(), *forms, *report.running()]


def _pictures(report: Report) -> tuple[list[tuple[str, str]], str]:
    """Laid out pictures, or the sentence that says why there are none."""
    try:
        found = [(title, draw.layout(dot)) for title, dot in report.pictures.items() if dot]
    except RecastError as error:
        return [], f"Not drawn: {error.why}. To draw it: {'; '.join(error.tries)}."
    return found, ""


def _width(picture: str) -> int:
    found = re.match(r'<svg width="(\d+)"', picture)
    return int(found[1]) if found else 0


def _rewrites(report: Report) -> Iterator[dict[str, Any]]:
    from .report import fired_rows

    for rule in dict.fromkeys(e.rule for e in report.journal.fired):
        for row in fired_rows([e for e in report.journal.fired if e.rule == rule]):
            yield {"rule": rule, **row._asdict()}


def _missed(report: Report) -> Iterator[tuple[str, int, str, str | None, tuple[str, ...]]]:
    from .report import missed_rows

    for rule in dict.fromkeys(e.rule for e in report.journal.missed):
        entries = [e for e in report.journal.missed if e.rule == rule]
        for verb, what, where, tries in missed_rows(entries):
            yield rule, int(verb.split()[1]), what, where, tries


def _steps(report: Report) -> list[tuple[str, str, float]]:
    """``(name, times fired, seconds)``; passes that did nothing and took no time are one row."""
    rows = [(k, "", v) for k, v in report.seconds.items() if k not in ("total", "passes")]
    idle = [s for s in report.journal.steps if not s.fired and s.seconds < _LONG]
    rows += [(s.name, str(s.fired), s.seconds) for s in report.journal.steps if s not in idle]
    if idle:
        name = idle[0].name if len(idle) == 1 else f"{len(idle)} other passes"
        rows.append((name, "0", sum(s.seconds for s in idle)))
    return rows
