"""Ranks come from ``tests/ranks/harness.py``; kernels are built before ranks wait for others."""

import sys
from pathlib import Path

import pytest

from recast.runtime import device

sys.path.append(str(Path(__file__).parent.parent / "ranks"))


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    device.extension()
