"""Reports for terminals of some width: nothing is lost, and nothing sticks out."""

from __future__ import annotations

import pytest

from recast.rewriter.diff.judge import Row
from recast.rewriter.diff.report import DiffReport
from recast.rewriter.report.journal import Fired, Journal, Missed
from recast.rewriter.report.report import Report
from recast.rewriter.report.wrap import wrapped


def _report() -> Report:
    journal = Journal()
    journal.fired += [
        Fired(
            "group-embeddings", "bags", tuple(f"tables.{n}" for n in ("user", "item", "brand")),
            "model.py:147", "26 lookups of 5 tables in one call, the rows of which stay",
            "25 launches, 1.66 MB of dense gradient a step",
        ),
    ]  # fmt: skip
    tries = ("give it a layer of its own", "leave it")
    journal.miss(
        Missed(
            "fuse-mlp", "head", "its value is also used by <add> and by 3 others", "m.py:9", tries
        )
    )
    return Report("Ranker", "whole", journal=journal, notes=["bound by products: " + "much " * 40])


def _diff() -> DiffReport:
    name = "bottom.towers.click.net.1.running_mean"
    bad = Row("buffers", name, (16,), 1.0, 1.0, (3,), 1e-6, False, "train mode")
    report = DiffReport("Ranker", [bad, Row("outputs", "eval output", (8, 1), 0, 0, None, 1, True)])
    report.command = "recast diff a_rather_long_folder/of_models/model.py:model --steps 3 --seed 0"
    return report


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_line_sticks_out(width: int) -> None:
    for report in (_report(), _diff()):
        lines = report.text(width=width).splitlines()
        assert [x for x in lines if len(x) > width and not x.startswith("to repeat: ")] == []
        plain, narrow = (" ".join(t.split()) for t in (str(report), "\n".join(lines)))
        assert sorted(plain.replace("|", " ").split()) == sorted(
            narrow.replace("(model.py:147)", "model.py:147").replace("(m.py:9)", "m.py:9")
            .replace("|", " ").split()
        )  # fmt: skip


def test_by_default_columns_are_fixed() -> None:
    assert "\n  note  bound by products: " + "much " * 39 in str(_report())
    assert _report().text(width=500) == str(_report())
    assert _diff().text(width=500) == str(_diff())


def test_a_narrow_row_stands_below_its_rule() -> None:
    lines = _report().text(width=70).splitlines()
    assert lines[1:3] == [
        "  group-embeddings        fired 1",
        "      26 lookups of 5 tables in one call, the rows of which stay",
    ]
    assert lines[3].startswith("      ← tables"), "an arrow stays with what it points at"


def test_what_hangs_below_what() -> None:
    assert wrapped("  why  one two three four", 18) == "  why  one two\n       three four"
    assert wrapped("one two three", 8) == "one two\n  three"
    assert (
        wrapped("  try  do this   |   or that thing", 20) == "  try  do this\n       or that thing"
    )
    command = "next: recast diff model.py:model --passes default"
    assert wrapped(command, 20) == command  # to be copied
    assert wrapped("short\n\nlines", 5) == "short\n\nlines"
