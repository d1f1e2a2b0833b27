"""Step counts of many parameters, one added to each at once.

Optimizers keep a tensor of one number for each parameter. Adding one to each of 55 takes the host
100 us; so those on the host are given memory in one array, where they stay the tensors they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor


class Counts:
    """The entries ``step`` of ``states``, where they have one."""

    def __init__(self, states: Sequence[dict[str, Any]]) -> None:
        self._states = [held for held in states if held.get("step") is not None]
        self._known: list[Any] = []
        self._look()

    def _look(self) -> None:
        counted = [(held, held["step"]) for held in self._states]
        self._known = [step for _, step in counted]
        self._numbers = [held for held, step in counted if not isinstance(step, Tensor)]
        tensors = [step for _, step in counted if isinstance(step, Tensor)]
        self.there = [step for step in tensors if not step.is_cpu]
        here = [step for step in tensors if step.is_cpu]
        self._joined = [step for step in here if _is_plain(step)]
        self._others = [step for step in here if not _is_plain(step)]
        self._arrays: list[Tensor] = []
        for dtype in {step.dtype for step in self._joined}:
            own = [step for step in self._joined if step.dtype is dtype]
            array = torch.stack([step.detach() for step in own])
            for step, place in zip(own, array.unbind(), strict=True):
                step.data = place
            self._arrays.append(array)
        self._at = [step.data_ptr() for step in self._joined]

    @torch.no_grad()
    def add(self) -> list[Tensor]:
        """Count one step on the host; the counts that are on a device."""
        for held in self._numbers:
            if not isinstance(held["step"], Tensor):
                held["step"] += 1
        now = [held["step"] for held in self._states]
        if self._numbers:  # equal to those known but for one more
            now = [step if isinstance(step, Tensor) else None for step in now]
            known = [step if isinstance(step, Tensor) else None for step in self._known]
        else:
            known = self._known
        same = all(map(is_, now, known))
        if not same or [step.data_ptr() for step in self._joined] != self._at:
            self._look()
        for array in (*self._arrays, *self._others):
            array.add_(1)
        return self.there


def _is_plain(step: Tensor) -> bool:
    """Whether it may have its memory anywhere."""
    plain = type(step) is Tensor and step.dim() == 0 and step.dtype.is_floating_point
    return plain and not (step.requires_grad or step.is_shared() or step.is_pinned())
