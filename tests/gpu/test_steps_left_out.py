"""What a replay of a whole step would leave out is not left out in silence: such steps run as
always, and say why once. And what a step has in it that is not the model's: state, losses.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import recast
from recast.errors import IdError, RecastWarning
from recast.runtime import checked
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import Pairs, TapeRecorder
from test_training_step import SGD, Net, batches

LOSS = F.binary_cross_entropy_with_logits
DATA = list(batches(20))


class Steps:
    """A recorded step and its twin, a plain loop, which is compared after every step."""

    def __init__(self, loss: Any = LOSS, make: Any = None, more: Any = ()) -> None:
        torch.manual_seed(0)
        self.plain = Net()
        self.fast, self.loss = copy.deepcopy(self.plain), loss
        self.losses = loss, copy.deepcopy(loss)
        make = make or (lambda p: SGD(p, lr=0.1, momentum=0.9))
        self.theirs = make([*self.plain.parameters(), *copy.deepcopy(more)])
        self.ours = make([*self.fast.parameters(), *more])
        self.recorder = TapeRecorder(self.ours)
        self.step = TrainingStep(self.fast, loss, self.ours, recorder=self.recorder)

    def run(self, count: int) -> int:
        """Steps; how many of them were replays, the first of a recording included."""
        before = self.recorder.replays + self.recorder.recordings
        for inputs, labels in DATA[:count]:
            self.theirs.zero_grad()
            expected = self.losses[1](self.plain(*inputs), labels)
            expected.backward()
            self.theirs.step()
            torch.testing.assert_close(self.step(inputs, labels), expected.detach())
        for a, b in zip(self.plain.parameters(), self.fast.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        return self.recorder.replays + self.recorder.recordings - before


def told(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", RecastWarning)
        run()
    return [str(w.message) for w in found if "without being recorded" in str(w.message)]


def count(calls: list[int]) -> Callable[..., None]:
    return lambda *args: calls.append(1)


# Of each kind of hook how it is registered, and who has it.
HOOKS: dict[str, tuple[str, Callable[[Steps, Any], Any]]] = {
    "of a layer": ("a module", lambda s, hook: s.fast.top[0].register_forward_hook(hook)),
    "of the model": ("a module", lambda s, hook: s.fast.register_forward_pre_hook(hook)),
    "of its backward": ("a module", lambda s, hook: s.fast.top.register_full_backward_hook(hook)),
    "of all modules": (
        "a module", lambda s, hook: nn.modules.module.register_module_forward_hook(hook)
    ),
    "of a parameter": (
        "a parameter", lambda s, hook: s.fast.top[0].weight.register_hook(hook)
    ),
    "after its gradient": (
        "a parameter", lambda s, hook: s.fast.bags.weight.register_post_accumulate_grad_hook(hook)
    ),
    "of the optimizer": ("SGD", lambda s, hook: s.ours.register_step_pre_hook(hook)),
    "of all optimizers": ("SGD", lambda s, hook: register_optimizer_step_post_hook(hook)),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_called(kind: str) -> None:
    """Whether they are there before anything is recorded, or come when steps are replayed."""
    who, register = HOOKS[kind]
    steps, calls = Steps(), list[int]()
    handle = register(steps, count(calls))
    try:
        first = told(lambda: steps.run(5))
        before = len(calls)
        assert before >= 5 and len(first) == 1
        assert first[0].startswith("TrainingStep") and f"{who} has" in first[0]
    finally:
        handle.remove()
    assert not told(lambda: steps.run(4)) and len(calls) == before
    assert steps.run(2) == 2
    handle = register(steps, count(calls))
    try:
        assert steps.run(3) == 0 and len(calls) >= before + 3
    finally:
        handle.remove()
    assert steps.run(2) == 2, "hooks that are gone are in nobody's way"


def test_hooks_for_saved_tensors_are_called() -> None:
    steps = Steps()
    steps.run(6)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        said = told(lambda: steps.step(*DATA[0]))
    assert len(said) == 1 and "hooks for saved tensors" in said[0]
    before = steps.recorder.replays
    steps.step(*DATA[0])
    assert steps.recorder.replays == before + 1


# ---------------------------------------------------------------- checks


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.top = nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.rows(ids)).squeeze(1)


@pytest.mark.parametrize("way", ["eval", "train", "step"])
def test_ids_are_checked_where_that_was_asked_for(way: str) -> None:
    ids, label = torch.arange(6), torch.ones(6)
    bad = ids.clone()
    bad[3] = 20
    optimizer = SGD((model := Looked()).parameters(), lr=0.1)
    fast, _ = recast.optimize(model, optimizer, example=ids)
    step = TrainingStep(fast, LOSS, optimizer, recorder=TapeRecorder(optimizer))
    recorders = TapeRecorder(), Pairs(optimizer)
    vars(fast)["_replays"] = None if way == "step" else RecordedForward(fast, *recorders)

    def run(ids: Tensor) -> Tensor:
        if way == "step":
            return step(ids, label)
        with torch.set_grad_enabled(way == "train"):
            out: Tensor = fast(ids)
        if way == "train":
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return out

    with emulated_gpu.serve():
        for _ in range(6):
            run(ids)

        def look() -> None:
            with checked.checked():
                with pytest.raises(IdError, match=r"\b20\b"):
                    run(bad)
                apart = 0 if way == "eval" else 1  # a step in between changes the numbers
                torch.testing.assert_close(run(ids), run(ids), rtol=apart, atol=apart)

        said = told(look)
        assert len(said) == 1 and "ids are checked" in said[0]
        assert not told(lambda: run(ids))
    assert step.recorded == (way == "step")


def test_anomalies_are_looked_for() -> None:
    steps = Steps()
    assert steps.run(6) == 3
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        said = told(lambda: steps.run(2))
        assert steps.run(1) == 0
    assert len(said) == 1 and "detect_anomaly" in said[0]
    assert steps.run(1) == 1


# ---------------------------------------------------------------- what else a step repeats


def test_a_tensor_of_the_optimizer_that_is_replaced() -> None:
    steps = Steps()
    assert steps.run(6) == 3
    for model, optimizer in ((steps.plain, steps.theirs), (steps.fast, steps.ours)):
        state = optimizer.state[model.top[0].weight]
        state["momentum_buffer"] = torch.ones_like(state["momentum_buffer"])
    assert steps.run(5) == 2
    momentum = [
        o.state[m.top[0].weight]["momentum_buffer"]
        for m, o in ((steps.plain, steps.theirs), (steps.fast, steps.ours))
    ]
    torch.testing.assert_close(*momentum)


class Weighted(nn.Module):
    """A loss with a layer of torch's and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, out: Tensor, label: Tensor) -> Tensor:
        return self.inner(out * self.scale, label)


