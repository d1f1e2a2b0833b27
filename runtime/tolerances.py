"""How far two correct results may differ: one table, used by the op tests and by ``recast.diff``.

The judge is the same computation in float64. A result is correct when its error is at most
``factor`` times the error that plain torch makes in the same dtype, or below a floor that rounding
alone explains: ``ulps`` units in the last place of the largest magnitude that took part. The floor
matters where the true value is zero: the gradient of a bias before a batch norm is nothing but
rounding noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit for one dtype."""

    factor: float  # of plain torch's own error against float64
    ulps: float  # units in the last place of the largest magnitude, always allowed
    reason: str


# For whole models, which `recast.diff` compares tensor by tensor:
ZERO = 1e-10  # what float64 leaves of a true zero, at most, of what was summed up
CANCEL = 100.0  # a sum may be this much smaller than its terms
CHAIN = 8.0  # the table is of one operation; without a judge, a model is a chain of some
SHRINK = 1e-4  # of a difference by rounding, may be left in float64: far above the units' ratio,
# 2e-9, for what is kept in float32 there, far below 1, which is what is left of a wrong rewrite
WILD = 1e5  # ulps: a float64 run this far off computes something else than the plain one

LIMITS: dict[torch.dtype, Limit] = {
    torch.float64: Limit(
        4.0,
        512.0,
        "sums are taken in another order; float64 is its own judge, so the floor alone decides",
    ),
    torch.float32: Limit(
        4.0,
        16.0,
        "sums are taken in another order, and with fused multiply-adds: each of two correct"
        " orders may be some times worse than the other on one tensor",
    ),
    torch.bfloat16: Limit(
        2.0, 4.0, "one rounding to 8 bits dominates, wherever it happens; few steps differ"
    ),
    torch.float16: Limit(
        2.0, 4.0, "one rounding to 11 bits dominates; sums are kept in float32 on both sides"
    ),
}


def limit(dtype: torch.dtype) -> Limit:
    """The limit for tensors of ``dtype``; for integers and booleans it demands equality."""
    return LIMITS.get(dtype) or Limit(0.0, 0.0, "not a float: equal or wrong")


def excess(ours: Tensor, plain: Tensor, truth: Tensor, *, scale: float | None = None) -> float:
    """Our error as a fraction of what is allowed: above 1 is too much, ``inf`` when NaNs differ.

    ``ours, plain``: of one dtype and shape; ``truth``: in float64. ``scale``: the largest magnitude
    that took part in the computation, where that is larger than the result's own.
    """
    if ours.shape != truth.shape:
        return float("inf")
    if truth.numel() == 0:
        return 0.0
    if not (ours.dtype.is_floating_point or ours.dtype.is_complex):
        return 0.0 if torch.equal(ours, plain) else float("inf")
    ours, plain = ours.detach(), plain.detach().to(truth.dtype)
    bound = limit(ours.dtype)
    wide = ours.to(truth.dtype)
    finite = truth.isfinite()
    if not torch.equal(wide.isfinite() | ~plain.isfinite(), torch.ones_like(finite)):
        return float("inf")
    both = finite & plain.isfinite() & wide.isfinite()
    if not both.any():
        return 0.0
    error = (wide - truth).abs()[both].max().item()
    usual = (plain - truth).abs()[both].max().item()
    largest = max(truth.abs()[both].max().item(), scale or 0.0)
    unit = torch.finfo(ours.dtype).eps
    allowed = max(bound.factor * usual, bound.ulps * unit * largest)
    return error / allowed if allowed else (0.0 if error == 0 else float("inf"))
