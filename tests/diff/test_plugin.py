"""The pytest fixture of the package."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import build

from recast.errors import DiffError
from recast.rewriter.pytest_plugin import assert_equivalent  # noqa: F401  (a fixture)


def test_a_model_and_its_optimised_twin(assert_equivalent: Callable[..., Any]) -> None:  # noqa: F811
    model, batches, loss = build("deepfm")
    report = assert_equivalent(model, batches, loss=loss, steps=2)
    assert report.ok and report.steps == 2


def test_a_single_batch_and_a_pipeline(assert_equivalent: Callable[..., Any]) -> None:  # noqa: F811
    model, batches, _ = build("pnn")
    assert_equivalent(model, batches[0], passes="normalize,group-embeddings")


def test_another_model(assert_equivalent: Callable[..., Any]) -> None:  # noqa: F811
    model, batches, _ = build("dlrm")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("top_l.0.weight").mul_(1.01)
    with pytest.raises(DiffError, match="first to part is top_l"):
        assert_equivalent(model, batches, fast=other)
    with pytest.raises(AssertionError):
        assert_equivalent(model, batches, passes="default,sabotage-wrong-triangle")
