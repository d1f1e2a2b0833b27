"""Reasons for which calls are neither recorded nor replayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recast.runtime import checked

_autograd: Any = torch._C._autograd
_saved_hooks: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


def why_not_now() -> str | None:
    """Why nothing may be recorded or replayed right now, or None."""
    if checked.is_checked():
        return "ids are checked (recast.checked(), RECAST_CHECKED), which a replay would not do"
    if torch.is_anomaly_enabled():
        return "torch.autograd.detect_anomaly looks into each backward, and a replay has none"
    if _saved_hooks is not None and _saved_hooks(True) is not None:
        return "there are hooks for saved tensors, which a replay would not call"
    return None


def why_not_of(model: nn.Module) -> str | None:
    """Why calls of ``model``, or of an optimised model inside it, may not be replayed, or None.

    An optimised model says so by its method ``why_not_recordable``; after ``inplace=True`` it is
    the object whose ``forward`` the user's module has.
    """
    for module in model.modules():
        for held in (module, getattr(vars(module).get("forward"), "__self__", None)):
            ask = getattr(type(held), "why_not_recordable", None)
            why = None if ask is None else ask(held)
            if why is not None:
                return str(why)
    return None


def why_not_on(device: torch.device) -> str | None:
    """Why nothing can be recorded on ``device``, or None."""
    return None if device.type == "cuda" else f"there are no CUDA graphs on a {device.type} device"
