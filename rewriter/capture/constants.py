"""Tensors that belong to a graph and not to the user's model, beside the model's own attributes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Constants:
    """One holder per captured root. They follow ``.to()`` and are absent from ``state_dict()``."""

    ATTRIBUTE = "_recast_constants"

    def add(self, value: torch.Tensor, hint: str) -> str:
        """Keep ``value``, or what equals it already; the path a ``get_attr`` node reads it by."""
        for name, held in vars(self).items():
            if name.startswith(hint) and held.dtype == value.dtype and torch.equal(held, value):
                return f"{self.ATTRIBUTE}.{name}"
        return self._set(value.detach(), hint)

    def hold(self, value: torch.Tensor, hint: str) -> str:
        """Keep ``value`` itself, whatever is written to it; the path of the node that reads it."""
        for name, held in vars(self).items():
            if held is value:
                return f"{self.ATTRIBUTE}.{name}"
        return self._set(value, "".join(c if c.isalnum() else "_" for c in hint))

    def _set(self, value: torch.Tensor, hint: str) -> str:
        name = f"{hint}_{len(vars(self))}"
        setattr(self, name, value)
        return f"{self.ATTRIBUTE}.{name}"

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move or cast all of them, as ``nn.Module._apply`` does for buffers."""
        for name, held in vars(self).items():
            setattr(self, name, fn(held))


def constants(root: nn.Module) -> Constants:
    """The constants held by ``root``, made on first use."""
    held = root.__dict__.get(Constants.ATTRIBUTE)
    if held is None:
        held = Constants()
        object.__setattr__(root, Constants.ATTRIBUTE, held)
    return held
