"""Optimised models, recorded: our kernels and row updates, replayed, beside plain torch in float64.

Kernels run on the emulator; what is replayed are their launches with the addresses and numbers of
the recorded step, and torch's operations between them.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast import optim
from recast.runtime import tolerances
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder


class Ragged(nn.Module):
    def __init__(self, last: bool = True) -> None:
        super().__init__()
        self.emb = nn.ModuleList(
            nn.EmbeddingBag(rows, 6, mode="sum", include_last_offset=last) for rows in (20, 5)
        )
        self.top = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        rows = [e(i, o) for e, i, o in zip(self.emb, ids, offsets, strict=True)]
        return self.top(torch.cat(rows, 1)).squeeze(1)


def batches(count: int, last: bool = True, bags: int = 5) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        ids, offsets = [], []
        for rows in (20, 5):
            counts = torch.randint(0, 4, (bags,), generator=g)
            counts[0] += 1
            ends = F.pad(counts.cumsum(0), (1, 0))
            ids.append(torch.randint(rows, (int(ends[-1]),), generator=g))
            offsets.append(ends if last else ends[:-1])
        made.append(((ids, offsets), torch.rand(bags, generator=g).round()))
    return made


def train(
    make: Callable[..., torch.optim.Optimizer],
    data: list[Any],
    between: Callable[[int, torch.optim.Optimizer], None] = lambda k, o: None,
    last: bool = True,
) -> TapeRecorder:
    """Train the optimised model, recorded; compare parameters and state with plain torch's."""
    torch.manual_seed(0)
    plain = Ragged(last)
    wide, twin = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    loss = F.binary_cross_entropy_with_logits
    with emulated_gpu.serve() as emulated:
        optimizer = make(twin.parameters())
        fast, _ = recast.optimize(twin, optimizer, example=data[0][0])
        recorder = TapeRecorder(optimizer)
        step = TrainingStep(fast, loss, optimizer, recorder=recorder)
        for k, (inputs, label) in enumerate(data):
            step(inputs, label)
            between(k, optimizer)
    assert any("embedding" in name or "bag" in name for name in emulated.launched)
    others = [make(net.parameters()) for net in (plain, wide)]
    for net, own in zip((plain, wide), others, strict=True):
        for k, (inputs, label) in enumerate(data):
            own.zero_grad()
            loss(net(*inputs), label.to(next(net.parameters()).dtype)).backward()
            own.step()
            between(k, own)
    for a, b, c in zip(twin.parameters(), plain.parameters(), wide.parameters(), strict=True):
        assert tolerances.excess(a, b, c) <= tolerances.CHAIN
        ours, theirs, truth = (
            o.state[p] for o, p in zip((optimizer, *others), (a, b, c), strict=True)
        )
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if isinstance(value, Tensor) and value.dim():
                assert tolerances.excess(value, theirs[name], truth[name]) <= tolerances.CHAIN
            else:
                assert float(value) == float(theirs[name])
    return recorder


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.2),
    ],
    ids=["sgd", "adagrad", "lr_decay"],
)
def test_ragged_batches_share_a_recording(make: Any) -> None:
    recorder = train(make, batches(7))
    assert (recorder.recordings, recorder.replays) == (1, 3)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_an_infinite_rate_moves_rows_that_are_not_looked_up(make: Any) -> None:
    """In a replay too: 0 times infinity is NaN, in weights and not in state."""
    torch.manual_seed(0)
    plain = Ragged()
    twin, data = copy.deepcopy(plain), batches(7)
    loss = F.binary_cross_entropy_with_logits
    with emulated_gpu.serve():
        optimizers = make(twin.parameters(), lr=0.1), make(plain.parameters(), lr=0.1)
        fast, _ = recast.optimize(twin, optimizers[0], example=data[0][0])
        recorder = TapeRecorder(optimizers[0])
        step = TrainingStep(fast, loss, optimizers[0], recorder=recorder)
        for k, (inputs, label) in enumerate(data):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = math.inf if k == 6 else 0.1
            optimizers[1].zero_grad()
            loss(plain(*inputs), label).backward()
            optimizers[1].step()
            step(inputs, label)
    assert recorder.replays == 3
    for a, b in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
        for name, held in optimizers[1].state[b].items():
            torch.testing.assert_close(optimizers[0].state[a][name], held)
    assert twin.emb[0].weight.isinf().any() and twin.emb[0].weight.isnan().all(1).any()


def test_a_schedule_reaches_tables_and_dense_parameters() -> None:
    def between(k: int, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (k + 1)

    recorder = train(lambda p: torch.optim.Adagrad(p, lr=0.2), batches(7), between)
    assert (recorder.recordings, recorder.replays) == (1, 3)


def test_tables_and_dense_parameters_of_two_optimizers() -> None:
    """Row-wise Adagrad steps tables only, so it needs nothing that a dense step needs."""
    torch.manual_seed(0)
    models = [Ragged(), Ragged().double()]
    models[1].load_state_dict(models[0].state_dict())
    models.append(copy.deepcopy(models[0]))
    pairs = [
        [optim.RowWiseAdagrad(m.emb.parameters(), lr=0.1),
         torch.optim.SGD(m.top.parameters(), lr=0.1)]
        for m in models
    ]  # fmt: skip
    data, loss = batches(7), F.binary_cross_entropy_with_logits
    with emulated_gpu.serve():
        fast = recast.optimize(models[2], example=data[0][0])
        recorder = TapeRecorder(*pairs[2])
        step = TrainingStep(fast, loss, pairs[2], recorder=recorder)
        for k, (inputs, label) in enumerate(data):
            step(inputs, label)
            pairs[2][0].param_groups[0]["lr"] = 0.1 / (k + 1)
    assert (recorder.recordings, recorder.replays) == (1, 3)
    for model, pair in zip(models[:2], pairs[:2], strict=True):
        for k, (inputs, label) in enumerate(data):
            model.zero_grad()
            loss(model(*inputs), label.to(model.top[0].weight.dtype)).backward()
            for each in pair:
                each.step()
            pair[0].param_groups[0]["lr"] = 0.1 / (k + 1)
    plain, wide, ours = (m.parameters() for m in models)
    for a, b, c in zip(ours, plain, wide, strict=True):
        assert tolerances.excess(a, b, c) <= tolerances.CHAIN


def test_without_an_end_ids_are_not_padded() -> None:
    """The last bag would absorb padding after it, so each number of ids is a form of its own."""
    data = batches(2, last=False)
    data = [data[0]] * 5 + [data[1]]
    recorder = train(lambda p: torch.optim.SGD(p, lr=0.1), data, last=False)
    assert (recorder.recordings, recorder.replays) == (1, 1)


def test_ragged_inputs_of_a_model() -> None:
    (inputs, _), *_ = batches(1)
    with emulated_gpu.serve():
        fast = recast.optimize(Ragged(), example=inputs)
        ids = inputs[0]
        for held in (fast, copy.deepcopy(fast)):
            assert [id(t) for t in held.ragged_inputs(*inputs)] == [id(t) for t in ids]
        assert fast.double().ragged_inputs(*inputs) == []
    assert recast.optimize(Ragged(), example=inputs).ragged_inputs(*inputs) == []
