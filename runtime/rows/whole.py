"""Tables that are stepped whole, without a dense gradient: every row at every step.

So are all tables under a weight decay that is part of the gradient, as it moves every row, and all
whose moments do not fade by powers of the same betas, or for too long. And so are small ones whose
rows move by their moments: to keep how old those are, row by row, takes longer than to step them
all. Their moments are always those of the last step, as torch leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recast.runtime.rows.fading import Fading, steps_to_rest
from recast.runtime.rows.rules import Group, State

# The size of a small table. Under Adam, with 32 ids a step, 10,000 x 8 take 7 to 11 ns a row, and
# with ages 18 to 35; 10,000 x 16 take 11 to 34, and 18 to 36; 10,000 x 32: 38 to 60, and 32 to 54.
SMALL = 1 << 21
_ALL = 2**62


class Whole:
    """How such a table takes its next step. In an ``Update`` it is in the place of ``Ages``.

    Attributes:
        moments: (rows, D) each, as in the optimizer's state.
        betas: what they are multiplied by in a step without gradient.
        done: the steps that the table has done.
    """

    last = None  # there is no such step of single rows

    def __init__(
        self, betas: tuple[float, ...], moments: Mapping[str, Tensor], done: float
    ) -> None:
        self.moments, self.betas, self.done = tuple(moments.values()), betas, done
        # What no step has been done with is not the optimizer's yet: it may fail.
        self._new = {} if done > 0 else dict(moments)

    def begin_step(self, weight: Tensor, lr: float) -> None:
        pass

    def end_step(self, weight: Tensor, state: State) -> None:
        state.update(self._new)

    def settle(self) -> None:
        pass


def size(weight: Tensor) -> int:
    """How large a table (rows, D) is: to step it whole gains less if its rows are wide."""
    return weight.numel() * max(weight.shape[1], 16)


def limit(rule: Fading, group: Group, steady: bool) -> int:
    """Up to which size tables of ``group`` are stepped whole. ``steady``: its betas are the
    last step's.
    """
    if float(group["weight_decay"]) != 0 and not group.get("decoupled_weight_decay"):
        return _ALL
    shrinks = rule.shrinks(*rule.betas(group))
    if not steady or steps_to_rest(shrinks) is None:
        return _ALL
    return SMALL if shrinks > 0.0 else 0  # rows at rest for good, as RMSprop's, are not looked at


def takes(moment: Any, weight: Tensor) -> bool:
    """Whether ``moment`` lies in memory as ``weight`` does."""
    return (
        type(moment) is Tensor
        and moment.shape == weight.shape
        and moment.is_cpu
        and moment.dtype is torch.float32
        and moment.layout is torch.strided
        and moment.is_contiguous()
    )
