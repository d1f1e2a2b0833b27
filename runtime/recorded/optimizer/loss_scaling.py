"""Loss scaling (``torch.amp.GradScaler``) of a training step, which may be recorded.

Usually the host reads whether a gradient is infinite, and then does not step. A recorded step
cannot ask the host: our kernels, for rows of tables and for dense float32 parameters, check this
themselves and skip the step; torch's own steps are taken in any case, and if a gradient was
infinite, what they wrote is restored. The scale is updated on the device, as by torch. Step counts
that optimizers keep on the host (Adagrad and Adam have them) are corrected after the replay, which
waits for the device; without such counts (SGD, optimizers with ``capturable=True``) nothing waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from recast.runtime.recorded.recording import Recording, Unrecordable
from recast.runtime.rows.grad import RowGrad

_Groups = Sequence[dict[str, Any]]


@dataclass
class _Recorded:
    """The state of one recording, for each optimizer."""

    found: list[Tensor] = field(default_factory=list)  # 1 where a gradient was infinite
    counted: list[list[dict[str, Any]]] = field(default_factory=list)  # states with host counts


class Scaling:
    """The scaler of one training step over ``optimizers``."""

    def __init__(self, scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
        self._scaler, self._optimizers = scaler, optimizers
        self._before: list[list[tuple[dict[str, Any], float]]] = []
        self._made: _Recorded | None = None  # while it is recorded
        self._replayed: _Recorded | None = None
        self.settled = False  # a step was taken, so optimizers have made their state

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss, which is differentiated."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self) -> None:
        """Unscale the gradients to those of the loss itself."""
        for optimizer in self._optimizers:
            self._scaler.unscale_(optimizer)

    def step(self) -> None:
        """Run the step as any loop would."""
        before = self._scaler.get_scale() if not self.settled else 0.0
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
        self.settled = self.settled or self._scaler.get_scale() >= before

    def state(self) -> tuple[object, ...]:
        """What a recording takes for granted about the scaler."""
        scaler = self._scaler
        return (
            id(scaler._scale), id(scaler._growth_tracker), scaler.is_enabled(),
            scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval(),
        )  # fmt: skip

    # ---------------------------------------------------------------- recorded

    def begin(self, made: Recording) -> None:
        """Prepare for recording."""
        self._made = mine = _Recorded()
        self._before = [_counts(o) for o in self._optimizers]

        def replayed() -> None:
            self._replayed = mine

        made.keep(mine)
        made.before_replay(replayed)

    def recorded(self, each: Sequence[Callable[[], _Groups]], dense: Sequence[Any]) -> None:
        """Run the step of each optimizer: ``each`` updates tables, ``dense`` the other groups.
        Raises Unrecordable.
        """
        assert self._made is not None
        for optimizer, tables, own in zip(self._optimizers, each, dense, strict=True):
            known = self._scaler._per_optimizer_states[id(optimizer)]
            if not known["found_inf_per_device"]:
                self._scaler.unscale_(optimizer)
            found: list[Tensor] = list(known["found_inf_per_device"].values())
            if len(found) != 1:
                raise Unrecordable("an optimizer has gradients on no device, or on several")
            self._made.found.append(found[0])
            with _left_out(optimizer, found[0]):
                groups = tables()
                with _put_back(optimizer, groups, found[0], own.leaves_out(groups)):
                    own.run(groups)
        self._scaler.update()

    def end(self) -> None:
        """Called when the step has been recorded, before its first replay."""
        if self._made is None:
            return
        self._made.counted = [
            [held for held, before in counts if float(held["step"]) != before]
            for counts in self._before
        ]
        self._replayed, self._made = self._made, None
        self._before = []

    def undo(self) -> None:
        """Called when recording failed."""
        self._made, self._before = None, []
        self._scaler._per_optimizer_states.clear()

    @torch.no_grad()
    def settle(self) -> None:
        """Called after a step: if it was skipped, undo what the host counted."""
        replayed, self._replayed = self._replayed, None
        if replayed is None:
            return
        for found, counted in zip(replayed.found, replayed.counted, strict=True):
            if counted and float(found):
                for held in counted:
                    held["step"] -= 1


def _counts(optimizer: Optimizer) -> list[tuple[dict[str, Any], float]]:
    """States with a step count on the host, and the count."""
    states = [held for held in optimizer.state.values() if held.get("step") is not None]
    return [
        (held, float(step))
        for held in states
        if not isinstance(step := held["step"], Tensor) or step.is_cpu
    ]


@contextlib.contextmanager
def _left_out(optimizer: Any, found: Tensor) -> Iterator[None]:
    """Give the step of ``optimizer`` the flag that makes it skip, as a scaler does."""
    optimizer.found_inf = found
    try:
        yield
    finally:
        del optimizer.found_inf


@contextlib.contextmanager
def _put_back(
    optimizer: Optimizer, groups: _Groups, found: Tensor, left_out: Collection[Tensor]
) -> Iterator[None]:
    """Restore dense parameters and states after a step with infinite gradients. ``left_out``: those
    that the step itself skips.
    """
    stepped = [
        p for group in groups if not group.get("fused") for p in group["params"]
        if p.grad is not None and type(p.grad) is not RowGrad and p not in left_out
    ]  # fmt: skip
    held = [p.detach() for p in stepped]
    for p in stepped:
        values = optimizer.state.get(p, {})
        kept = [v for k, v in values.items() if isinstance(v, Tensor) and v.device == p.device
                and not (k == "step" and v.is_cpu)]  # fmt: skip
        held += kept
    before = [t.clone() for t in held]
    yield
    good = found == 0
    for t, old in zip(held, before, strict=True):
        t.copy_(torch.where(good, t, old))
