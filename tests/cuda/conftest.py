"""What the tests of host code for a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import emulated_gpu
import pytest


@pytest.fixture
def emulated() -> Iterator[emulated_gpu.Emulated]:
    """The kernels of a GPU on the emulator, and what was launched there."""
    with emulated_gpu.serve() as served:
        yield served
