"""Optimizer updates on the touched rows of tables, with torch's own formulas.

A row without gradient has g = 0, which leaves it and its state as they are:

    SGD        w ← w - lr·g
    Adagrad    s ← s + g²,  w ← w - lr·g / (√s + eps)        (lr already decayed)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recast.runtime import row_kernel
from recast.runtime.row_grad import RowGrad


class Update(NamedTuple):
    """One table's share of a step.

    weight: the table (rows, D).
    grad: its gradient, still rows.
    state: Adagrad's running sum of squares, shaped like ``weight``; None for SGD.
    lr: step size, negative to maximise.
    eps: added to the root.
    factor: of the gradient (the inverse of a loss scale).
    """

    weight: Tensor
    grad: RowGrad
    state: Tensor | None
    lr: float
    eps: float = 0.0
    factor: float = 1.0


@torch.no_grad()
def apply(updates: Sequence[Update]) -> None:
    """Update all tables, those the kernel can take in one call."""
    for update in updates:
        for piece in update.grad.cell.pieces:
            piece.check()
    for update in row_kernel.update(updates):
        _in_torch(update)


def _in_torch(update: Update) -> None:
    weight, state = update.weight, update.state
    ids, rows = update.grad.scaled()
    if ids.numel() == 0:
        return
    if update.factor != 1.0:
        rows = rows * update.factor
    if state is None:
        weight.index_add_(0, ids, rows, alpha=-update.lr)
        return
    total = state[ids].addcmul_(rows, rows)
    state[ids] = total
    weight[ids] = weight[ids].addcdiv_(rows, total.sqrt().add_(update.eps), value=-update.lr)
