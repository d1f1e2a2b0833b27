"""mode="graph": a recorded step's ids are sorted beside the forward, as long as steps follow.

The tape does the work beside it as early as it may, or as late: whichever a GPU chooses, the
numbers are those of plain torch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recast.errors import RecastWarning
from recast.runtime import tolerances
from recast.runtime.recorded.gradients import early_sorts

sys.path.insert(0, str(Path(__file__).parent))
from tape import Pairs, ParallelWork
from test_early_sorts import Net, as_given, batches, computed
from test_recorded_training import recorded

LOSS = F.binary_cross_entropy_with_logits
Make = Callable[[Any], torch.optim.Optimizer]


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


class Loops:
    """The same loop over a recorded model, the plain one, and the plain one in float64."""

    def __init__(self, read: Callable[[Tensor], Tensor] = as_given, make: Make = adagrad) -> None:
        torch.manual_seed(0)
        plain = Net(read)
        self.nets: list[nn.Module] = [copy.deepcopy(plain), plain, copy.deepcopy(plain).double()]
        self.optimizers = [make(net.parameters()) for net in self.nets]
        self.data = batches(64, read)
        self.k = 0
        self.recorder: Pairs
        self.parameters = [list(net.parameters()) for net in self.nets]
        example = self.data[0][0]
        self.nets[0], self.recorder = recorded(self.nets[0], example, self.optimizers[0])

    def each(self, do: Callable[[Any, Any, Any, Tensor], None], times: int = 1) -> None:
        """``do(net, optimizer, inputs, label)`` with the next batches."""
        for _ in range(times):
            inputs, label = self.data[self.k]
            self.k += 1
            for net, optimizer in zip(self.nets, self.optimizers, strict=True):
                do(net, optimizer, inputs, label.to(next(iter(net.parameters())).dtype))

    def same(self) -> None:
        for a, b, c in zip(*self.parameters, strict=True):
            assert tolerances.excess(a, b, c) <= tolerances.CHAIN

    def begun(self) -> list[bool]:
        """Of each sort that was recorded, whether the next forward, with no step, begins it."""
        parallel = self.recorder.parallel
        before = [aside.begun for aside in parallel]
        self.each(forward)
        return [aside.begun > count for aside, count in zip(parallel, before, strict=True)]


def step(net: Any, optimizer: Any, inputs: Any, label: Tensor) -> None:
    optimizer.zero_grad()
    LOSS(net(*inputs), label).backward()
    optimizer.step()


def forward(net: Any, optimizer: Any, inputs: Any, label: Tensor) -> None:
    net(*inputs)


def forward_and_backward(net: Any, optimizer: Any, inputs: Any, label: Tensor) -> None:
    LOSS(net(*inputs), label).backward()


def without_gradients(net: Any, optimizer: Any, inputs: Any, label: Tensor) -> None:
    with torch.no_grad():
        net(*inputs)


@pytest.mark.parametrize("late", [False, True])
def test_whatever_comes_between(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards that no step follows, gradients of several, steps that are eager."""
    monkeypatch.setattr(ParallelWork, "late", late)
    with emulated_gpu.serve():
        loops = Loops()
        loops.each(step, 7)
        assert loops.begun() == [True]
        assert len(loops.recorder.parallel[0].tape._steps) >= 4, "a sort is several launches"
        for other in (forward, forward_and_backward, without_gradients):
            loops.each(other)
            loops.each(step, 2)
            loops.same()
        loops.each(forward_and_backward, 2)  # on top of the last gradients: stepped as always
        loops.each(lambda net, optimizer, *_: optimizer.step())
        loops.each(step, 2)
        loops.same()

        def scaled(net: Any, optimizer: Any, inputs: Any, label: Tensor) -> None:
            optimizer.zero_grad()
            LOSS(net(*inputs), label).backward()
            net.rows.weight.grad.mul_(0.5)
            optimizer.step()

        loops.each(scaled, 2)
        loops.each(step, 2)
        loops.same()
        assert loops.begun() == [True]


def test_forwards_do_it_for_as_long_as_steps_use_it() -> None:
    with emulated_gpu.serve():
        loops = Loops()
        loops.each(step, 7)
        assert [loops.begun() for _ in range(early_sorts._UNUSED + 1)] == [
            *[[True]] * early_sorts._UNUSED, [False]
        ]  # fmt: skip
        loops.each(step, early_sorts._USED - 1)
        assert loops.begun() == [False], "these sorted first"
        loops.same()
        loops.each(step)
        assert loops.begun() == [True]
        loops.each(step, 2)
        loops.same()


def test_a_step_that_is_recorded_anew_has_a_sort_of_its_own() -> None:
    with emulated_gpu.serve():
        loops = Loops(make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.0, weight_decay=0.0))
        loops.each(step, 7)
        for optimizer in loops.optimizers:
            optimizer.param_groups[0]["maximize"] = True
        loops.each(step, 4)
        assert loops.begun() == [False, True]
        loops.same()


@pytest.mark.parametrize("why", ["computed", "no step can be recorded", "no memory"])
def test_where_nothing_is_sorted_apart(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(recorder: Any, run: Any) -> Any:
        record(recorder, run)  # it has run by then, to no effect on the device
        recorder.parallel.clear()
        raise torch.OutOfMemoryError("no memory")

    record, read, make = Pairs.record_parallel, as_given, adagrad
    warns: Any = pytest.warns(RecastWarning, match="without being recorded")
    if why == "computed":
        read = computed
    if why == "no step can be recorded":
        make = torch.optim.RMSprop
    if why == "no memory":
        monkeypatch.setattr(Pairs, "record_parallel", no_memory)
        warns = pytest.warns(
            RecastWarning, match="not beside the forward: OutOfMemoryError: no memory"
        )
    with emulated_gpu.serve():
        loops = Loops(read, make)
        if why == "computed":
            loops.each(step, 8)
        else:
            with warns:
                loops.each(step, 8)
        assert loops.recorder.parallel == []
        assert loops.recorder.recordings == (2 if why == "no step can be recorded" else 3)
        loops.same()
