"""One optimizer step on the looked-up rows of its tables: their updates, and the step counts.

A step that is recorded into a CUDA graph keeps its tensors but not its numbers: before each replay
these are computed anew, from the optimizer as it is then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from recast.runtime.recorded import recording
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows import kernel as row_kernel
from recast.runtime.rows import update as row_update
from recast.runtime.rows.ages import Ages
from recast.runtime.rows.count import count
from recast.runtime.rows.grad import RowGrad, may_be_spoiled
from recast.runtime.rows.rules import Numbers, Rule
from recast.runtime.rows.step_counts import StepCounts
from recast.runtime.rows.update import Update
from recast.runtime.rows.whole import Whole

_Scaling = tuple[float, Tensor | None, Tensor | None]
_OF_NUMBERS = Update._fields.index(Numbers._fields[0])  # the others follow it
assert Update._fields[_OF_NUMBERS:][: len(Numbers._fields)] == Numbers._fields
HALVES = (torch.float16, torch.bfloat16)

# How many steps of an optimizer have used stochastic rounding.
_TURNS: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


class Step:
    """The updates of one step, and what else torch's own step would do."""

    def __init__(self, optimizer: Optimizer, rule: Rule | None) -> None:
        self.optimizer = optimizer
        self.rule = rule
        # GradScaler sets these on an optimizer that unscales by itself.
        self.scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        self.found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self.updates: list[Update] = []
        self.places: list[tuple[int, dict[str, Any]]] = []  # group and state of each update
        self.numbers: dict[tuple[int, float], Numbers] = {}
        self.groups: list[int] = []  # those with updates
        self.renewed: list[Numbers] = []  # for each of them, at the last replay
        self.moves_all = False  # whether that one had an infinite learning rate, or NaN

    def add(self, index: int, found: Iterable[tuple[Tensor, RowGrad, Ages | Whole | None]]) -> None:
        """Add updates of tables in group ``index`` from their gradients, and how their other rows
        move; None: they do not.
        """
        assert self.rule is not None
        action, start = self.rule.action, self.rule.start
        names, numbers = self.rule.states, self._numbers
        group, kept = self.optimizer.param_groups[index], self.optimizer.state
        sign = -1.0 if group["maximize"] else 1.0
        plain = self.scale is None and self.found_inf is None
        same = None if self.rule.counts(group) else numbers(index, {})
        for weight, grad, ages in found:
            scaling = (sign, None, None) if plain else self._scaling(weight, sign)
            if scaling is None:
                continue
            state: dict[str, Any] = {}
            states: tuple[Tensor, ...] = ()
            if names and (ages is None or ages.moments):
                state = kept[weight]
                if not state:  # a parameter added after the optimizer was made
                    state.update(start(self.optimizer, group, weight))
                states = tuple([state[name] for name in names]) if ages is None else ages.moments
            self.places.append((index, state))
            known = numbers(index, state, ages) if same is None else same
            if ages is not None:
                ages.begin_step(weight, known.lr * (known.ahead or 1.0))
            self.updates.append(Update(action, weight, grad, states, *known, *scaling, ages=ages))

    def _scaling(self, weight: Tensor, sign: float) -> _Scaling | None:
        """``factor``, ``grad_scale`` and ``found_inf`` of an update; None: skip the update."""
        scale, found_inf = self.scale, self.found_inf
        if (scale is None and found_inf is None) or not weight.is_cpu:
            return sign, scale, found_inf
        if found_inf is not None and float(found_inf) != 0:
            return None
        return sign if scale is None else sign / float(scale), None, None

    def _numbers(
        self, index: int, state: dict[str, Any], ages: Ages | Whole | None = None
    ) -> Numbers:
        """The numbers for one table; tables with the same number of steps share them."""
        assert self.rule is not None
        group = self.optimizer.param_groups[index]
        steps = 0.0
        if self.rule.counts(group):
            steps = count_of(state["step"]) if ages is None else float(ages.done)
        numbers = self.numbers.get((index, steps))
        if numbers is None:
            numbers = self.numbers[index, steps] = self.rule.numbers(group, steps)
        return numbers

    def run(self, *, stochastic: bool) -> None:
        """Do the updates. ``stochastic``: with stochastic rounding of fp16 and bf16 tables."""
        if stochastic:
            self._draw_seeds()
        asked = self.updates if may_be_spoiled() else ()
        spoiled = [u for u in asked if u.grad.cell.spoils_all and u.found_inf is None]
        row_update.apply(self.updates)
        if self.rule is not None and self.rule.exact:  # an inexact one is not to change other rows
            for one in spoiled:
                _spoil_other_rows(one)
        for one, (_, state) in zip(self.updates, self.places, strict=True):
            if one.ages is not None:
                one.ages.end_step(one.weight, state)
        count("fused-step", times=len(self.updates))
        here, there = self._steps()
        row_kernel.count_steps(here)
        self._count_there(there)
        recorded = recording.current()
        if recorded is not None:
            self.groups = sorted({index for index, _ in self.places})
            counts = StepCounts([state for _, state in self.places])
            recorded.before_replay(lambda: self._renew(recorded, stochastic, counts))
        if self.scale is not None:
            self._unscale(self.scale)

    def _draw_seeds(self) -> None:
        """A seed for each table, derived from torch's seed; torch's generator does not advance."""
        turn = _TURNS[self.optimizer] = _TURNS.get(self.optimizer, 0) + 1
        first = torch.initial_seed() + (turn << 20)
        self.updates = [
            u._replace(seed=(first + k) % 2**63) if u.weight.dtype in HALVES else u
            for k, u in enumerate(self.updates)
        ]

    def _unscale(self, scale: Tensor) -> None:
        """Leave gradients unscaled, as torch's fused steps do."""
        inverse: Tensor | None = None
        for update in self.updates:
            if update.grad_scale is None:
                update.grad.rescale(1.0 / float(scale))
                continue
            if inverse is None:
                inverse = scale.reciprocal()
                if self.found_inf is not None:
                    inverse = inverse.where(self.found_inf == 0, 1.0)
            update.grad.rescale(inverse)

    def _renew(self, recorded: recording.Recording, stochastic: bool, counts: StepCounts) -> None:
        """The numbers of a recorded step, for its next replay."""
        assert self.rule is not None
        groups = [self.optimizer.param_groups[index] for index in self.groups]
        if not any([self.rule.counts(group) for group in groups]):
            of_groups = [self.rule.numbers(group, 0.0) for group in groups]
        else:
            of_groups = []
        if stochastic or not of_groups or of_groups != self.renewed:
            self.renewed = of_groups
            self.numbers.clear()
            found = [self._numbers(index, state) for index, state in self.places]
            self.updates = [
                Update._make((*u[:_OF_NUMBERS], *numbers, *u[_OF_NUMBERS + len(numbers) :]))
                for u, numbers in zip(self.updates, found, strict=True)
            ]
            if stochastic:
                self._draw_seeds()
            row_cuda.renew(recorded, self.updates)
            self.moves_all = not all([math.isfinite(n.lr) for n in self.numbers.values()])
        if self.moves_all and self.rule.exact:  # as always, such a step is that of a dense gradient
            for one in self.updates:
                _move_other_rows(one)
        for step in counts.add():  # the replay counts these
            known = _KNOWN.pop(step, None)
            if known is not None and self.found_inf is None:
                _KNOWN[step] = known[0], known[1] + 1.0

    def _steps(self) -> tuple[list[Tensor], list[Tensor]]:
        """Step counts on the host and on the device; Python numbers are counted here."""
        here: list[Tensor] = []
        there: list[Tensor] = []
        for _, state in self.places:
            step = state.get("step")
            if isinstance(step, Tensor):
                (here if step.is_cpu else there).append(step)
            elif step is not None:
                state["step"] = step + 1
        return here, there

    def _count_there(self, steps: list[Tensor]) -> None:
        """Add one to counts on the device, unless it has found infinite gradients."""
        found_inf = self.found_inf
        if not steps:
            return
        known = [_KNOWN.pop(step, (-1, 0.0)) for step in steps]
        versions = [step._version for step in steps]
        one = torch.ones((), device=steps[0].device) if found_inf is None else 1.0 - found_inf
        torch._foreach_add_(steps, one, alpha=1.0)
        for step, before, (version, counted) in zip(steps, versions, known, strict=True):
            if found_inf is None and version == before:
                _KNOWN[step] = step._version, counted + 1.0


