"""The reference models of ``examples/models``: captured whole, diffed, with the published sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

import recast
from recast.rewriter.cli import spec
from recast.rewriter.cli.spec import Subject

FOLDER = Path(__file__).parents[2] / "examples" / "models"
MODELS = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem != "criteo")


def load(name: str, *arguments: str) -> Subject:
    return spec.load(f"{FOLDER / name}.py:model", arguments)


def test_none_is_missing() -> None:
    assert MODELS == ["dcn", "dcn_v2", "deepfm", "mlperf_dlrm", "mmoe", "pnn", "xdeepfm"]


@pytest.mark.parametrize("name", MODELS)
def test_captured_whole_and_equal(name: str) -> None:
    subject = load(name, "batch=12")
    fast = recast.optimize(subject.model, example=subject.example)
    assert fast.report.captured == "whole", fast.report.why
    assert fast.report.journal.lookups_fused == fast.report.journal.lookups_found > 0
    recast.diff(subject.model, fast, subject.example, steps=2, loss=subject.loss).check()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mlperf_dlrm", 24_034_227_072 + 171_392 + 2_197_505),
        # Tables, bottom, cross network, top as MLPerf counts them; its rows are those of DLRM here.
        ("dcn_v2", 24_034_227_072 + 171_392 + 10_627_200 + 5_245_953),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    subject = load(name, "full=True")
    assert all(p.is_meta for p in subject.model.parameters())
    assert sum(p.numel() for p in subject.model.parameters()) == parameters


def test_rows_of_criteo_x4() -> None:
    load("pnn")  # puts the folder on the path, as every spec does
    import criteo

    assert (len(criteo.X4), sum(criteo.X4)) == (39, 34_290_906)
