"""What changes under a recorded loop is seen: tensors in other shapes, state and groups replaced,
optimizers with code of their own, and forms of batches that come later.

The recorder is the tape, which repeats what CUDA graphs would.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from tape import TapeRecorder
from test_recorded_step import MAKES, Both
from torch import Tensor, nn

from recast.errors import RecastWarning
from recast.runtime.recorded import optimizer_step
from recast.runtime.recorded.gradients.weights_node import WeightsNode
from recast.runtime.recorded.state.same import shapes_of
from recast.runtime.recorded.training_step import TrainingStep
from recast.runtime.rows import optimizer as row_optimizer


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each step of an optimizer was replayed (or recorded)."""
    seen: list[bool] = []

    def replayed(optimizer: torch.optim.Optimizer) -> bool:
        seen.append(optimizer_step.step_by_replay(optimizer))
        return seen[-1]

    monkeypatch.setattr(row_optimizer, "instead", [replayed])
    yield seen


# ---------------------------------------------------------------- mode="graph"


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_steps_go_on_being_replayed_once_a_second_form_is_recorded(
    name: str, steps: list[bool]
) -> None:
    both = Both(MAKES[name])
    for k in range(24):
        both.step(4 if k < 8 or k % 4 else 5)
        both.same()
    assert all(steps[::2][-6:])  # the plain one's steps, which are none of ours, are the others


