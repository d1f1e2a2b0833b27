"""Kernel tests again at small sizes, watched by the sanitizers: no overrun and no race."""

from __future__ import annotations

from pathlib import Path

import pytest
import simt_build

HERE = Path(__file__).parent
LOOKUPS = "test_embedding_kernels.py::test_results_do_not_depend_on_the_order_of_blocks[fp32]"
DOT = "test_dot_kernels.py::test_forward_and_backward[any-same]"
WATCHED = {
    "address": (
        LOOKUPS,
        DOT,
        "test_embedding_kernels.py::test_offsets_outside_the_ids_are_cut_counted_and_found",
        "test_row_kernels.py::test_rows_of_many_runs[7]",
        "test_row_kernels.py::test_offsets_outside_the_ids_are_counted_and_no_wild_read",
        "test_dot_kernels.py::test_forward_and_backward[tensor lower-same]",
    ),
    # Row-wise: its lanes share a state, and its hot rows meet in row_combine too.
    "thread": (LOOKUPS, DOT, "test_row_kernels.py::test_a_step[row-wise]"),
}


@pytest.mark.parametrize("sanitizer", simt_build.SANITIZERS)
def test_nothing_is_reported(sanitizer: str) -> None:
    run = simt_build.rerun(sanitizer, *(f"{HERE}/{test}" for test in WATCHED[sanitizer]))
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout and "skipped" not in run.stdout