@torch.no_grad()
def _spoil_other_rows(update: Update) -> None:
    """Step the rows that were not looked up, whose gradient is a zero times NaN or infinity."""
    from recast.runtime.dynamic.table import of as dynamic_table  # here: it imports this package

    if recording.current() is not None or dynamic_table(update.weight) is not None:
        return  # other rows of a dynamic table belong to no id, and have no memory yet
    others = torch.ones(len(update.weight), dtype=torch.bool, device=update.weight.device)
    others[update.grad.merged()[0]] = False
    for table in (update.weight, *update.states):
        table.masked_fill_(others.view(-1, *[1] * (table.dim() - 1)), math.nan)


@torch.no_grad()
def _move_other_rows(update: Update) -> None:
    """What an infinite learning rate does to the rows that a replay does not look up: their
    gradient is 0, and 0 times infinity is NaN. Their state stays. Does not wait for a device.
    """
    from recast.runtime.dynamic.table import of as dynamic_table  # here: it imports this package

    weight, cell = update.weight, update.grad.cell
    if cell.sparse or math.isfinite(update.lr) or dynamic_table(weight) is not None:
        return
    if update.found_inf is not None:  # it is not known yet whether the step is skipped
        return
    rows = len(weight)
    others = torch.ones(rows + 1, dtype=torch.bool, device=weight.device)  # the last: no row
    for piece in cell.pieces:
        ids, offsets = piece.ids.reshape(-1).long(), piece.offsets
        valid = (ids >= 0) & (ids < rows)
        if piece.padding_idx is not None:
            valid &= ids != piece.padding_idx
        if offsets is not None:  # the batch may end before its memory does
            places = torch.arange(len(ids), device=ids.device)
            valid &= places >= offsets[0]
            if len(offsets) > len(piece.rows):
                valid &= places < offsets[len(piece.rows)]
        others[ids.where(valid, rows)] = False
    weight.masked_fill_(others[:rows].view(-1, *[1] * (weight.dim() - 1)), math.nan)


# Fused and capturable optimizers count on the device. Our own counting there is mirrored here, so
# that reading it need not wait unless somebody else has written: (version of the tensor, count).
_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def count_of(step: Tensor | int) -> float:
    """The number of steps done; waits for the device if somebody else may have changed it."""
    if not isinstance(step, Tensor) or step.is_cpu:
        return float(step)
    known = _KNOWN.get(step)
    if known is None or known[0] != step._version:
        known = _KNOWN[step] = step._version, float(step)
    return known[1]
