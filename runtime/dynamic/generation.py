"""A mark of two numbers after the rows of a slab, which detects rows that belong to other ids.

A slab is an ordinary Parameter, so code that averages models, or restores weights that it has kept,
writes to all of it, row by row; and by then a row may belong to another id. So the last two rows
hold a fixed number and one that changes with each generation of rows, that is whenever new ids
arrive. After a write from another generation, or a mixture, the first is as before but the ratio of
both is not. Elementwise or row-wise operations, such as weight decay or normalisation, change the
first too, or keep the ratio: they are allowed, unless some rows are on disk, which they miss.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from recast.errors import UsageError

ROWS = 2  # the last ones of a slab
_FIXED = 2.0**-10  # the first number
_SAME = 1 / 64  # relative tolerance for it: the rounding of averages, even in bf16
_RATIOS = 64  # how many there are, from 1 to 2; all exact, even in bf16
_generations = itertools.count(1)


def write_mark(slab: Tensor) -> float:
    """Mark ``slab`` as of a new generation; returns its ratio, for :func:`is_unchanged`."""
    ratio = 1 + next(_generations) % _RATIOS / _RATIOS
    slab[-ROWS:, 0] = torch.tensor([_FIXED, _FIXED * ratio], dtype=slab.dtype)
    return ratio


def is_unchanged(slab: Tensor, ratio: float) -> bool:
    """Whether the rows of ``slab`` are of the model and generation marked with ``ratio``."""
    first, second = slab[-ROWS:, 0].tolist()
    if not abs(first / _FIXED - 1) <= _SAME:
        return True  # changed by an elementwise operation, perhaps to NaN
    tolerance = min(64 * torch.finfo(slab.dtype).eps, 0.25 / _RATIOS)
    return abs(second / first - ratio) <= tolerance


def is_untouched(slab: Tensor, ratio: float) -> bool:
    """Whether nothing at all was written to the marked rows of ``slab``."""
    return slab[-ROWS:, 0].tolist() == [_FIXED, _FIXED * ratio]


def below_error(name: str, rows: int) -> UsageError:
    """The error for a write to the rows in memory of a table that has more of them."""
    return UsageError(
        f"{name}: its weight was written to as a whole, and {rows} of its rows are on disk",
        why="what is done to all rows, as a decay by hand, reaches those in memory alone",
        tries=("the optimizer's own weight decay",
               "recast.dynamic.export, the same to its rows, and recast.dynamic.import_"),
    )  # fmt: skip


def changed_error(name: str) -> UsageError:
    """The error to raise if :func:`is_unchanged` is False."""
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
