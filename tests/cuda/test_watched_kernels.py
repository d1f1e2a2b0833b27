"""Kernel tests again at small sizes, watched by the sanitizers: no overrun and no race."""

from __future__ import annotations

from pathlib import Path

import pytest
import simt_build

HERE = Path(__file__).parent
LOOKUPS = "test_embedding_kernels.py::test_results_do_not_depend_on_the_order_of_blocks[fp32]"
FM = "test_fm_cuda.py::test_forward_and_backward[6-dtype1-0-True]"
CROSS = "test_cross_cuda.py::test_forward_and_backward[7-33-8-2-True]"
SAMPLES = "test_embedding_samples.py::test_rows_are_added_one_by_one[torch.float32-(6, 2)]"
TAIL = "test_cross_cuda.py::test_layers_of_matrices[cross_matrix-gated]"
DENSE = "test_dense_cuda.py::test_the_numbers_of_torch[amsgrad]"
DOT = "test_dot_kernels.py::test_forward_and_backward[any-same]"
ATTENTION = "test_attention_cuda.py::test_forward_and_backward[5-7-dtype0-13-39-True]"
COLUMNS = "test_embedding_cat_cuda.py::test_other_tensors_of_any_kind[dtype0-1]"
BEYOND = "test_copies_cuda.py::test_the_first_beyond_of_each_stretch_is_known"
CHUNKS = "test_compressed_cuda.py::test_many_chunks[9-4-12-True]"
DICE = "test_gated_cuda.py::test_dice[300-7-1-dtype1-of_alpha1]"
GATHERED = "test_gathered_cuda.py::test_forward_and_backward[dtype0]"
GATES = "test_gated_cuda.py::test_gates_over_stacks_and_vectors[7-dtype1-True]"
PAIRS = "test_pair_cuda.py::test_forward_and_backward[dim-weighted-11]"
TILES = "test_dot_kernels.py::test_forward_and_backward[tensor lower-same]"
MASK = "test_mlp_kernels.py::test_activation[True-0.3-(4, 130)-bf16]"
MASKED = "test_mlp_kernels.py::test_gradient[(300, 20)-fp32-bf16 sums-output]"
ONE = "test_mlp_one_output.py::test_the_numbers[(300, 70)-bf16-fp32 sums-output]"
CAST = "test_mlp_casts.py::test_every_tensor_in_one_launch[fp32-bf16]"
EXPERTS = "test_scaled_tiles.py::test_rows_that_are_the_scale_too[dtype1]"
# In float32 gradients wait in shared memory.
WAITING = "test_scaled_tiles.py::test_rows_that_are_the_scale_too[dtype0]"
OUTER = "test_products_cuda.py::test_outer_products_in_tiles[70-7-3-8-dtype2]"
# Row-wise: its lanes share a state, and its hot rows meet in row_combine too.
WATCHED = {
    "address": (
        *(LOOKUPS, ATTENTION, CAST, DOT, MASKED),
        "test_embedding_kernels.py::test_offsets_outside_the_ids_are_cut_counted_and_found",
        "test_row_kernels.py::test_rows_of_many_tiles[64]",
        "test_id_table_cuda.py::test_against_dicts[epoch_lfu-3-12]",
    ),
    "thread": (
        *(LOOKUPS, DOT, GATES),
        "test_row_kernels.py::test_a_step[row-wise]",
        "test_id_table_cuda.py::test_who_gets_which_row_does_not_depend_on_the_schedule",
    ),
}

# The others, among the long tests: most take a build of their own.
LATER = {
    "address": (
        *(CHUNKS, COLUMNS, CROSS, DENSE, DICE, FM, GATES, GATHERED, MASK, ONE, PAIRS, SAMPLES),
        *(TILES, EXPERTS, OUTER, BEYOND),
        "test_copies_cuda.py::test_sources_that_lie_anywhere[1]",
        "test_embedding_training_cuda.py::test_gradient_of_sample_weights[20-fp32]",
        "test_row_kernels.py::test_offsets_outside_the_ids_are_counted_and_no_wild_read",
        "test_row_reads_cuda.py::test_unscaling_clipping_and_updating_share_one_sort",
        "test_id_table_cuda.py::test_first_values[dtype1-uniform]",
    ),
    "thread": (
        *(ATTENTION, CHUNKS, DICE, EXPERTS, FM, GATHERED, MASK, MASKED, ONE, OUTER, SAMPLES),
        *(TAIL, TILES, BEYOND, WAITING),
        "test_row_reads_cuda.py::test_norms[2.0-dtype0]",
    ),
}


@pytest.mark.parametrize(
    ("sanitizer", "tests"),
    [
        *(pytest.param(s, tests, id=s) for s, tests in WATCHED.items()),
        *(pytest.param(s, t, id=f"{s}-more", marks=pytest.mark.long) for s, t in LATER.items()),
    ],
)
def test_nothing_is_reported(sanitizer: str, tests: tuple[str, ...]) -> None:
    run = simt_build.rerun(sanitizer, *(f"{HERE}/{test}" for test in tests))
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout and "skipped" not in run.stdout
