"""What the host keeps of optimizers, while a step of theirs is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from recast.runtime.recorded.recording import Unrecordable
from recast.runtime.rows import optimizer as row_optimizer


class HostState:
    """State of ``optimizers`` as it was before a step was recorded."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._states = [o.state for o in optimizers]
        self._before = [{p: (held, dict(held)) for p, held in s.items()} for s in self._states]
        self._counts = [
            (step, step.clone())
            for s in self._states
            for held in s.values()
            if isinstance(step := held.get("step"), Tensor) and step.is_cpu
        ]

    def check(self) -> None:
        """Raise Unrecordable where the step made state: each replay would make it anew."""
        for state, before in zip(self._states, self._before, strict=True):
            for p, held in state.items():
                known = before[p][1] if p in before else {}
                if any(known.get(k) is not v for k, v in held.items() if isinstance(v, Tensor)):
                    raise Unrecordable("the optimizer made state for a parameter it had none for")

    def restore(self) -> None:
        """As if the step had not been."""
        for state, before in zip(self._states, self._before, strict=True):
            state.clear()
            for p, (held, kept) in before.items():
                held.clear()
                held.update(kept)
                state[p] = held
        for step, count in self._counts:
            step.copy_(count)


def step_tables(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Update tables from their row gradients; the groups of what is left."""
    groups = row_optimizer.update_tables(optimizer)
    return optimizer.param_groups if groups is None else groups
