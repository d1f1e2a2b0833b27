"""What optimizers keep on the host, saved while their step is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from recast.runtime.recorded.recording import Unrecordable
from recast.runtime.rows import optimizer as row_optimizer


class HostState:
    """The state of ``optimizers`` before a step was recorded."""

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
        """Raise Unrecordable if the step created state: each replay would create it anew."""
        for state, before in zip(self._states, self._before, strict=True):
            for p, held in state.items():
                known = before[p][1] if p in before else {}
                if any(known.get(k) is not v for k, v in held.items() if isinstance(v, Tensor)):
                    raise Unrecordable("the optimizer made state for a parameter it had none for")

    def restore(self) -> None:
        """Restore the state, as if there had been no step."""
        for state, before in zip(self._states, self._before, strict=True):
            state.clear()
            for p, (held, kept) in before.items():
                held.clear()
                held.update(kept)
                state[p] = held
        for step, count in self._counts:
            step.copy_(count)


def step_tables(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Update tables from their row gradients; returns the groups without them."""
    groups = row_optimizer.update_tables(optimizer)
    return optimizer.param_groups if groups is None else groups
