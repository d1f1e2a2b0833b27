"""Optimizer updates on the looked-up rows of tables, with torch's own formulas.

With g the gradient of a row, times ``factor``, divided by ``grad_scale`` if it is given:

    sgd                w ← w - lr·g
    adagrad            s ← s + g²,  w ← w - lr·g / (√s + eps)
    row_wise_adagrad   s ← s + mean of g² over the row,  w ← w - lr·g / (√s + eps)
    adam               m ← m + (1 - β₁)·(g - m),  v ← v + (1 - β₂)·(g² - v),
                       w ← w - lr·m / (√v + eps)
    momentum           b ← momentum·b + (1 - β₁)·g,
                       w ← w - lr·b, or w ← w - lr·(g + ahead·b) if ahead is not 0
    rmsprop            v ← alpha·v + (1 - β₁)·g²,  w ← w - lr·g / (√v + eps)
      with momentum    b ← momentum·b + g / (√v + eps),  w ← w - lr·b

adam first does w ← w - decay·w (decoupled); the last three first do g ← g + l2·w. That is on
looked-up rows only; with ``ages``, which momentum and rmsprop always have, other rows move too, as
``fading`` says. These are ``torch.optim.SGD``, ``Adagrad``, ``recast.optim.RowWiseAdagrad``,
``torch.optim.SparseAdam`` (``torch/optim/_functional.py``) and RMSprop in their own order of
operations; learning rate decay and Adam's bias correction are part of lr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from recast.errors import CheckpointError
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows import kernel as row_kernel
from recast.runtime.rows.grad import RowGrad
from recast.runtime.rows.pieces import merge

if TYPE_CHECKING:
    from recast.runtime.rows.ages import Ages
    from recast.runtime.rows.whole import Whole

Action = Literal["sgd", "adagrad", "row_wise_adagrad", "adam", "momentum", "rmsprop"]


class Update(NamedTuple):
    """One table's share of a step.

    action: the formula.
    weight: the table (rows, D).
    grad: its gradient, still held as rows.
    states: () for sgd; (sum,), shaped like ``weight`` for adagrad and (rows,) for row-wise;
        (exp_avg, exp_avg_sq) for adam, (momentum_buffer,) for momentum, (square_avg,) and perhaps
        momentum_buffer for rmsprop, all shaped like ``weight``.
    lr: step size.
    eps: added to the root.
    betas: adam's; the first is the dampening of momentum, and rmsprop's alpha.
    decay: the fraction that is subtracted from looked-up rows (adam).
    l2: the fraction of the weight that is added to the gradient.
    ahead: what Nesterov's look ahead multiplies momentum by.
    factor: multiplies the gradient; a number on the host; negative to maximise.
    grad_scale, found_inf: (1,) each on the table's device, as GradScaler sets them: the gradient is
        divided by the first, and nothing changes if the second is not 0.
    seed: that of this table in this step, for stochastic rounding of a table in fp16 or bf16; None:
        round to nearest.
    ages: or ``Whole``, of what steps all rows, for an fp32 table on the CPU; ``states`` are then
        its moments.
    """

    action: Action
    weight: Tensor
    grad: RowGrad
    states: tuple[Tensor, ...]
    lr: float
    eps: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    decay: float = 0.0
    l2: float = 0.0
    ahead: float = 0.0
    factor: float = 1.0
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    seed: int | None = None
    ages: Ages | Whole | None = None


@torch.no_grad()
def apply(updates: Sequence[Update]) -> None:
    """Update all tables; those that a kernel takes, in one call."""
    for update in updates:
        for piece in update.grad.cell.pieces:
            piece.check()
    for update in row_kernel.update(row_cuda.update(updates)):
        _check_states(update)
        _in_torch(update)


def _check_states(update: Update) -> None:
    """Raise CheckpointError for state of another shape, which no kernel takes either."""
    of_rows = update.action == "row_wise_adagrad"
    wanted = update.weight.shape[:1] if of_rows else update.weight.shape
    for state in update.states:
        if state.shape != wanted:
            raise CheckpointError(
                f"the optimizer's state for a table of {tuple(update.weight.shape)} is"
                f" {tuple(state.shape)}",
                why="the state of another table was loaded, or the weight was replaced by one of"
                " another size after the optimizer had begun",
                tries=("a new optimizer", "optimizer.state.pop(parameter), which begins anew"),
            )


def _in_torch(update: Update) -> None:
    if update.ages is not None:
        return _all_rows(update, update.ages)
    ids, gradient = _widely(update.grad)
    if ids.numel() == 0:
        return
    if update.factor != 1.0:
        gradient = gradient * update.factor
    if update.grad_scale is not None:
        gradient = gradient / update.grad_scale
    tables = (update.weight, *update.states)
    old = [table[ids].to(gradient.dtype) for table in tables]
    new = _FORMULAS[update.action](update, gradient, *old)
    for table, before, after in zip(tables, old, new, strict=True):
        if update.found_inf is not None:  # drop what infinite gradients have led to
            after = torch.where(update.found_inf != 0, before, after)
        if table is update.weight and update.seed is not None:
            after = at_random(after, table.dtype, update.seed)
        table[ids] = after.to(table.dtype)


def _all_rows(update: Update, ages: Ages | Whole) -> None:
    """A step on all rows, for gradients that the kernel does not take."""
    ages.settle()
    gradient = update.grad.dense().to(update.weight.dtype) * update.factor
    old = (update.weight, *update.states)
    for table, after in zip(old, _FORMULAS[update.action](update, gradient, *old), strict=True):
        table.copy_(after)


def _widely(grad: RowGrad) -> tuple[Tensor, Tensor]:
    """(U,) unique ids and their (U, D) rows, in fp32 at least."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    if wide is grad.dtype:
        return grad.scaled()
    ids, rows = merge(grad.cell.pieces, grad.shape, wide, grad.device)
    return ids, rows if grad.cell.scale is None else rows * grad.cell.scale