def test_a_step_of_its_own_is_not_recorded(steps: list[bool]) -> None:
    class Slower(torch.optim.Optimizer):
        """Its rate is a number of the host."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "capturable": True})
            self.k = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.k += 1
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-group["lr"] / self.k)

    both = Both(Slower)
    with pytest.warns(RecastWarning, match=r"a step\(\) of its own"):
        for _ in range(9):
            both.step()
    both.same()
    assert not any(steps)


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_counts_of_steps_that_are_replaced(name: str) -> None:
    with emulated_gpu.serve():
        both = Both(MAKES[name])
        for k in range(14):
            if k == 9:
                for optimizer in both.optimizers:
                    for state in optimizer.state.values():
                        state["step"] = torch.tensor(0.0)
            both.step()
    both.same()


@pytest.mark.parametrize("some", [True, False], ids=["one", "all"])
def test_counts_of_steps_that_are_written_to(some: bool, steps: list[bool]) -> None:
    with emulated_gpu.serve():
        both = Both(MAKES["adam"])
        for k in range(14):
            if k == 9:
                assert steps[-2]
                for optimizer in both.optimizers:
                    for state in list(optimizer.state.values())[-1 if some else 0 :]:
                        state["step"].fill_(1.0)
            if some and k == 9:
                with pytest.warns(RecastWarning, match="different numbers of steps"):
                    both.step()
            else:
                both.step()
            both.same()
    assert steps[-2] != some


def transposed(net: nn.Module, optimizer: Any) -> None:
    net[0].weight.data = net[0].weight.data.t()
    optimizer.step()


def test_a_weight_that_lies_otherwise_at_the_same_address() -> None:
    both = Both(MAKES["sgd"])
    square = [nn.Linear(3, 3) for _ in range(2)]
    square[1].load_state_dict(square[0].state_dict())
    for net, layer in zip((both.fast, both.plain), square, strict=True):
        net[0].weight.data, net[0].bias.data = layer.weight.data, layer.bias.data
        net[2].weight.data = net[2].weight.data[:, :3].clone()
    for k in range(16):
        both.step(after=transposed if k == 9 else None)
    both.same()


def test_a_weight_that_grows() -> None:
    """The recorder would hold its node as well, which CUDA graphs do not: so without one."""
    weight = nn.Parameter(torch.ones(3))
    node = WeightsNode([weight])
    weight.data = torch.ones(4)
    with pytest.raises(RuntimeError, match="invalid gradient"):
        (weight * 2).sum().backward()
    node.prepare_for_eager()
    (weight * 2).sum().backward()
    assert weight.grad is not None and weight.grad.shape == (4,)
    assert node.output().grad_fn is not None


def test_a_hook_that_holds_its_optimizer_does_not_keep_it() -> None:
    class Trainer:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            optimizer.register_step_post_hook(self.stepped)

        def stepped(self, *_: Any) -> None:
            pass

    both = Both(MAKES["adagrad"])
    Trainer(both.optimizers[0])
    for _ in range(9):
        both.step()
    gone = weakref.ref(both.optimizers[0])
    both.recorder._optimizers = ()
    both.recorder._now = both.recorder._forward = None
    both.optimizers = [MAKES["sgd"](net.parameters()) for net in (both.fast, both.plain)]
    for _ in range(9):
        both.step()
    gc.collect()
    assert gone() is None


def test_optimizers_of_other_models_are_not_spoken_of() -> None:
    both, other = Both(MAKES["sgd"]), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)

    def after(net: nn.Module, own: Any) -> None:
        own.step()
        optimizer.zero_grad()
        other(torch.ones(1, 3)).sum().backward()
        optimizer.param_groups[0]["momentum"] *= 0.99
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(24):
            both.step(after=after)
    assert both.recorder.recordings == 3  # a forward, its backward and its step


# ---------------------------------------------------------------- TrainingStep

Change = Callable[[nn.Module, torch.optim.Optimizer], None]


def removed(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def moved(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def turned(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net[0].weight.data = net[0].weight.data.t()


@pytest.mark.parametrize("change", [removed, moved, turned])
def test_a_training_step_sees(change: Change) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    nets = [model, copy.deepcopy(model)]
    optimizers = [
        torch.optim.SGD(
            [{"params": list(net[0].parameters())}, {"params": net[2].parameters(), "lr": 0.3}],
            lr=0.1,
        )
        for net in nets
    ]
    step = TrainingStep(nets[0], F.mse_loss, optimizers[0], recorder=TapeRecorder(optimizers[0]))
    losses: list[Tensor] = []
    for k in range(12):
        g = torch.Generator().manual_seed(k)
        x, y = torch.randn(4, 3, generator=g), torch.randn(4, 1, generator=g)
        if k == 7:
            for net, optimizer in zip(nets, optimizers, strict=True):
                change(net, optimizer)
        losses.append(step(x, y).clone())
        optimizers[1].zero_grad()
        loss = F.mse_loss(nets[1](x), y)
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(losses[-1], loss.detach())
    assert step.recorded
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("part", "apart"), [(slice(1), 0), (slice(-1, None), 0), (slice(None), 0), (slice(None), 1)]
)
def test_a_training_step_sees_a_count_of_steps_written_to(part: slice, apart: int) -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
    with emulated_gpu.serve(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recorder = TapeRecorder(optimizers[0])
        step = TrainingStep(nets[0], F.mse_loss, optimizers[0], recorder=recorder)
        for k in range(12):
            x, y = torch.linspace(k, 1, 12).view(4, 3), torch.linspace(1, 0, 4).view(4, 1)
            if k == 7:
                assert step.recorded
                for optimizer in optimizers:
                    for n, state in enumerate(list(optimizer.state.values())[part]):
                        state["step"].add_(n * apart - 5)
            step(x, y)
            optimizers[1].zero_grad()
            F.mse_loss(nets[1](x), y).backward()
            optimizers[1].step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert any("different numbers of steps" in str(w.message) for w in told) == (
        part != slice(None) or apart > 0
    )


def test_a_training_step_with_frozen_layers_that_had_steps_is_recorded() -> None:
    """Their step counts fall behind by one more with each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    x, y = torch.rand(4, 3), torch.rand(4, 1)
    F.mse_loss(net(x), y).backward()
    optimizer.step()
    net[0].requires_grad_(False)
    with emulated_gpu.serve():
        recorder = TapeRecorder(optimizer)
        step = TrainingStep(net, F.mse_loss, optimizer, recorder=recorder)
        for _ in range(8):
            step(x, y)
    assert step.recorded == recorder.recordings == 1


def test_state_loaded_again_and_again() -> None:
    """A new state may reuse the memory, and so the identity, of an old one."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    step = TrainingStep(model, F.mse_loss, optimizer, recorder=TapeRecorder(optimizer))
    for _ in range(5):
        step(torch.ones(4, 3), torch.ones(4, 1))
    known, saved = {id(optimizer.state)}, copy.deepcopy(optimizer.state_dict())
    for _ in range(100):
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert id(optimizer.state) not in known


def test_shapes_and_strides_are_told_apart() -> None:
    base = torch.zeros(24)
    wide, tall, cut = base[:8].view(2, 4), base[:8].view(4, 2), base.view(2, 12)
    forms = [wide, tall, tall.t(), wide.t(), cut[:, :8:2], cut[:, ::3], base[:8], base[:16:2]]
    found = [shapes_of([t]) for t in forms]
    assert len(set(found)) == len(forms)
    assert found == [shapes_of([t.detach()]) for t in forms]
