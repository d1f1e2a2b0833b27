"""What every pass makes of every small model, as a dump: ``pytest --regen`` writes them anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from models import CASES, build

from recast import passes
from recast.rewriter import pipeline
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.pipeline import Context
from recast.rewriter.report import dump

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", sorted(CASES))
def test_dump_after_each_pass(name: str, golden: Callable[[str, str], None]) -> None:
    model, batches, _ = build(name)
    captured = capture(model, batches)
    assert captured.graphs
    for mode, graph in captured.graphs.items():
        context = Context(captured.root, batches=captured.batches, sizes=captured.sizes)
        title = captured.name if mode == "both" else f"{captured.name} {mode}"
        folder = f"passes/{name}" if mode == "both" else f"passes/{name}.{mode}"
        names = ["0-capture.txt"]
        golden(f"{folder}/{names[0]}", dump.text(graph, captured.root, title))
        for k, one in enumerate(passes.PIPELINE, 1):
            pipeline.run(graph, [one], context)
            if context.journal.steps[-1].changed:
                names.append(f"{k}-{one.name}.txt")
                golden(f"{folder}/{names[-1]}", dump.text(graph, captured.root, title))
        left = {path.name for path in (GOLDEN / folder).iterdir()}.difference(names)
        assert not left, f"to be removed from {folder}: no pass writes them"
