"""The benchmark's tables name the fastest peer of the same semantics, also where it beats us."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from peers import results
from peers.cells import Cell, bars, chosen, grid, judged, table_rows

ROOT = Path(__file__).parents[2]
NAMES = (
    "recast", "recast row-wise", "FBGEMM exact", "FBGEMM row-wise", "eager sparse",
)  # fmt: skip


def result(cell: Cell, steps: tuple[float, ...], forward: float = 1.0) -> dict[str, Any]:
    times = {
        name: {"rounds": 3, "step": [s, s, s], "forward": [forward * s, s, s]}
        for name, s in zip(NAMES, steps, strict=True)
    }
    return {
        "cell": {k: getattr(cell, k) for k in Cell.__slots__},
        "load": 0.1,
        "floor": {"forward": 2.0, "step": 5.0, "row_wise_step": 4.0},
        "differ": dict.fromkeys(NAMES, 0.0),
        "variants": times,
        "absent": {"compile fused": "failed: NoCompiler"},
    }


ONE, TWO = judged()[:2]


def test_the_grid() -> None:
    cells = grid()
    assert len(cells) == len(set(cells)) == 4 * 3 * 2 * 3 * 2
    assert cells[: len(judged())] == judged()
    assert {bar.cell for bar in bars()} == set(judged())
    assert len({cell.name for cell in cells}) == len(cells)
    assert [c.name for c in chosen(cells, ["b1-d64-i1-uniform-*"])] == [
        "b1-d64-i1-uniform-t1",
        "b1-d64-i1-uniform-t2",
    ]


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_kaggle_tables_are_cut_to_fit(dim: int) -> None:
    rows = table_rows("kaggle", dim, 1.0)
    assert 0.8 * 2**30 < sum(rows) * dim * 8 <= 2**30
    assert min(rows) == 3, "small tables stay as they are"
    assert len(table_rows("zipf", dim, 1.0)) == len(rows)


def test_a_contest_is_against_the_same_semantics() -> None:
    found = result(ONE, (6.0, 3.0, 8.0, 2.0, 7.0))
    step = results.contest(found, "step")
    assert step is not None
    assert (step.ours, step.peer, step.theirs, step.floor) == (6.0, "eager sparse", 7.0, 5.0)
    assert step.ratio == 6 / 7
    rows = results.contest(found, "row-wise step")
    assert rows is not None
    assert (rows.ours, rows.peer, rows.ratio) == (3.0, "FBGEMM row-wise", 1.5)
    forward = results.contest(found, "forward")
    assert forward is not None
    assert forward.peer == "FBGEMM row-wise", "any peer's forward means the same"
    named = results.contest(found, "step", "FBGEMM exact")
    assert named is not None and named.theirs == 8.0
    assert results.contest(found, "step", "TorchRec fused") is None


def test_every_loss_is_listed() -> None:
    kept = results.Record("today", {"cpu": "one"}, [])
    kept.add(result(TWO, (6.0, 3.0, 8.0, 2.0, 7.0)))
    kept.add(result(ONE, (1.0, 1.0, 9.0, 9.0, 9.0), forward=0.5))
    assert [results.cell_of(r) for r in kept.results] == [ONE, TWO], "in the order of the grid"
    page = results.page(kept)
    lost = page.split("## Where a peer is faster")[1].split("## ")[0]
    assert [line.split("|")[1].strip() for line in lost.splitlines() if "FBGEMM" in line] == [
        "row-wise step",
        "forward",
    ]
    assert "1.50" in lost and "3.00" in lost
    assert "a peer is faster in 1" in results.summary(kept)
    assert "- compile fused: failed: NoCompiler" in page
    kept.add(result(TWO, (1.0, 1.0, 9.0, 9.0, 9.0), forward=0.5))
    assert "Nowhere." in results.page(kept)


def test_a_missed_bar_says_so() -> None:
    kept = results.Record("today", {}, [result(ONE, (6.0, 3.0, 8.0, 2.0, 7.0))])
    lines = results.judged(kept).splitlines()[2:]
    assert [("missed" in line, line.split("|")[1].strip()) for line in lines] == [
        (True, "step"),
        (True, "row-wise step"),
    ]


def test_the_mean_is_geometric() -> None:
    assert results.mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(results.mean([]))


def test_a_record_is_what_was_written(tmp_path: Path) -> None:
    kept = results.Record("today", {"cpu": "one"}, [result(ONE, (1.0, 2.0, 3.0, 4.0, 5.0))])
    file = tmp_path / "a-peers.json"
    results.write(kept, file)
    assert results.read(file) == kept
    assert file.with_suffix(".md").read_text() == results.page(kept)
    assert len(file.read_text().splitlines()) == 3, "a line a cell"


def test_the_page_on_speed_shows_the_newest_record() -> None:
    records = sorted((ROOT / "benchmarks" / "results").glob("*-peers.json"))
    if not records:
        pytest.skip("nothing recorded yet")
    assert results.shown(results.read(records[-1])) in (ROOT / "docs" / "speed.md").read_text()
