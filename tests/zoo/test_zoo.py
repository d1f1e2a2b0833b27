"""Every model of the zoo stays the same function, with all of its lookups fused: ``make zoo``.

Without the libraries, which no other test needs, the models are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import zoo_models
from zoo_data import Subject
from zoo_judge import judge

MODELS, MISSING = zoo_models.collect()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("subject", MODELS, ids=lambda subject: subject.name)
def test_a_model(subject: Subject) -> None:
    verdict = judge(subject)
    assert verdict.right, verdict.why
    assert verdict.captured == "whole", verdict
    assert verdict.all_fused, verdict


@pytest.mark.skipif(len(MISSING) == len(zoo_models.LIBRARIES), reason="make zoo installs them")
def test_no_model_is_left_out() -> None:
    assert not MISSING
    assert len({subject.name for subject in MODELS}) == zoo_models.EXPECTED


def test_nothing_of_them_is_a_requirement_of_the_package() -> None:
    """The libraries stay outside: tests call them, the package does not know of them."""
    root = Path(__file__).parents[2]
    names = [
        line.strip() for line in (Path(__file__).parent / "libraries.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]  # fmt: skip
    assert len(names) == len(zoo_models.LIBRARIES)
    for file in ("pyproject.toml", "constraints.txt"):
        assert not any(name in (root / file).read_text() for name in names)
