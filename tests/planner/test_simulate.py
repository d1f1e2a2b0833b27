"""Published models, modelled: their facts, the repeats of their ids, and the words around them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recast.errors import UsageError
from recast.runtime.planner import published
from recast.runtime.planner import simulate as s
from recast.runtime.planner.cost import Setting
from recast.runtime.planner.models import MODELS
from recast.runtime.topology import GIB, named

FITTED = ("tiny", "small")  # the models that the rates of published.RELEASES are fitted on


@pytest.mark.parametrize(
    ("name", "tables", "gib", "macs"),  # as stated with the models
    [
        ("tiny", 55, 4.2, 207_488), ("small", 107, 26.3, 1_455_232),
        ("medium", 311, 206.2, 3_242_112), ("large", 612, 773.8, 12_329_216),
        ("jumbo", 1022, 3109.5, 15_286_528), ("colossal", 2002, 22327.4, 59_171_072),
        ("mlperf-dcnv2", 26, 97.4, 16_044_544),
    ],
)  # fmt: skip
def test_facts(name: str, tables: int, gib: float, macs: int) -> None:
    loads = s.tables(MODELS[name], 65536)
    assert len(loads) == tables
    elements = sum(load.table.rows * load.table.dim for load in loads)
    assert round(elements * 4 / GIB, 1) == gib
    # biases are not among the multiply-adds
    assert s.dense(MODELS[name]).flops == pytest.approx(6 * macs, rel=2e-3)


@pytest.mark.parametrize(
    ("rows", "ids", "alpha"),
    [(5000, 4000, 1.05), (300_000, 200_000, 1.05), (1000, 3000, 0.0), (200_000, 50_000, 1.2)],
)
def test_distinct_ids(rows: int, ids: int, alpha: float) -> None:
    draw = np.random.default_rng(0).random((20, ids))
    g = 1 - alpha
    drawn = np.floor((draw * ((rows + 1) ** g - 1) + 1) ** (1 / g)) - 1
    if alpha == 0:
        drawn = np.floor(draw * rows)
    seen = np.mean([len(np.unique(row)) for row in drawn])
    assert s.distinct(rows, ids, alpha) == pytest.approx(seen, rel=0.01)


def test_beside_published_figures() -> None:
    rows = [s.simulate("tiny", named(f"dgx-a100x{n}")) for n in (1, 16)]
    text = s.text(rows)
    assert "modelled, not measured" in text and "readme 24.433" in text
    for row, ms in zip(rows, (24.433, 4.867), strict=True):
        data = row.to_dict()
        assert data["modelled"] and data["published_ms"]["readme"] == ms
        assert data["ratio"]["readme"] == pytest.approx(ms / data["step_ms"])
        assert data["ratio_for_them"]["readme"] == pytest.approx(1, abs=0.05)  # fitted on it
        assert data["device_bytes"] <= 80 * GIB
    assert rows[0].wire == 0 < rows[1].wire
    # the sort-based floor of one A100 at the peak of its memory is 1.24 ms
    assert 1.24 < rows[0].to_dict()["step_ms"] < 17.6


def test_within_100_columns() -> None:
    """However large the numbers; published figures have a table of their own."""
    rows = [s.simulate("tiny", named("dgx-a100x16")), s.simulate("tiny", named("dgx-a100x32"))]
    text = s.text(rows)
    first, second, notes = text.split("\n\n")
    assert len(first.splitlines()) == 3 and len(second.splitlines()) == 2
    assert second.splitlines()[1].startswith("tiny   16     readme 4.867, blog 3.2")
    assert s.ASSUMPTIONS[1] in notes.replace("\n  ", " ")
    assert "published ms" not in s.text(rows[1:])
    loads = rows[0].plan.loads
    for device, host, problem, words in (
        (44834, 0, "no plan fits\n  why  " + "word " * 60, "44834.0: does not fit"),
        (1430, 8580, "", "1430.0 + 8580 host"),
    ):
        filled = [replace(x, device_bytes=device * GIB, host_bytes=host * GIB) for x in loads]
        wide = replace(
            rows[0], model="mlperf-dcnv2", problem=problem,
            published=(("readme", 124.333), ("blog", 102.333)),
            plan=replace(rows[0].plan, loads=tuple(filled)),
        )  # fmt: skip
        text = s.text([wide, *rows])
        assert words in text and max(map(len, text.splitlines())) <= 100
        assert ("\n       word" in text) == bool(problem)


def test_published_steps_are_those_of_their_implementation() -> None:
    """Rates fitted on Tiny and Small; the steps of the larger models are predictions."""
    off: dict[bool, list[float]] = {True: [], False: []}
    for name, model in MODELS.items():
        for source, steps in model.published.items():
            for ranks, ms in steps.items():
                setting = Setting(named(f"dgx-a100x{ranks}"), s.BATCH // ranks)
                release = published.RELEASES[source]
                modelled = published.step(model, s.dense(model), setting, release, s.distinct)
                off[name in FITTED].append(ms / modelled)
    assert [len(off[k]) for k in (True, False)] == [14, 14]
    assert all(0.8 < ratio < 1.25 for ratio in off[True] + off[False])
    assert np.exp(np.log(off[False]).mean()) == pytest.approx(1, abs=0.1)


def test_their_tables_are_all_dealt() -> None:
    for name, ranks in (("small", 32), ("jumbo", 128)):
        model = MODELS[name]
        held = [table for rank in published.dealt(model, ranks) for table in rank]
        assert sum(rows * dim for rows, dim, _ in held) == sum(
            n * rows * dim for n, rows, dim, _ in model.groups
        )
        assert all(published.dealt(model, ranks)), "each rank has some"


def test_what_does_not_fit_is_said_and_modelled() -> None:
    """The memory it would need, and how long a step would take if it fitted."""
    row = s.simulate("colossal", named("dgx-a100"))
    data = row.to_dict()
    assert data["fits"] is False and "no plan fits" in data["problem"]
    weights, state = 22327.4, 22327.4  # GiB
    tables = data["device_bytes"] - 8 * GIB  # a tenth of a device is kept for other work
    assert 1 < tables * 8 / GIB / (weights + state) < 1.02
    assert data["step_ms"] > data["bound_ms"] * 0.999 and data["wire_bytes"] > 0
    told = " ".join(s.text([row]).split())
    assert ": does not fit" in told and "8 ranks of 80.0 GiB" in told


def test_wrong_questions() -> None:
    with pytest.raises(UsageError, match="no model 'jumb'") as caught:
        s.simulate("jumb", named("cpu"))
    assert caught.value.tries == ("jumbo",)
    with pytest.raises(UsageError, match="no model 'huge'"):
        s.simulate("huge", named("cpu"))
    with pytest.raises(UsageError, match="a batch of 4"):
        s.simulate("tiny", named("dgx-a100"), 4)
