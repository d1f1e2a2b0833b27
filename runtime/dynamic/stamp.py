"""A stamp of two numbers after the rows of a slab, which detects rows that belong to other ids.

A slab is an ordinary Parameter, so code that averages models, or restores weights that it has kept,
writes to all of it, row by row; and by then a row may belong to another id. The second number
changes whenever new ids arrive, the first is always the same. After a write from another time, or a
mixture, the first is still the same but the second is not. Elementwise or row-wise operations, such
as weight decay or normalisation, change the first too, or keep the ratio of both: they are allowed.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from recast.errors import UsageError

ROWS = 2  # the last ones of a slab
_FIRST = 2.0**-10
_NEAR = 1 / 64  # relative tolerance: the rounding of averages, even in bf16
_STEPS = 64  # how many different second numbers there are; all exact, even in bf16
_times = itertools.count(1)


def write(slab: Tensor) -> float:
    """Write a new stamp to ``slab``; returns its ratio, for :func:`holds`."""
    ratio = 1 + next(_times) % _STEPS / _STEPS
    slab[-2:, 0] = torch.tensor([_FIRST, _FIRST * ratio], dtype=slab.dtype)
    return ratio


def holds(slab: Tensor, ratio: float) -> bool:
    """Whether the rows of ``slab`` are from the time and model of the stamp with ``ratio``."""
    first, second = slab[-2:, 0].tolist()
    tolerance = min(64 * torch.finfo(slab.dtype).eps, 0.25 / _STEPS)
    stamped = abs(first / _FIRST - 1) <= _NEAR
    return not stamped or abs(second / first - ratio) <= tolerance


def refusal(name: str) -> UsageError:
    """The error to raise if :func:`holds` is False."""
    return UsageError(
        f"{name}: its weight was written to as a whole, as by an average of models",
        why="the rows of a dynamic table lie in the order in which ids came: those of another"
        " model, or of another time, are of other ids",
        tries=(
            "an average, or weights kept aside, of the other parameters only",
            "recast.dynamic.export of both, their average by id, and recast.dynamic.import_",
            "copy.deepcopy(model), whose ids go with it",
        ),
    )
