"""The kernels of this folder, compiled for the emulator in the build that this process runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import simt_build

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def collectives() -> simt_build.Kernels:
    """The kernels of collectives.cu."""
    return simt_build.kernels(HERE / "collectives.cu")


@pytest.fixture(scope="session")
def faults() -> simt_build.Kernels:
    """The kernels of faults.cu."""
    return simt_build.kernels(HERE / "faults.cu")
