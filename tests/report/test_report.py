"""The report: what it says, in which order, and that programs read the same."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

import recast
from recast.rewriter.report.journal import Fired, Journal, Missed, Raised, Step
from recast.rewriter.report.report import Report, origin_text
from recast.runtime import device


def report() -> Report:
    journal = Journal(lookups_found=27, lookups_fused=26)
    bags = tuple(f"embs.{k}" for k in range(26))
    journal.fired += [
        Fired("group-embeddings", "bags", bags, "dlrm.py:41", "26 lookups in one call", "25 calls"),
        Fired("fuse-mlp", "mlp", ("bot.0", "bot.1"), "dlrm.py:40", "2 layers in one call", "x"),
        Fired("fuse-mlp", "mlp_1", ("top.0", "top.1"), "dlrm.py:40", "2 layers in one call", "x"),
        Fired("normalize", "relu", ("bot.1",), "dlrm.py:40", "nn.ReLU => relu"),
        Fired("normalize", "sigmoid", ("top.1",), "dlrm.py:43", "nn.Sigmoid => sigmoid"),
    ]
    for k in range(4):
        journal.miss(
            Missed("fuse-mlp", f"head_{k}", "its value is also used by <add>", f"m.py:{k}")
        )
    journal.miss(
        Missed("group-embeddings", "wide", "max_norm writes", "m.py:9", ("drop max_norm", "--leaf"))
    )
    journal.raised.append(Raised("fuse-dot", "bmm", "KeyError: 'li'", "dlrm.py:44"))
    journal.steps += [Step("normalize", 0, 0.25), Step("fuse-mlp", 2, 0.001, True)]
    journal.notes.append("self.training is read at run time")
    return Report(
        "DLRM",
        "partial",
        why="Gate.forward branches on a tensor",
        where="gate.py:12",
        tries=("torch.where", "leaf"),
        journal=journal,
        notes=["self.training is read at run time", "one constant was lifted"],
        seconds={"capture": 0.5, "passes": 0.26, "total": 0.8},
        graph_text="graph DLRM(x: f32[B])\n  return x\n",
        pictures={"before": "digraph { a -> b }", "after": "digraph { a }"},
    )


def test_text(golden: Callable[[str, str], None]) -> None:
    golden("report/full.txt", report().text())


def test_without_times_nothing_of_the_run_is_left() -> None:
    text = report().text(times=False)
    assert "0.8" not in text
    assert " s:" not in text
    other = report()
    other.seconds = {"capture": 9.0}
    assert other.text(times=False) == text


def test_times_are_told_by_pass_and_add_up() -> None:
    """A pass runs once for each mode; what the passes did not take, the checks did."""
    timed = Report("M", "whole", seconds={"capture": 0.5, "passes": 2.0, "total": 2.6})
    assert timed.text().endswith("optimize took 2.60 s: capture 0.50, passes 2.00")
    took = ("fuse-mlp", 0.1), ("normalize", 0.15), ("fuse-mlp", 0.1), ("clean-up", 0.05)
    timed.journal.steps += [Step(name, 0, seconds) for name, seconds in took]
    told = "capture 0.50, passes 0.40 (fuse-mlp 0.20, normalize 0.15), checks 1.60"
    assert timed.text().endswith(f"optimize took 2.60 s: {told}")


def test_a_long_name_keeps_the_columns() -> None:
    """It has a line of its own, and the row stands below it as the others do."""
    names = ("fuse-mlp", "a-rule-of-23-letters-xx", "a-rule-of-24-letters-xxx")
    journal = Journal(fired=[Fired(n, "x", (), "m.py:1", f"what {n}") for n in names])
    lines = Report("M", "whole", journal=journal).text().splitlines()
    assert [line.find("fired 1") for line in lines if "fired" in line] == [26, 26, 26]
    assert "  a-rule-of-24-letters-xxx" in lines
    assert len({line.find("m.py:1") for line in lines if "m.py:1" in line}) == 1


def test_str_is_the_text() -> None:
    assert str(report()) == report().text()


@pytest.mark.parametrize("captured", ["whole", "partial", "none"])
def test_headline(captured: str) -> None:
    head = Report("M", captured).text().splitlines()[0]
    assert head.startswith("M: ")
    assert {"whole": "whole", "partial": "in part", "none": "not captured"}[captured] in head


def test_nothing_to_do_is_said() -> None:
    assert "nothing to rewrite" in str(Report("M", "whole"))
    assert "nothing to rewrite" not in str(report())


def test_every_entry_is_told() -> None:
    """No rewrite, miss, exception or note is dropped from the text."""
    text = str(report())
    for told in ("26 lookups in one call", "fired 2", "missed 4", "head_2 and 1 more",
                 "try: drop max_norm   |   --leaf", "KeyError", "m.py:9", "gate.py:12",
                 "one constant was lifted"):  # fmt: skip
        assert told in text
    assert text.count("self.training is read") == 1


@pytest.mark.parametrize(
    ("origins", "text"),
    [
        ([["bot.0", "bot.1"]], "bot.0 bot.1"),
        ([["e.0.linears.0", "e.0.activations.0", "e.0.linears.1", "e.0.activations.1"],
          ["e.1.linears.0", "e.1.activations.0"]], "e.0 e.1"),
        ([["first_tower_of_the_model.0"], ["the_second_and_last_tower_of_the_model.0"]],
         "first_tower_of_the_model.0 …"),
        ([["", "a"]], "self a"),
        ([[]], ""),
    ],
)  # fmt: skip
def test_origins(origins: list[list[str]], text: str) -> None:
    assert origin_text(origins) == text


def test_dict() -> None:
    found = json.loads(report().to_json())
    assert found["captured"] == "partial"
    assert found["lookups"] == {"found": 27, "fused": 26}
    assert found["fired"] == {"group-embeddings": 1, "fuse-mlp": 2, "normalize": 2}
    assert len(found["missed"]) == 5
    assert found["missed"][-1] == {
        "rule": "group-embeddings", "node": "wide", "why": "max_norm writes", "where": "m.py:9",
        "tries": ["drop max_norm", "--leaf"],
    }  # fmt: skip
    assert found["raised"][0]["error"] == "KeyError: 'li'"
    assert found["rewrites"][1]["origin"] == ["bot.0", "bot.1"]
    assert found["seconds"]["total"] == 0.8


def test_a_note_that_a_miss_tells_is_told_once() -> None:
    journal = Journal()
    journal.miss(Missed("capture", "cell", "it draws random numbers", "m.py:3"))
    notes = ["cell runs as it is: it draws random numbers", "another"]
    told = Report("M", "whole", journal=journal, notes=notes)
    assert told.told_notes() == ["another"]
    assert told.text().count("it draws random numbers") == 1
    assert told.to_dict()["notes"] == notes


def test_missing_kernels_are_told() -> None:
    """A slow model that runs in plain torch must not look like a fast one."""
    model, ids = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 1)), torch.ones(6, 2).long()
    assert "kernels are not in use" not in str(recast.explain(model, example=ids))
    with device.use("torch"):
        assert "kernels are not in use: switched off" in str(recast.explain(model, example=ids))


@pytest.mark.parametrize("passes", [3, [3], [recast.Plan], ["normalize"]])
def test_what_is_no_pass_is_refused(passes: object) -> None:
    with pytest.raises(recast.UsageError, match="is no pass"):
        recast.optimize(nn.Linear(3, 1), passes=passes)  # type: ignore[arg-type]


def test_rewrites_that_save_nothing_keep_their_modules_where_they_read_alike() -> None:
    journal = Journal()
    journal.fired += [
        Fired("group-embeddings", f"bags_{k}", (f"embs.{k}",), "m.py:4", "1 lookup in one call")
        for k in range(3)
    ]
    text = Report("M", "partial", journal=journal).text()
    assert "fired 3    1 lookup in one call ← embs.{0..2}" in text and "m.py:4" in text
    assert "saves" not in text
