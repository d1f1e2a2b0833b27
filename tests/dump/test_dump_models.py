"""The dump and the picture of every test model, as captured and rewritten."""

from __future__ import annotations

import grammar
import models
import pytest

from recast import passes
from recast.rewriter import pipeline
from recast.rewriter.capture.capture_model import capture
from recast.rewriter.pipeline import Context
from recast.rewriter.report import draw, dump
from recast.rewriter.report.dump import inlined


@pytest.mark.parametrize("name", sorted(models.CASES))
def test_every_line_fits_the_grammar(name: str) -> None:
    model, batches, _ = models.build(name)
    captured = capture(model, batches)
    for graph in captured.graphs.values():
        for rewritten in (False, True):
            if rewritten:
                context = Context(captured.root, batches=captured.batches, sizes=captured.sizes)
                pipeline.run(graph, passes.PIPELINE, context)
            for fold in (False, True):
                grammar.check(dump.text(graph, captured.root, captured.name, fold=fold))
            text = dump.text(graph, captured.root, fold=False)
            shown = [
                n for n in graph.nodes if not inlined(n) and n.op not in ("placeholder", "output")
            ]
            assert len([x for x in text.splitlines() if " = " in x]) == len(shown)
            drawn = draw.boxes(graph, captured.root)
            assert len({box.name for box in drawn}) == len(drawn) <= len(graph.nodes)
            known = {box.name for box in drawn}
            assert all(source in known for box in drawn for source in box.inputs)
