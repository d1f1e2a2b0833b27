"""The machinery of ``benchmarks/peers`` on tiny tables, with the variants that need no package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import __main__ as command
from peers import cells, contenders, measure, results, rounds, variants
from peers.cells import Cell
from peers.measure import Plan
from peers.model import Tables, batch
from peers.variants import RECIPES, Recipe, Variant
from torch import Tensor

CELL = Cell(batch=6, dim=4, ids=3, data="uniform", threads=1)
PLAIN = ("recast", "recast row-wise", "eager sparse", "eager fused", "eager dense")
QUICK = Plan(names=PLAIN, rounds=2, seconds=0.0)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "ROWS", 40)
    monkeypatch.setattr("peers.floor.LOOKUPS", 1 << 10)
    monkeypatch.setattr("peers.floor.SIDE", 32)


def measured(cell: Cell = CELL, plan: Plan = QUICK) -> dict[str, Any]:
    threads = torch.get_num_threads()
    try:
        (found,) = measure.run([cell], plan)
    finally:
        torch.set_num_threads(threads)
    return json.loads(json.dumps(found))  # as it comes from the process that measures


@pytest.mark.parametrize("data", cells.DATA)
def test_a_cell(data: cells.Data) -> None:
    found = measured(replace(CELL, data=data), replace(QUICK, gib=1e-5))
    assert found["cell"] == {"batch": 6, "dim": 4, "ids": 3, "data": data, "threads": 1}
    assert set(found["variants"]) == set(PLAIN)
    for times in found["variants"].values():
        assert times["rounds"] >= 1
        middle, low, high = times["step"]
        assert 0 < low <= middle <= high
    assert all(apart <= measure.SAME for apart in found["differ"].values()), found["differ"]
    assert 0 < found["floor"]["forward"] < found["floor"]["step"]


def test_a_batch_of_one_is_a_forward_only() -> None:
    found = measured(replace(CELL, batch=1))
    assert all("step" not in times for times in found["variants"].values())
    assert all(times["forward"][0] > 0 for times in found["variants"].values())


def wrong(lr: float) -> Recipe:
    """Eager sparse at another learning rate of its tables."""

    def build(tables: Tables, cell: Cell) -> Variant:
        variant = RECIPES["eager sparse"].build(tables, cell)
        variant.optimizers[-1].param_groups[-1]["lr"] = lr
        return variant

    return Recipe(build, "exact")


def test_a_variant_that_trains_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate higher by ten percent, for the tables alone, exceeds the limit ten times."""
    monkeypatch.setitem(RECIPES, "wrong", wrong(variants.LR * 1.1))
    found = measured(plan=replace(QUICK, names=("recast", "wrong")))
    assert found["differ"]["wrong"] > 10 * measure.SAME
    kept = results.Record("today", {}, [found])
    assert results.unequal(kept) == [
        f"b6-d4-i3-uniform-t1: wrong is {found['differ']['wrong']:g} off"
    ]
    assert "Not equal" in results.page(kept)


def test_a_peer_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(tables: Tables, cell: Cell) -> Variant:
        variant = RECIPES["eager sparse"].build(tables, cell)

        def forward(dense: Tensor, ids: Any) -> Tensor:
            raise RuntimeError("no such kernel")

        variant.forward = forward  # type: ignore[method-assign]
        return variant

    monkeypatch.setitem(RECIPES, "broken", Recipe(build, "exact"))
    monkeypatch.setitem(RECIPES, "elsewhere", Recipe(build, "exact", ("no_such_package",)))
    monkeypatch.setitem(variants.GET, "no_such_package", "pip install it")
    found = measured(plan=replace(QUICK, names=("recast", "broken", "elsewhere")))
    absent = found["absent"]
    assert absent.pop("broken") == "failed: RuntimeError: no such kernel"
    assert absent.pop("elsewhere") == "needs no_such_package: pip install it"
    assert set(absent) == {*RECIPES} - {"recast", "broken", "elsewhere"}
    assert set(absent.values()) == {"left out by an option"}
    assert set(found["variants"]) == {"recast"}


