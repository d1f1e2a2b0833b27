"""Every test here runs with the C++ kernel and without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recast.runtime import device
from recast.runtime.row_grad import reset_counters


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    reset_counters()
    if request.param == "torch":
        with device.use("torch"):
            yield "torch"
        return
    if device.extension() is None:
        pytest.skip(f"no kernels: {device.why_missing()}")
    yield "kernel"
