"""optimizer.step() of a loop left as it is, replayed: the numbers of the plain loop, whatever is
done to gradients, parameters, state and numbers on the way.

Kernels run on the emulator; the recorder is the tape, which repeats what CUDA graphs would.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from test_recorded_models import Ragged, batches
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning
from recast.runtime.recorded import optimizer_step
from recast.runtime.recorded.forward import RecordedForward
from recast.runtime.recorded.gradients.weights_node import WeightsNode
from recast.runtime.rows import optimizer as row_optimizer

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder
from test_recorded_training import LOSS, Pairs, recorded

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each step of an optimizer was replayed (or recorded)."""
    seen: list[bool] = []

    def replayed(optimizer: torch.optim.Optimizer) -> bool:
        seen.append(optimizer_step.step_by_replay(optimizer))
        return seen[-1]

    monkeypatch.setattr(row_optimizer, "instead", [replayed])
    yield seen


# ---------------------------------------------------------------- tables and a dense part


def habit(k: int, model: nn.Module, optimizer: Any, kept: list[Any]) -> None:
    """What step ``k`` does between backward and the next."""
    first = next(iter(model.emb)).weight
    dense = [p for p in model.parameters() if p.dim() == 1]
    kind = (k - 6) // 2 % 13 if k >= 6 and k % 2 == 0 else 0  # every second step is as any other
    if kind == 1:
        optimizer.param_groups[0]["lr"] *= 0.5
    if kind == 2:
        kept.append(dense[0].grad)
    if kind == 3:
        kept.append(dense[0].grad.view(-1))
    if kind == 4:
        kept.append(dense[0].grad.data)
    if kind == 5:
        dense[0].grad.data.clamp_(-1e-4, 1e-4)  # no version counts this
    if kind == 6:
        first.grad.mul_(0.5)
    if kind == 7:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if kind == 8:
        dense[0].data = dense[0].data.clone()
    if kind == 9:
        dense[0].grad = dense[0].grad.clone()
    if kind == 10:
        nn.utils.clip_grad_norm_(dense, 1e-3)
    if kind == 11:
        optimizer.step()
    if kind != 12:  # a step that is left out
        optimizer.step()
    optimizer.zero_grad(set_to_none=k % 5 != 4)


def trained(make: Make, count: int, is_recorded: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = Ragged()
    optimizer = make(model.parameters())
    kept: list[Any] = []
    data = batches(count)
    with emulated_gpu.serve():
        net = recorded(model, data[0][0], optimizer)[0] if is_recorded else model
        for k, (inputs, label) in enumerate(data):
            LOSS(net(*inputs), label).backward()
            habit(k, model, optimizer, kept)
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [p.detach() for p in model.parameters()] + state, kept


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda p: torch.optim.Adagrad(p, lr=0.1), 32),
        pytest.param(lambda p: torch.optim.Adagrad(p, lr=0.1), 90, marks=pytest.mark.long),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1), 90, marks=pytest.mark.long),
    ],
    ids=["adagrad", "adagrad-long", "sgd-long"],
)
def test_whatever_is_done_between(make: Make, count: int, steps: list[bool]) -> None:
    ours, kept = trained(make, count, True)
    assert sum(steps) >= count // 4, steps
    theirs, expected = trained(make, count, False)
    for a, b in zip([*ours, *kept], [*theirs, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- a dense model, so without kernels


class Both:
    """A recorded model and a plain one, trained alike."""

    def __init__(self, make: Make, rows: int = 4) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        self.plain = copy.deepcopy(model)
        self.fast = recast.optimize(model, example=torch.randn(rows, 3), passes=())
        self.optimizers = [make(self.fast.parameters()), make(self.plain.parameters())]
        self.recorder = Pairs(self.optimizers[0])
        vars(self.fast)["_replays"] = RecordedForward(self.fast, TapeRecorder(), self.recorder)
        self.k = 0

    def step(self, rows: int = 4, after: Callable[[nn.Module, Any], None] | None = None) -> None:
        self.k += 1
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(self.k))
        for net, optimizer in zip((self.fast, self.plain), self.optimizers, strict=True):
            optimizer.zero_grad()
            F.softplus(net(x)).sum().backward()
            if after is None:
                optimizer.step()
            else:
                after(net, optimizer)

    def same(self) -> None:
        for a, b in zip(self.fast.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a.grad, b.grad)
        ours, theirs = (o.state_dict()["state"] for o in self.optimizers)
        torch.testing.assert_close(ours, theirs)


MAKES: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_schedule_and_batches_of_two_forms(name: str, steps: list[bool]) -> None:
    with emulated_gpu.serve() if name == "adam" else contextlib.nullcontext():
        both = Both(MAKES[name])
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in both.optimizers]
        for k in range(18):
            both.step(4 if k < 9 or k % 2 else 5)
            for schedule in schedules:
                schedule.step()
            both.same()
    assert sum(steps) >= 6