def test_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants that are far behind, and only they, have no round but the comparison of losses."""
    monkeypatch.setattr(measure, "LONG", 0.0)
    monkeypatch.setattr(measure, "LAST", 0.0)
    found = measured(plan=replace(QUICK, names=("recast", "recast row-wise", "eager dense")))
    rounds = {name: times["rounds"] for name, times in found["variants"].items()}
    assert rounds == {"recast": 2, "recast row-wise": 2, "eager dense": 1}
    assert all(apart <= measure.SAME for apart in found["differ"].values())
    assert found["variants"]["eager dense"]["step"][0] > 0


def test_ratios_are_of_rounds_that_both_had() -> None:
    """A machine that is twice as slow from the third round on moves the medians, not the ratio."""
    times = {
        "recast": rounds.Times({k: 1.0 + (k > 1) for k in range(6)}, {k: 1.0 for k in range(6)}),
        "FBGEMM exact": rounds.Times({0: 2.0, 1: 2.0, 2: 4.0}, {}),
        "eager sparse": rounds.Times({}, {7: 1.0}),
    }
    assert rounds.ratios(times, "FBGEMM exact", "step") == [0.5, 0.5, 0.5]
    assert rounds.ratios(times, "eager sparse", "forward") == []
    assert rounds.ratios(times, "recast", "step") == []
    found = rounds.summaries(times)
    assert found["FBGEMM exact"]["ratio"] == {"step": [0.5, 0.5, 0.5]}
    result = {
        "cell": {"batch": 6, "dim": 4, "ids": 3, "data": "uniform", "threads": 1},
        "floor": {"step": 1.0},
        "variants": found,
    }
    contest = results.contest(result, "step")
    assert contest is not None and contest.ratio == 0.5
    assert contest.ours / contest.theirs != 0.5


def test_who_is_far_behind_runs_it_no_more() -> None:
    """Behind the fastest peer, not behind ours; forward and step separately."""
    times = {
        "recast": rounds.Times({0: 0.1}, {0: 0.1}),
        "FBGEMM exact": rounds.Times({0: 1.0}, {0: 2.0}),
        "eager sparse": rounds.Times({0: 1.6}, {0: 1.0}),
        "FBGEMM row-wise": rounds.Times({0: 9.0}, {}),  # the only one of its semantics
    }
    work = {name: {"step", "forward"} for name in times}
    rounds.drop_behind(work, times, 1.5)
    assert work == {
        "recast": {"step", "forward"},
        "FBGEMM exact": {"step"},
        "eager sparse": {"forward"},
        "FBGEMM row-wise": {"step", "forward"},
    }


def test_contenders() -> None:
    """Variants that cannot be the fastest in a cell are left out, and the record says why."""
    cell = replace(CELL, batch=16384, dim=64)
    known = {
        "variants": {
            "recast": {"step": [1.0], "forward": [1.0]},
            "FBGEMM exact": {"step": [2.0], "forward": [2.2]},
            "FBGEMM + compile": {"step": [2.1], "forward": [2.0]},
            "eager sparse": {"step": [4.0], "forward": [2.1]},
        }
    }
    left = contenders.left_out(cell, known, 2.5)
    assert left["FBGEMM + compile"] == {"step": "1.05 times FBGEMM exact at batch 2048"}
    assert left["FBGEMM exact"] == {"forward": "1.10 times FBGEMM + compile at batch 2048"}
    assert left["eager sparse"] == {"step": "2.0 times the fastest at batch 2048"}
    assert "recast" not in left and set(left["recast row-wise"]) == {"forward"}
    # All of 40 rows are touched, hardly any of ten million.
    assert "step" not in left["eager fused"]
    large = contenders.left_out(replace(cell, batch=2, data="kaggle"), None, 2.5)
    assert "all rows" in large["eager fused"]["step"]
    assert contenders.neighbour(replace(cell, batch=2048)) is None
    names = ("recast", "recast row-wise", "eager sparse", "eager dense")
    found = measured(plan=replace(QUICK, names=names, contenders=True))
    assert set(found["variants"]) == {"recast", "recast row-wise", "eager sparse"}
    assert "forward" not in found["variants"]["recast row-wise"]
    page = results.page(results.Record("today", {}, [found]))
    assert "- eager dense, step: eager fused with its gradients and a slower optimizer" in page


def test_what_was_not_measured_is_said() -> None:
    found = measured(plan=replace(QUICK, names=("recast", "eager sparse")))
    found["cell"] = {"batch": 1, "dim": 16, "ids": 20, "data": "zipf", "threads": 2}
    del found["variants"]["recast"]["step"], found["variants"]["eager sparse"]["step"]
    text = results.summary(results.Record("today", {}, [found]))
    assert "measured: 1 of 144 cells" in text
    assert "batch 1 with 20 ids (17 of 18), batch 128 with 1 id (18 of 18)" in text
    assert "b1-d16-i20-zipf-t2 beside eager sparse" in text


def test_checking_leaves_the_tables_as_they_were() -> None:
    tables = Tables([9] * cells.TABLES, 4)
    ids = [torch.arange(0, 9, 2)] * cells.TABLES
    before = tables.flat.clone(), tables.flat_sums.clone(), tables.flat_row_sums.clone()
    saved = tables.saved(ids)
    variant = variants.ours(tables, CELL)
    b = batch(CELL, tables.rows, 3)
    even = [i - i % 2 for i in b.ids]
    variant.train(b.dense, even, b.label)
    assert not torch.equal(tables.flat, before[0])
    tables.restore(ids, saved)
    after = tables.flat, tables.flat_sums, tables.flat_row_sums
    assert all(torch.equal(a, c) for a, c in zip(after, before, strict=True))


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells run in processes of their own and are kept one by one; a run is resumed and shown."""
    few = ["--cells", "b1-d16-i1-uniform-t?", "--variants", "recast,eager sparse"]
    quick = ["--rounds", "1", "--seconds", "0", "--out", str(tmp_path)]
    assert command.main([*few, *quick, "--list"]) == 0
    assert capsys.readouterr().out.split() == ["b1-d16-i1-uniform-t1", "b1-d16-i1-uniform-t2"]
    assert command.main(["--cells", "b1-d16-i1-uniform-t1", *few[2:], *quick]) == 0
    (file,) = tmp_path.glob("*-peers.json")
    first = results.read(file)
    assert [results.cell_of(r).name for r in first.results] == ["b1-d16-i1-uniform-t1"]
    assert command.main([*few, *quick, "--resume"]) == 0
    both = results.read(file)
    assert both.results[0] == first.results[0], "not measured again"
    assert [results.cell_of(r).threads for r in both.results] == [1, 2]
    capsys.readouterr()
    assert command.main(["--show", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == file.with_suffix(".md").read_text().strip()


def test_wrong_options() -> None:
    for words in (["--variants", "recast,nobody"], ["--without", "nobody"]):
        with pytest.raises(SystemExit) as stop:
            command.options(words)
        assert stop.value.code == 2
