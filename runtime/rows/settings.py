"""What an optimizer was asked for besides its own options, kept where copies find it.

Torch copies and pickles an optimizer's defaults, groups and state. The last two are in its
checkpoints. Each entry of the first is an argument of its class, and is written into later groups:
so the settings are attributes of the dict itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer


class Defaults(dict[str, Any]):
    """``Optimizer.defaults`` with settings.

    lazy: Adam steps only looked-up rows of its tables.
    at_random: tables in fp16 and bf16 are rounded stochastically.
    fused: dense parameters on a CPU are stepped by torch's fused kernels where they can be.
    """

    lazy = False
    at_random = False
    fused = False

    def of_twin(self, defaults: Mapping[str, Any]) -> Defaults:
        """Those of a plain model's optimizer, with the settings that leave its numbers as they are;
        for ``rewriter/diff/model_runs.py``.
        """
        twin = Defaults(defaults)
        twin.fused = self.fused
        return twin


_NONE = Defaults()


def of(optimizer: Optimizer) -> Defaults:
    """To be read only."""
    defaults = optimizer.defaults
    return defaults if type(defaults) is Defaults else _NONE


def change(optimizer: Optimizer, **settings: bool) -> None:
    if type(optimizer.defaults) is not Defaults:
        optimizer.defaults = Defaults(optimizer.defaults)
    vars(optimizer.defaults).update(settings)
