"""Models whose forward calls functions that leave torch are run, not recorded: a replay would
repeat what such a function returned once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning
from recast.rewriter.compiled.module import Compiled
from recast.runtime.recorded import forward as recorded_forward
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder

SCALE = [1.0]


def drawn(x: Tensor) -> Tensor:
    """The batch in reverse, times a number that another part of the program sets."""
    return torch.tensor(x.tolist()[::-1]) * SCALE[0]


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(drawn(x)) + self.first(x).relu().sum(1, keepdim=True)


class Plain(Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + self.first(x).relu().sum(1, keepdim=True)


def batch(seed: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["optimised", "in place", "inside"])
def nets(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The model as it was, and what runs it: the result, the model itself, or a module around."""
    SCALE[0] = 1.0
    model, twin = Drawing(), Drawing()
    fast = recast.optimize(model, example=batch(0), inplace=request.param == "in place")
    assert any("drawn" in line for line in str(fast.graph).splitlines())
    runs = {"optimised": fast, "in place": model, "inside": nn.Sequential(fast)}
    yield twin, runs[request.param]


def scaled(k: int) -> Tensor:
    """Batch k, at the time of that scale."""
    SCALE[0] = k + 1.0
    return batch(k)


@pytest.mark.parametrize("grad", [False, True])
def test_mode_graph_runs_them_as_always(nets: tuple[nn.Module, nn.Module], grad: bool) -> None:
    plain, fast = nets
    recorder = TapeRecorder()
    replays = RecordedForward(fast, recorder)
    with torch.set_grad_enabled(grad):
        wanted = [plain(scaled(k)) for k in range(6)]
        with pytest.warns(RecastWarning, match=r"drawn\(\).*leaves torch") as told:
            found = [replays(lambda args, kwargs: fast(*args), (scaled(k),), {}) for k in range(6)]
    assert len(told) == 1 and recorder.recordings == 0
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert found[0].requires_grad is grad


def test_training_steps_are_not_recorded(nets: tuple[nn.Module, nn.Module]) -> None:
    plain, fast = nets
    recorder, target = TapeRecorder(), torch.ones(5, 1)
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = TrainingStep(fast, F.mse_loss, optimizer, recorder=recorder, warmup=1)
    with pytest.warns(RecastWarning, match=r"drawn\(\).*leaves torch"):
        found = [step(scaled(k), target) for k in range(5)]
    assert recorder.recordings == step.recorded == 0
    for k in range(5):
        own.zero_grad()
        loss = F.mse_loss(plain(scaled(k)), target)
        loss.backward()
        own.step()
        torch.testing.assert_close(found[k], loss.detach())


def test_a_reason_of_the_caller() -> None:
    """As ``optimize`` gives for a forward that is not captured whole."""
    fast, recorder = recast.optimize(Plain(), example=batch(0)), TapeRecorder()
    replays = RecordedForward(fast, recorder, why="no reason")
    with pytest.warns(RecastWarning, match="being recorded: no reason"), torch.no_grad():
        for k in range(6):
            replays(lambda args, kwargs: fast(*args), (batch(k),), {})
    assert recorder.recordings == 0


def test_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_forward, "device_for", lambda model: torch.device("cpu"))
    fast = recast.optimize(Drawing(), example=batch(0), mode="graph")
    (note,) = [n for n in fast.report.notes if n.startswith('mode="graph"')]
    assert "nothing is recorded: drawn() (test_recorded_outside.py:" in note
    with pytest.warns(RecastWarning, match="runs without being recorded"):
        fast(batch(1))


def test_others_are_recorded() -> None:
    """The control: the same without that function."""
    fast = recast.optimize(Plain(), example=batch(0))
    assert isinstance(fast, Compiled) and fast.why_not_recordable() is None
    recorder = TapeRecorder()
    replays = RecordedForward(fast, recorder)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for k in range(6):
            replays(lambda args, kwargs: fast(*args), (batch(k),), {})
    assert recorder.recordings == 1
