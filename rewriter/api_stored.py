"""Which tables a model of several forms of call may store in fewer bits: those that no form reads
as a whole. All forms look up the same tables, so one that is stored is stored for all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from recast import passes as library
from recast.errors import VerifyError
from recast.passes.precision import QuantiseForms, read_whole
from recast.rewriter.capture.capture_model import Captured

from . import pipeline
from .ir import Graph
from .pipeline import Context, Pass


def agreed(captured: Captured, passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """``passes``, where those that store tables leave the ones that some form reads as a whole."""
    stores = [k for k, p in enumerate(passes) if isinstance(p, library.QuantiseTables)]
    if not captured.forms or not stores:
        return tuple(passes)
    first = passes[: stores[0]]
    forms = [_rewritten(one, first) for one in (captured, *captured.forms)]
    try:
        whole = read_whole(forms, captured.root)
    except VerifyError:  # a pass is defective, which linking tells, and goes on without it
        return tuple(passes)
    return tuple(
        QuantiseForms(p.precision, whole) if isinstance(p, library.QuantiseTables) else p
        for p in passes
    )


def _rewritten(captured: Captured, passes: Sequence[Pass]) -> Iterable[Graph]:
    """The graphs of one form as the pass that stores tables will see them: a read that is rewritten
    into a lookup is none of the whole table.
    """
    for graph in captured.graphs.values():
        trial = copy.deepcopy(graph)
        pipeline.run(trial, passes, Context(captured.root, batches=captured.batches,
                                            sizes=captured.sizes))  # fmt: skip
        yield trial
