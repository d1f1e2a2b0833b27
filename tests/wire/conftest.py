"""Where the ranks of these tests come from, and what they draw from."""

from __future__ import annotations

import sys
from pathlib import Path

import generators
import pytest

from recast.runtime.ranks import dropout_global

sys.path.insert(0, str(Path(__file__).parent.parent / "ranks"))


@pytest.fixture(autouse=True)
def _one_generator_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share torch's generator, processes do not."""
    monkeypatch.setattr(dropout_global, "generator", generators.current)
