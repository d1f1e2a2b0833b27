"""Kernels that a recording asks for and no step as always has used: a capture cannot load them.

A batch is copied to memory of its own, which is read 16 bytes at a time; the steps before, which
run as always, may have had slices of a wider matrix, of which other kernels read.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu.check.recorded_models import Dots
from tape import TapeRecorder
from test_recorded_training import recorded
from torch import nn

import recast
from recast.errors import KernelError, RecastWarning
from recast.runtime.gpu import cuda_launch
from recast.runtime.gpu.gpu import Cuda
from recast.runtime.recorded.training_step import TrainingStep

LOSS = F.binary_cross_entropy_with_logits


def sliced() -> list[Any]:
    """Vectors that start between multiples of 16 bytes."""
    g = torch.Generator().manual_seed(0)
    return [
        (
            (torch.randn(9, 41, generator=g)[:, 1:9],
             [torch.randint(50, (9, 2), generator=g) for _ in range(3)]),
            torch.rand(9, generator=g).round(),
        )
        for _ in range(14)
    ]  # fmt: skip


def models() -> tuple[Dots, Dots, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    plain = Dots()
    twin = copy.deepcopy(plain)
    return plain, twin, [torch.optim.Adagrad(net.parameters(), lr=0.1) for net in (plain, twin)]


def taught(plain: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    for inputs, label in data:
        optimizer.zero_grad()
        LOSS(plain(*inputs), label).backward()
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that recordings were refused."""
    found: list[str] = []
    refusal = cuda_launch.refusal

    def noted(name: str, load: Callable[[], object]) -> KernelError:
        found.append(name)
        return refusal(name, load)

    monkeypatch.setattr(cuda_launch, "refusal", noted)
    return found


def test_what_only_recordings_launch_can_be_loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[object] = []
    monkeypatch.setattr(cuda_launch, "warm", warmed.append)
    monkeypatch.setattr(cuda_launch, "on_device", lambda index: nullcontext())
    kernel: Any = object()
    Cuda.warm(SimpleNamespace(device=torch.device("cuda", 0)), kernel)  # type: ignore[arg-type]
    assert warmed == [kernel]


def test_a_whole_step_of_slices_is_recorded(refusals: list[str]) -> None:
    (plain, twin, (theirs, ours)), data = models(), sliced()
    taught(plain, theirs, data)
    with emulated_gpu.serve(loads=True), warnings.catch_warnings():
        warnings.simplefilter("error", RecastWarning)
        fast, ours = recast.optimize(twin, ours, example=data[0][0])
        recorder = TapeRecorder(ours)
        step = TrainingStep(fast, LOSS, ours, recorder=recorder)
        for inputs, label in data:
            step(inputs, label)
    assert refusals == ["dot_backward"]
    assert step.recorded == 1 and recorder.replays == len(data) - 5
    same(plain, twin)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_loop_left_as_it_is_is_recorded(forgets: bool, refusals: list[str]) -> None:
    """``forgets``: no kernel is loaded where the optimizer's step is to be recorded."""
    (plain, twin, (theirs, ours)), data = models(), sliced()
    taught(plain, theirs, data)
    with emulated_gpu.serve(loads=True) as emulated, warnings.catch_warnings():
        warnings.simplefilter("error", RecastWarning)
        fast, recorder = recorded(twin, data[0][0], ours)
        assert emulated.loaded is not None
        for inputs, label in data:
            ours.zero_grad()
            LOSS(fast(*inputs), label).backward()
            if forgets and recorder.recordings == 3 and not recorder.parallel:
                emulated.loaded.clear()
            ours.step()
    # The sort is tried again at once, the step when it comes again.
    sort = ["linearise", "scan_counts", "scatter", "find_tables", "row_update"]
    assert refusals == ["dot_backward", *(sort if forgets else [])]
    assert recorder.parallel and recorder.replays > 9
    same(plain, twin)