def test_hooks_are_called_and_see_the_step(steps: list[bool]) -> None:
    both = Both(MAKES["adagrad"])
    calls: list[str] = []
    for optimizer in both.optimizers:
        optimizer.register_step_pre_hook(
            lambda o, *_: [p.grad.mul_(0.5) for g in o.param_groups for p in g["params"]] and None
        )
        optimizer.register_step_post_hook(lambda o, *_: calls.append("after"))
    for _ in range(9):
        both.step()
        both.same()
    assert calls == ["after"] * 18 and sum(steps) >= 3


def test_two_optimizers_and_parts_of_a_model(steps: list[bool]) -> None:
    both = Both(MAKES["sgd"])
    second = [torch.optim.Adagrad(net[2].parameters(), lr=0.05) for net in (both.fast, both.plain)]
    for optimizer, net in zip(both.optimizers, (both.fast, both.plain), strict=True):
        optimizer.param_groups[0]["params"] = list(net[0].parameters())
    other = dict(zip(map(id, both.optimizers), second, strict=True))

    def after(net: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        other[id(optimizer)].step()
        net.zero_grad()

    both.recorder._optimizers = (both.optimizers[0], second[0])
    for _ in range(9):
        both.step(after=after)
    for a, b in zip(both.fast.parameters(), both.plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert sum(steps) >= 6 and both.recorder.recordings == 4


def test_an_exception_and_a_step_between_forward_and_backward(steps: list[bool]) -> None:
    both = Both(MAKES["momentum"])
    for _ in range(7):
        both.step()
    x = torch.ones(4, 3)
    for net, optimizer in zip((both.fast, both.plain), both.optimizers, strict=True):
        with pytest.raises(ZeroDivisionError):
            net(x).sum().backward(torch.tensor(1 / 0))
        loss = net(x).sum()
        replayed = len(steps), sum(steps)
        optimizer.step()  # on the gradients of before: memory of a forward is in use
        assert sum(steps) == replayed[1] and len(steps) == replayed[0] + 1
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
    before = sum(steps)
    both.optimizers[0].zero_grad()
    both.optimizers[1].zero_grad()
    for _ in range(3):
        both.step()
    both.same()
    assert sum(steps) >= before + 2


def test_a_step_of_some_parameters_only(steps: list[bool]) -> None:
    """The rate of a step depends on how many steps each parameter has had."""
    both = Both(MAKES["adagrad"])
    for _ in range(7):
        both.step()

    def some(net: nn.Module, optimizer: Any) -> None:
        net[0].weight.grad = None
        optimizer.step()

    for _ in range(4):
        both.step(after=some)
    replayed = sum(steps)
    with pytest.warns(RecastWarning, match="different numbers of steps"):
        both.step()
    both.step()
    both.same()
    assert sum(steps) == replayed


def test_numbers_that_change_are_followed_until_that_is_too_often(steps: list[bool]) -> None:
    both = Both(MAKES["momentum"])

    def wane(net: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["momentum"] *= 0.99
        optimizer.step()

    for _ in range(7):
        both.step()
    both.step(after=wane)
    for _ in range(3):
        both.step()
    both.same()
    assert steps[-8::2] == [False, True, True, True]
    with pytest.warns(RecastWarning, match=r"SGD\.step\(\) runs without being recorded: its numb"):
        for _ in range(18):
            both.step(after=wane)
    both.same()


def test_a_graph_of_before_the_step_refuses_to_go_on() -> None:
    both = Both(MAKES["sgd"])
    for _ in range(7):
        both.step()
    weight = both.fast[0].weight
    product = (weight * weight).sum()
    both.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_step_holds_no_optimizer_and_no_state() -> None:
    both = Both(MAKES["adagrad"])
    for _ in range(8):
        both.step()
    assert both.recorder.recordings == 3
    state = next(iter(both.optimizers[0].state.values()))
    gone = [weakref.ref(both.optimizers[0]), weakref.ref(state["sum"])]
    del state
    both.recorder._optimizers = ()
    both.recorder._now = both.recorder._forward = None
    both.optimizers = [MAKES["sgd"](net.parameters()) for net in (both.fast, both.plain)]
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    for _ in range(4):
        both.step()
    for a, b in zip(both.fast.parameters(), both.plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert both.recorder.recordings == 4


def test_what_cannot_be_recorded_is_told_once(steps: list[bool]) -> None:
    both = Both(lambda p: torch.optim.RMSprop(p, lr=0.1))
    with pytest.warns(
        RecastWarning, match=r"RMSprop\.step\(\) runs without being recorded"
    ) as told:
        for _ in range(12):
            both.step()
    both.same()
    assert len(told) == 1 and not any(steps)


# ---------------------------------------------------------------- where gradients go


def test_who_else_asks_for_gradients(steps: list[bool]) -> None:
    """Hooks, backward(inputs=...), autograd.grad: as of any graph."""
    both = Both(MAKES["adagrad"])
    for _ in range(7):
        both.step()
    seen: list[str] = []
    handles = []
    for net in (both.fast, both.plain):
        handles.append(net[0].weight.register_hook(lambda g: g * 2))
        handles.append(
            net[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
        )
        node = net[0].bias.expand_as(net[0].bias).grad_fn.next_functions[0][0]
        handles.append(node.register_prehook(lambda grads: (grads[0] + 1,)))
        handles.append(node)  # a node that is not held loses its hook
    both.step()
    both.same()
    assert seen == ["after"] * 2
    for handle in handles:
        if hasattr(handle, "remove"):
            handle.remove()
    del node, handle
    handles.clear()
    replayed = sum(steps)
    both.step()
    both.same()
    assert sum(steps) == replayed + 1, "hooks that are gone are in nobody's way"
    x, found = torch.ones(4, 3), []
    for net in (both.fast, both.plain):
        net.zero_grad()
        net(x).sum().backward(inputs=[net[2].bias])
        assert [p.grad is None for p in net.parameters()] == [True, True, True, False]
        found.append(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))
    torch.testing.assert_close(*found)
    both.step()
    both.same()


def test_hooks_that_are_there_before_anything_is_recorded() -> None:
    """They are called at every step, and once they are removed no recording calls them."""
    both = Both(MAKES["sgd"])
    handles = [net[0].bias.register_hook(lambda g: g * 3) for net in (both.fast, both.plain)]
    for _ in range(7):
        both.step()
        both.same()
    assert both.recorder.recordings >= 2
    for handle in handles:
        handle.remove()
    for _ in range(3):
        both.step()
        both.same()


@pytest.mark.parametrize("what", ["stream", "processes"])
def test_where_the_engine_brings_gradients(
    what: str, steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another stream than before, and where processes talk to each other."""
    both = Both(MAKES["momentum"])
    for _ in range(7):
        both.step()
    if what == "stream":
        monkeypatch.setattr(WeightsNode, "_current", lambda self: both.k % 3)
    else:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    before = sum(steps)
    for _ in range(4):
        both.step()
        both.same()
    assert sum(steps) - before == (4 if what == "stream" else 0)
