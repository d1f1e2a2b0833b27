"""The plain model's own error, drawn several times: on one batch it may be small by luck.

Where terms cancel, such as in the gradient through a batch norm of two rows, what is left is the
rounding of their last digits, and one draw of it says little. Another draw is the plain model, and
its judge in float64, from parameters that differ in their last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn

from . import double, trial

TIMES = 4
T = TypeVar("T")


def shaken(
    plain: nn.Module, exact: nn.Module, run: Callable[[nn.Module, bool], T]
) -> Iterator[tuple[T, T]]:
    """What ``run(model, wide)`` gives for both, from the same shaken parameters.

    ``exact`` is ``plain`` in float64 (``wide``), under the same names. Neither is changed.
    """
    for seed in range(TIMES):
        signs = torch.Generator().manual_seed(seed)
        with trial.undisturbed(plain, exact):
            judged = dict(exact.named_parameters())
            for name, p in plain.named_parameters():
                up = torch.rand(p.shape, generator=signs).round().to(p)
                p.data.mul_(1 + 2 * torch.finfo(p.dtype).eps * (up - 0.5))
                judged[name].data.copy_(p.data)
            usual = run(plain, False)
            with double.in_double():
                yield usual, run(exact, True)
