"""Every test here runs with the C++ kernel and without it; some on an emulated GPU as well."""

from __future__ import annotations

from collections.abc import Iterator

import emulated_gpu
import pytest

from recast.runtime import checked, device
from recast.runtime.rows.grad import reset_counters

# Optimizers have theirs in tests/cuda/test_row_cuda.py.
ON_A_GPU = {
    *("test_row_grad_use", "test_row_grad_writes", "test_row_grad_graphs"),
    *("test_row_memory", "test_row_ops", "test_row_pieces"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    if not any(mark.args[0] == "kernel" for mark in marks):
        assert metafunc.module is not None
        more = ["cuda"] if metafunc.module.__name__ in ON_A_GPU else []
        metafunc.parametrize("kernel", ["kernel", "torch", *more], indirect=True)


@pytest.fixture(autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    reset_counters()
    if request.param == "cuda":
        with emulated_gpu.serve(), checked.checked():
            yield "cuda"
        return
    if request.param == "torch":
        with device.use("torch"):
            yield "torch"
        return
    if device.extension() is None:
        pytest.skip(f"no kernels: {device.why_missing()}")
    yield "kernel"
