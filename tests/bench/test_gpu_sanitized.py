"""What compute-sanitizer is shown on a GPU: the kernels of tensor cores, too, whose shared memory
is filled by copies that are under way meanwhile.
"""

from __future__ import annotations

import emulated_gpu
import torch
from gpu.check import external_tools, kernel_coverage

SOURCES = {
    "attention_tiles.cu", "cin_forward.cu", "cin_inputs.cu", "cin_weight.cu", "dot_warps.cu",
    "dot_warps_gathered.cu", "scaled_tiles.cu", "scaled_weight.cu",
}  # fmt: skip


def test_kernels_of_tensor_cores_are_shown_to_the_sanitizer() -> None:
    items = [
        item
        for item in external_tools.sanitized(torch.device("cpu"), False)
        if item.name.endswith((", bfloat16", ", TF32"))
    ]
    with emulated_gpu.serve() as emulated:
        for item in items:
            item.run()
    missed = kernel_coverage.never_launched(emulated.launched)
    assert not SOURCES & {line.partition(":")[0] for line in missed}, missed
    # In float32 a gradient waits in shared memory.
    assert "scaled_einsum, many columns, TF32" in [item.name for item in items]
