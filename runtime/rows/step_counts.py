"""Adds one to the step counts of many parameters at every replay.

Optimizers keep a one-element tensor for each parameter. A recorded step finds them at the same
addresses each time, so that they have to be sorted by device and dtype only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor

from recast.runtime.recorded.state.same import WatchedDicts, same_items
from recast.runtime.rows import kernel as row_kernel


class StepCounts:
    """The step counts in ``states``: the entries ``step`` of those that have one."""

    def __init__(self, states: Sequence[dict[str, Any]]) -> None:
        self._states = [held for held in states if held.get("step") is not None]
        self._keys = ["step"] * len(self._states)
        self._known: list[Any] = []
        self._watched = WatchedDicts(self._states)
        self._held_same = False  # when the watch began, as far as is known
        self._look()

    def _look(self) -> None:
        counted = [(held, held["step"]) for held in self._states]
        self._known = [step for _, step in counted]
        self._numbers = [held for held, step in counted if not isinstance(step, Tensor)]
        tensors = [step for _, step in counted if isinstance(step, Tensor)]
        self._here = [step for step in tensors if step.is_cpu]
        self.there = [step for step in tensors if not step.is_cpu]

    def add(self) -> list[Tensor]:
        """Add one to the counts on the host; returns the counts that are on a device."""
        for held in self._numbers:
            if not isinstance(held["step"], Tensor):
                held["step"] += 1
        if not self._are_known():
            self._look()
        row_kernel.count_steps(self._here)
        return self.there

    def _are_known(self) -> bool:
        """Whether the counts are the same objects as before."""
        if not self._numbers:
            if not (self._held_same and self._watched.unwritten()):
                self._watched.renew()
                self._held_same = same_items(self._states, self._keys, self._known, None)
            return self._held_same
        # Python numbers have just changed: only tensors can be compared.
        now = [step if isinstance(step := held["step"], Tensor) else None for held in self._states]
        known = [step if isinstance(step, Tensor) else None for step in self._known]
        return all(map(is_, now, known))
