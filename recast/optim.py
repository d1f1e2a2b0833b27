"""Optimizers that torch does not have; ``recast.optimize`` speeds them up as it does torch's."""

from recast.runtime.optim import RowWiseAdagrad
from recast.runtime.rows.optimizer import stochastic_rounding

__all__ = ["RowWiseAdagrad", "stochastic_rounding"]