@pytest.mark.parametrize("change", ["weight", "reduction", "frozen", "forward"])
def test_a_loss_that_is_a_module_is_looked_at(change: str) -> None:
    loss = Weighted()
    steps = Steps(loss, more=[loss.scale])
    steps.losses[1].scale = steps.theirs.param_groups[0]["params"][-1]
    assert steps.run(6) == 3
    for one in steps.losses:
        if change == "weight":
            one.inner.pos_weight = torch.tensor(5.0)
        elif change == "reduction":
            one.inner.reduction = "sum"
        elif change == "frozen":
            one.scale.requires_grad_(False)
        else:
            one.forward = lambda out, label: LOSS(out, label) * 3
    assert steps.run(4) == 3
    torch.testing.assert_close(*(one.scale for one in steps.losses))


def test_the_forward_of_a_module_that_is_replaced() -> None:
    steps = Steps()
    assert steps.run(6) == 3
    for net in (steps.plain, steps.fast):
        inner = net.forward
        net.forward = lambda *args, inner=inner: inner(*args) * 2  # type: ignore[method-assign]
    assert steps.run(4) == 3


def test_gradients_of_before_a_replay_are_gone_after_it() -> None:
    steps = Steps()
    assert steps.run(6) == 3
    (inputs, labels), *_ = DATA
    buffers = copy.deepcopy(dict(steps.fast.named_buffers()))
    LOSS(steps.fast(*inputs), labels).backward()
    steps.fast.load_state_dict(buffers, strict=False)  # batch norm has seen them
    assert steps.run(1) == 1
    assert all(p.grad is None for p in steps.fast.parameters())
