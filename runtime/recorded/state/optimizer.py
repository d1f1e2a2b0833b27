"""What a recorded step takes for granted about its optimizers: the addresses of parameters and
state, the objects that hold them, and the numbers that a replay repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from recast.runtime.recorded.optimizer import dense_step
from recast.runtime.recorded.state.model import State
from recast.runtime.recorded.state.same import (
    TensorLayouts,
    Versions,
    WatchedDicts,
    attributes_of,
    held_in_torch,
    same_attributes,
    same_objects,
    same_values,
    values_of,
)
from recast.runtime.rows import optimizer as row_optimizer

_WANTS = ("requires_grad",)


class OptimizerState:
    """The state of ``optimizer`` at the time this is made.

    params, tensors: its parameters, and the tensors of its state except ``counts``: step counts on
    the host, whose ``writes`` are counted.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = list(optimizer.param_groups)
        self.params: list[Tensor] = [p for group in self._groups for p in group["params"]]
        self.state: dict[Tensor, dict[str, Any]] = optimizer.state
        self._states = list(self.state.values())
        self._plain = _are_dicts([self.state, *self._states])
        self._values = values_of(self._states) if self._plain else []
        places = [(held, k) for held in self._states for k, v in held.items() if _is_tensor(v)]
        self._tensors_only = self._plain and len(places) == len(self._values)
        self._places = places
        self._held: list[Tensor] = [held[k] for held, k in places]
        counted = [k == "step" and t.is_cpu for t, (_, k) in zip(self._held, places, strict=True)]
        self.counts = [t for t, is_count in zip(self._held, counted, strict=True) if is_count]
        self.tensors = [t for t, is_count in zip(self._held, counted, strict=True) if not is_count]
        self._in_torch = held_in_torch(self._held)
        self._uncounted = [state for state in self._states if not _is_tensor(state.get("step"))]
        self._watched = WatchedDicts([self.state, *self._states] if self._plain else [])
        self._held_same = self._plain  # when the watch began
        self.writes = Versions(self.counts)
        self._where = TensorLayouts([*self.params, *self.tensors])
        self._numbers = _Numbers(optimizer)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether it has the same state now."""
        groups = optimizer.param_groups
        if not same_objects(groups, self._groups):
            return False
        if optimizer.state is not self.state:
            return False
        params = self.params
        now = groups[0]["params"] if len(groups) == 1 else [p for g in groups for p in g["params"]]
        if not same_objects(now, params):
            return False
        if not (self._held_same and self._watched.unwritten()) and not self._states_hold_same():
            return False
        return self._where.unchanged() and self._numbers.are_of(optimizer)

    def _states_hold_same(self) -> bool:
        self._held_same = False
        self._watched.renew()
        same = self._has_same_states() and self._holds_same()
        if any([_is_tensor(state.get("step")) for state in self._uncounted]):
            same = False
        self._held_same = same and self._plain
        return same

    def _has_same_states(self) -> bool:
        if self._plain:
            return same_values([self.state], self._states)
        now = list(self.state.values())
        return len(now) == len(self._states) and all(map(is_, now, self._states))

    def _holds_same(self) -> bool:
        """Whether the states hold the same tensors."""
        if self._tensors_only:
            return same_values(self._states, self._values)
        return all(map(is_, [held.get(k) for held, k in self._places], self._held))


class OptimizerStates:
    """The state of all ``optimizers`` of a recorded step, checked at every call."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._held: list[OptimizerState] = []
        self._params: list[Tensor] = []
        self._flags: list[bool] = []
        self._state: State = ()

    def of(self) -> State:
        """What distinguishes one recording from another. Not the addresses of state tensors, which
        the first step creates: see :meth:`here`.
        """
        if not self._held or not _are_of(self._held, self._optimizers) or not self._want_same():
            self._held = [OptimizerState(o) for o in self._optimizers]
            self._params = [p for held in self._held for p in held.params]
            self._flags = attributes_of(self._params, _WANTS)
            groups = [g["params"] for o in self._optimizers for g in o.param_groups]
            self._state = (
                ("optimizer state", *[id(o.state) for o in self._optimizers]),
                ("optimizer groups", *[tuple(map(id, params)) for params in groups]),
                ("optimizer requires_grad flags", *self._flags),
                ("optimizer numbers", *[_numbers(o) for o in self._optimizers]),
            )
        return self._state

    def here(self) -> Callable[[], bool]:
        """A check that everything that was true of the optimizers at the last call still is."""
        known = self._held
        return lambda: self._held is known or _are_of(known, self._optimizers)

    def _want_same(self) -> bool:
        return same_attributes(self._params, _WANTS, self._flags)


def _are_of(held: Sequence[OptimizerState], optimizers: Sequence[Optimizer]) -> bool:
    return all([one.is_of(o) for one, o in zip(held, optimizers, strict=True)])


class _Numbers:
    """The numbers that a recorded step has baked in.

    To compare them takes a call for each, but most steps find the same objects as the step before.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._known = _numbers(optimizer)
        self._keep(optimizer)

    def are_of(self, optimizer: Optimizer) -> bool:
        """Whether they are the present ones of ``optimizer``."""
        groups = list(optimizer.param_groups)
        besides = _besides(optimizer)
        same = (
            self._plain
            and besides == self._besides
            and [*chain.from_iterable(groups)] == self._keys
            and same_values(groups, self._values)
        )
        if same or _numbers(optimizer) == self._known:
            if not same:
                self._keep(optimizer)
            return True
        return False

    def _keep(self, optimizer: Optimizer) -> None:
        groups = list(optimizer.param_groups)
        self._besides = _besides(optimizer)
        self._keys = [*chain.from_iterable(groups)]
        self._values = values_of(groups) if _are_dicts(groups) else []
        numbers = [v for group in groups for k, v in group.items() if k != "params"]
        self._plain = _are_dicts(groups) and not any(map(_may_be_written_to, numbers))


def _numbers(optimizer: Optimizer) -> tuple[object, ...]:
    return *dense_step.baked(optimizer), *_besides(optimizer)


def _besides(optimizer: Optimizer) -> tuple[object, ...]:
    return row_optimizer.is_lazy(optimizer), torch.are_deterministic_algorithms_enabled()


def _are_dicts(held: list[Any]) -> bool:
    """Whether they can be compared in one call: third-party optimizers may use other mappings."""
    return all([isinstance(one, dict) for one in held])


def _may_be_written_to(value: object) -> bool:
    """Whether it may change its value and stay the same object."""
    if isinstance(value, tuple):
        return any(map(_may_be_written_to, value))
    return isinstance(value, Tensor | list | dict | set)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
