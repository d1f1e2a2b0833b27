"""Kernel tests again at small sizes, watched by the sanitizers: no overrun and no race."""

from __future__ import annotations

from pathlib import Path

import pytest
import simt_build

HERE = Path(__file__).parent
LOOKUPS = "test_embedding_kernels.py::test_results_do_not_depend_on_the_order_of_blocks[fp32]"
FM = "test_fm_cuda.py::test_forward_and_backward[6-dtype1-0-True]"
CROSS = "test_cross_cuda.py::test_forward_and_backward[7-33-8-2-True]"
TAIL = "test_cross_cuda.py::test_layers_of_matrices[cross_matrix-gated]"
DOT = "test_dot_kernels.py::test_forward_and_backward[any-same]"
PAIRS = "test_pair_cuda.py::test_forward_and_backward[dim-weighted-11]"
TILES = "test_dot_kernels.py::test_forward_and_backward[tensor lower-same]"
MASK = "test_mlp_kernels.py::test_activation[True-0.3-(4, 130)-bf16]"
MASKED = "test_mlp_kernels.py::test_gradient[(300, 20)-fp32-bf16 sums]"
WATCHED = {
    "address": (
        LOOKUPS,
        CROSS,
        DOT,
        FM,
        PAIRS,
        TILES,
        MASK,
        MASKED,
        "test_embedding_kernels.py::test_offsets_outside_the_ids_are_cut_counted_and_found",
        "test_embedding_cuda.py::test_gradient_of_sample_weights[20-fp32]",
        "test_row_kernels.py::test_rows_of_many_runs[7]",
        "test_row_kernels.py::test_offsets_outside_the_ids_are_counted_and_no_wild_read",
        "test_row_cuda.py::test_unscaling_clipping_and_updating_share_one_sort",
    ),
    # Row-wise: its lanes share a state, and its hot rows meet in row_combine too.
    "thread": (
        *(LOOKUPS, TAIL, DOT, FM, TILES, MASK, MASKED),
        "test_row_kernels.py::test_a_step[row-wise]",
        "test_row_cuda.py::test_norms[2.0-dtype0]",
    ),
}


@pytest.mark.parametrize("sanitizer", simt_build.SANITIZERS)
def test_nothing_is_reported(sanitizer: str) -> None:
    run = simt_build.rerun(sanitizer, *(f"{HERE}/{test}" for test in WATCHED[sanitizer]))
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout and "skipped" not in run.stdout
