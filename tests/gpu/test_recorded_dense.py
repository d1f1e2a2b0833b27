"""TrainingStep with float32 parameters: each group is stepped by one launch, replayed; the numbers
are those of the plain loop, whatever the rate and the groups.
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
from test_loss_scaling import Net, batches, twins
from torch import nn

from recast.errors import RecastWarning
from recast.runtime import tolerances
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder

SGD, ADAGRAD, ADAM, ADAMW = (
    torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
)  # fmt: skip
LOSS = F.binary_cross_entropy_with_logits


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": list(model.top.parameters()), "weight_decay": 0.1},
        {"params": list(model.bags.parameters()), "lr": 0.02},
    ]


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda m: ADAGRAD(groups(m), lr=0.1, lr_decay=0.1),
    "adam": lambda m: ADAM(m.parameters(), lr=0.01),
    "adamw": lambda m: ADAMW(groups(m), lr=0.01, amsgrad=True),
}


def train(make: Any, schedule: bool, steps: int = 9) -> tuple[TapeRecorder, list[str]]:
    """The same loop by TrainingStep, in plain torch, and there in float64."""
    torch.manual_seed(3)
    plain = Net()
    nets = copy.deepcopy(plain), plain, copy.deepcopy(plain).double()
    ours, *theirs = [make(net) for net in nets]
    recorder = TapeRecorder(ours)
    step = TrainingStep(nets[0], LOSS, ours, recorder=recorder)
    data = [(inputs, labels) for inputs, (labels, _) in batches(set(), "cpu", steps)]

    def slower(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9 if schedule else 1.0

    with emulated_gpu.serve() as emulated:
        for inputs, labels in data:
            step(inputs, labels)
            slower(ours)
    for net, own in zip(nets[1:], theirs, strict=True):
        dtype = next(net.parameters()).dtype
        for (dense, ids), labels in data:
            own.zero_grad()
            LOSS(net(dense.to(dtype), ids), labels.to(dtype)).backward()
            own.step()
            slower(own)
    for a, b, c in zip(*(net.parameters() for net in nets), strict=True):
        assert tolerances.excess(a, b, c) <= tolerances.CHAIN
        for key, held in theirs[0].state[b].items():
            mine = ours.state[nets[0].get_parameter(names(nets[1])[b])][key]
            assert float(mine) == float(held) if key == "step" else mine.shape == held.shape
    return recorder, steps_of(emulated)


def steps_of(emulated: Any) -> list[str]:
    """What was launched, but for batches that were copied."""
    return [name for name in emulated.launched if name != "copy_tensors"]


def names(net: nn.Module) -> dict[Any, str]:
    return {p: name for name, p in net.named_parameters()}


@pytest.mark.parametrize("schedule", [False, True], ids=["rate", "schedule"])
@pytest.mark.parametrize("name", MAKES)
def test_the_numbers_of_the_plain_loop(name: str, schedule: bool) -> None:
    recorder, launched = train(MAKES[name], schedule)
    assert (recorder.recordings, recorder.replays) == (1, 5)
    each = 2 if name in ("adagrad", "adamw") else 1
    assert launched == ["dense_update"] * each * 6


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("kind", [ADAM, ADAGRAD, SGD])
def test_steps_that_loss_scaling_leaves_out(kind: Any, clip: float | None) -> None:
    """They are not counted either, on which Adam's rate depends."""
    with emulated_gpu.serve() as emulated:
        _, recorder = twins(lambda m: [kind(m.parameters(), lr=0.01)], {4, 7, 8, 11}, clip=clip)
    assert recorder is not None
    assert (recorder.recordings, recorder.replays) == (1, 7)
    assert steps_of(emulated) == ["dense_update"] * 8


def test_adam_of_other_dtypes_runs_as_always() -> None:
    net = Net().double()
    optimizer = ADAM(net.parameters(), lr=0.01)
    step = TrainingStep(net, LOSS, optimizer, recorder=TapeRecorder(optimizer))
    with emulated_gpu.serve() as emulated, pytest.warns(RecastWarning, match="capturable=True"):
        for (dense, ids), (labels, _) in batches(set(), "cpu", 6):
            step((dense.double(), ids), labels.double())
    assert steps_of(emulated) == []
    assert {float(held["step"]) for held in optimizer.state.values()} == {6.0}


def test_a_parameter_that_joins_later_is_recorded_anew_or_refused() -> None:
    """Unfrozen behind a recording, it has fewer steps than the others."""
    torch.manual_seed(0)
    net = Net()
    net.bags.weight.requires_grad_(False)
    twin = copy.deepcopy(net)
    optimizer, other = ADAM(net.parameters(), lr=0.01), ADAM(twin.parameters(), lr=0.01)
    step = TrainingStep(net, LOSS, optimizer, recorder=TapeRecorder(optimizer), warmup=1)
    with emulated_gpu.serve() as emulated, pytest.warns(RecastWarning, match="numbers of steps"):
        for k, (inputs, (labels, _)) in enumerate(batches(set(), "cpu", 10)):
            if k == 5:
                net.bags.weight.requires_grad_(True)
                twin.bags.weight.requires_grad_(True)
            step(inputs, labels)
            other.zero_grad()
            LOSS(twin(*inputs), labels).backward()
            other.step()
    assert steps_of(emulated) == ["dense_update"] * 4
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert float(optimizer.state[p]["step"]) == float(other.state[q]["step"])
