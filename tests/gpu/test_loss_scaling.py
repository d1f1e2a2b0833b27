"""TrainingStep with a GradScaler steps, skips and scales as the plain loop does."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder

Make = Callable[[Any], list[torch.optim.Optimizer]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 8, mode="sum")
        self.top = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        return self.top(torch.cat([dense, self.bags(ids)], 1)).squeeze(1)


def loss_of(output: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, labels) * weight


def batches(bad: set[int], device: str, count: int = 12) -> list[Any]:
    """Batches; in the ``bad`` ones the loss is infinite, and so are the gradients."""
    g = torch.Generator().manual_seed(0)
    found = []
    for k in range(count):
        inputs = torch.randn(6, 4, generator=g), torch.randint(50, (6, 3), generator=g)
        weight = torch.tensor(float("inf") if k in bad else 1.0)
        targets = torch.rand(6, generator=g).round(), weight
        found.append([tuple(t.to(device) for t in part) for part in (inputs, targets)])
    return found


def scaler_of(device: str) -> GradScaler:
    return GradScaler(device, init_scale=64.0, growth_interval=3)


def twins(
    make: Make, bad: set[int], device: str = "cpu", clip: float | None = None
) -> tuple[TrainingStep, TapeRecorder | None]:
    """Train with a plain loop and with TrainingStep; compare everything after every step."""
    torch.manual_seed(3)
    plain = Net().to(device)
    fast = copy.deepcopy(plain)
    theirs, ours = make(plain), make(fast)
    scalers = scaler_of(device), scaler_of(device)

    def limit(model: nn.Module) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    recorder = TapeRecorder(*ours) if device == "cpu" else None
    step = TrainingStep(
        fast, loss_of, ours, scaler=scalers[1], recorder=recorder,
        before_step=None if clip is None else lambda: limit(fast),
    )  # fmt: skip
    for inputs, targets in batches(bad, device):
        plain.zero_grad()
        loss = loss_of(plain(*inputs), *targets)
        scalers[0].scale(loss).backward()
        if clip is not None:
            for optimizer in theirs:
                scalers[0].unscale_(optimizer)
            limit(plain)
        for optimizer in theirs:
            scalers[0].step(optimizer)
        scalers[0].update()
        torch.testing.assert_close(step(inputs, *targets), loss.detach())
        assert scalers[0].state_dict() == scalers[1].state_dict()
        for p, q in zip(plain.parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(p, q)
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(a.state_dict()["state"], b.state_dict()["state"])
    assert all(bool(p.isfinite().all()) for p in fast.parameters())
    return step, recorder


def sgd(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def adagrad(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1)]


def both(model: Any) -> list[torch.optim.Optimizer]:
    tables = torch.optim.Adagrad(model.bags.parameters(), lr=0.1)
    return [tables, torch.optim.SGD(model.top.parameters(), lr=0.1)]


def adam(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)]


def fused(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True, fused=True)]


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("make", [sgd, adagrad, both])
def test_the_numbers_of_the_plain_loop(make: Make, clip: float | None) -> None:
    """The recorded step, two in the middle and the last are skipped."""
    _, recorder = twins(make, {4, 7, 8, 11}, clip=clip)
    assert recorder is not None
    assert (recorder.recordings, recorder.replays) == (1, 7)


def test_nothing_is_recorded_before_a_step_was_taken() -> None:
    """Optimizers create their state in it; a scale that is too large at first is usual."""
    _, recorder = twins(sgd, {0, 1, 2, 3, 4})
    assert recorder is not None
    assert recorder.recordings == 1 and recorder.replays > 0


def test_what_the_scaler_is_made_with_is_looked_at() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, recorder = scaler_of("cpu"), TapeRecorder(optimizer)
    step = TrainingStep(model, loss_of, optimizer, scaler=scaler, recorder=recorder)
    for k, (inputs, targets) in enumerate(batches(set(), "cpu")):
        if k == 7:
            scaler.set_growth_interval(50)
        step(inputs, *targets)
    assert recorder.recordings == 2


def test_a_scaler_that_is_off_changes_nothing() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = TapeRecorder(optimizer)
    off = GradScaler("cpu", enabled=False)
    step = TrainingStep(model, loss_of, optimizer, scaler=off, recorder=recorder)
    for inputs, targets in batches(set(), "cpu", 6):
        step(inputs, *targets)
    assert recorder.replays == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.parametrize("make", [sgd, adagrad, both, adam, fused])
def test_with_cuda_graphs(make: Make) -> None:
    step, _ = twins(make, {4, 7, 8, 11}, device="cuda")
    assert step.recorded == 1
