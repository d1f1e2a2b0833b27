"""The pytest fixture ``assert_equivalent``: a model and its optimised twin are the same function.

def test_my_model(assert_equivalent):
    assert_equivalent(MyModel(), (dense, offsets, ids))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn

    from .diff import DiffReport


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
    # Imported at the call: every pytest run of an environment that has the package loads this file.
    import recast

    if fast is None:
        fast = recast.optimize(model, example=example, passes=passes)
    return recast.diff(model, fast, example, **options).check()
