"""The pytest fixture ``assert_equivalent``: a model and its optimised twin are the same function.

To be enabled in a ``conftest.py``; no other pytest run in the environment then imports torch::

    pytest_plugins = ["recast.rewriter.pytest_plugin"]

    def test_my_model(assert_equivalent):
        assert_equivalent(MyModel(), (dense, offsets, ids))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from recast.rewriter.diff.report import DiffReport

from . import api
from .api_diff import diff


@pytest.fixture
def assert_equivalent() -> Callable[..., DiffReport]:
    """``assert_equivalent(model, example, *, fast=None, passes=None, **diff_options)``.

    Optimises ``model`` (or takes ``fast``), compares both with ``recast.diff`` and returns the
    report. Raises DiffError, an AssertionError, that names the first node that parts.
    """
    return _assert_equivalent


def _assert_equivalent(
    model: nn.Module,
    example: Any,
    *,
    fast: nn.Module | None = None,
    passes: Any = None,
    **options: Any,
) -> DiffReport:
    if fast is None:
        fast = api.optimize(model, example=example, passes=passes)
    return diff(model, fast, example, **options).check()
