"""The memory of training does not grow with the rows of the tables; the benchmark would see it."""

from __future__ import annotations

import os

import pytest
import training_memory

ROW = 4 * 16  # bytes


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell"
)
def test_memory_does_not_grow_with_rows() -> None:
    sizes = ["--rows", "20000", "420000", "--dim", "16", "--tables", "4"]
    o = training_memory.options([*sizes, "--batch", "64", "--ids", "2"])
    eager, ours = (
        training_memory.growth(o.rows, training_memory.measure(o, ours), o.tables)
        for ours in (False, True)
    )
    assert eager > 0.9 * ROW, "a dense gradient is not seen"
    assert ours < training_memory.MOST
