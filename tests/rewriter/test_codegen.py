"""The generated source is kept for tracebacks, and no longer than they need it."""

from __future__ import annotations

import gc
import linecache
import traceback

import torch
from torch import nn

import recast
from recast.rewriter.compiled.codegen import compile_graph


def test_source_is_kept_as_long_as_a_traceback_shows_it() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    fast = recast.optimize(net, example=torch.randn(5, 4))
    program = compile_graph(fast.graphs["both"], net, "test")
    file = program.file
    try:
        program.run(None, program.fetch())
    except AttributeError as error:
        kept = error
    del program
    gc.collect()
    (frame,) = [f for f in traceback.extract_tb(kept.__traceback__) if f.filename == file]
    assert frame.line is not None and frame.line.startswith("mlp = mlp_default")
    del kept, frame
    gc.collect()
    assert file not in linecache.cache
