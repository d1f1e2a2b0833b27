"""Whether the rows of a slab are of the ids that the table gives them: two numbers behind them.

A slab is an ordinary Parameter, so whoever averages models, or puts weights that he kept back in
their place, does it to the whole of it: row by row, and a row may be another id's by then. The two
numbers are of the time at which ids last came. The first is always the same, so in such a write, of
another time or a mixture, it still is, beside another second one. What is computed of each number
or row alone, as a penalty or a norm, moves the first too, or keeps their ratio.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from recast.errors import UsageError

ROWS = 2  # of a slab, the last ones
_FIRST = 2.0**-10
_NEAR = 1 / 64  # of it: what averages round, also in bf16
_STEPS = 64  # times are told apart by as many numbers: all of them exact, also in bf16
_times = itertools.count(1)


def write(slab: Tensor) -> float:
    """Say in ``slab`` that ids have come now; what :func:`holds` looks for."""
    ratio = 1 + next(_times) % _STEPS / _STEPS
    slab[-2:, 0] = torch.tensor([_FIRST, _FIRST * ratio], dtype=slab.dtype)
    return ratio


def holds(slab: Tensor, ratio: float) -> bool:
    """Whether the rows of ``slab`` are of the time and model that ``ratio`` is of."""
    first, second = slab[-2:, 0].tolist()
    tolerance = min(64 * torch.finfo(slab.dtype).eps, 0.25 / _STEPS)
    stamped = abs(first / _FIRST - 1) <= _NEAR
    return not stamped or abs(second / first - ratio) <= tolerance


def refusal(name: str) -> UsageError:
    """What is raised where it does not hold."""
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