# Each takes the gradient of the looked-up rows, their weights and states; returns the new ones.
_Formula = Callable[..., tuple[Tensor, ...]]


def _sgd(update: Update, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (w.sub(g, alpha=update.lr),)


def _adagrad(update: Update, g: Tensor, w: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
    g = g.add(w, alpha=update.l2) if update.l2 != 0.0 else g
    total = sums.addcmul(g, g)
    return w.addcdiv(g, total.sqrt().add_(update.eps), value=-update.lr), total


def _row_wise_adagrad(update: Update, g: Tensor, w: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
    total = sums + g.square().mean(1)
    root = total.sqrt().add_(update.eps).unsqueeze(1)
    return w.addcdiv(g, root, value=-update.lr), total


def _adam(update: Update, g: Tensor, w: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    beta1, beta2 = update.betas
    g = g.add(w, alpha=update.l2) if update.l2 != 0.0 else g
    w = w.sub(w, alpha=update.decay) if update.decay != 0.0 else w
    m = g.sub(m).mul_(1 - beta1).add_(m)
    v = g.square().sub_(v).mul_(1 - beta2).add_(v)
    return w.add(m.div(v.sqrt().add_(update.eps)), alpha=-update.lr), m, v


def _momentum(update: Update, g: Tensor, w: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    assert update.ages is not None
    g = g.add(w, alpha=update.l2) if update.l2 != 0.0 else g
    if not state:
        return (w.sub(g, alpha=update.lr),)
    b = state[0].mul(update.ages.betas[0]).add_(g, alpha=1 - update.betas[0])
    by = g.add(b, alpha=update.ahead) if update.ahead != 0.0 else b
    return w.sub(by, alpha=update.lr), b


def _rmsprop(update: Update, g: Tensor, w: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    assert update.ages is not None
    alpha, *momentum = update.ages.betas
    g = g.add(w, alpha=update.l2) if update.l2 != 0.0 else g
    v = state[0].mul(alpha).addcmul_(g, g, value=1 - alpha)
    root = v.sqrt().add_(update.eps)
    if not momentum:
        return w.addcdiv(g, root, value=-update.lr), v
    b = state[1].mul(momentum[0]).addcdiv_(g, root)
    return w.sub(b, alpha=update.lr), v, b


_FORMULAS: dict[Action, _Formula] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "row_wise_adagrad": _row_wise_adagrad,
    "adam": _adam,
    "momentum": _momentum,
    "rmsprop": _rmsprop,
}


def at_random(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """fp32 ``x`` in ``dtype`` by stochastic rounding: one of the two neighbouring numbers, with
    probabilities that make the expected value ``x``. To nearest if ``dtype`` is neither fp16 nor
    bf16, or if a value has no two neighbours.
    """
    near = x.to(dtype)
    if dtype not in (torch.float16, torch.bfloat16):
        return near
    size = x.abs()
    bits = near.abs().view(torch.int16)  # as integers they grow with the magnitude
    low = bits - (near.abs() > size).to(torch.int16)
    least, most = low.view(dtype).to(x.dtype), (low + 1).view(dtype).to(x.dtype)
    chance = torch.empty_like(x).uniform_(generator=torch.Generator(x.device).manual_seed(seed))
    chosen = torch.where(chance < (size - least) / (most - least), low + 1, low).view(dtype)
    return torch.where(size < torch.finfo(dtype).max, chosen.copysign(x.to(dtype)), near)
