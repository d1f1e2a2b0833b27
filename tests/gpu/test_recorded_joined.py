"""Lookups written into the columns of one matrix, in a recorded training step, on the emulator."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import emulated_gpu
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast.runtime import tolerances
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder

PASSES = "default,join-lookups{everywhere=true},align-rows{everywhere=true}"


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(rows, 6, mode="sum") for rows in (20, 5))
        self.top = nn.Sequential(nn.Linear(15, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        rows = [e(ids % e.num_embeddings) for e in self.emb]
        return self.top(torch.cat([*rows, numbers], 1)).squeeze(1)


def test_recorded_training() -> None:
    torch.manual_seed(0)
    plain = Joined()
    wide, twin = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    g = torch.Generator().manual_seed(1)
    data = [
        ((torch.randint(20, (7, 2), generator=g), torch.rand(7, 3, generator=g)),
         torch.rand(7, generator=g).round())
        for _ in range(7)
    ]  # fmt: skip
    loss = F.binary_cross_entropy_with_logits
    with emulated_gpu.serve() as emulated:
        optimizer = torch.optim.Adagrad(twin.parameters(), lr=0.1)
        fast, _ = recast.optimize(twin, optimizer, example=data[0][0], passes=PASSES)
        recorder = TapeRecorder(optimizer)
        step = TrainingStep(fast, loss, optimizer, recorder=recorder)
        for inputs, label in data:
            step(inputs, label)
    assert "embedding_samples" in emulated.launched
    assert (recorder.recordings, recorder.replays) == (1, 3)
    for net in (plain, wide):
        own = torch.optim.Adagrad(net.parameters(), lr=0.1)
        for (ids, numbers), label in data:
            own.zero_grad()
            dtype = next(net.parameters()).dtype
            loss(net(ids, numbers.to(dtype)), label.to(dtype)).backward()
            own.step()
    for a, b, c in zip(twin.parameters(), plain.parameters(), wide.parameters(), strict=True):
        assert tolerances.excess(a, b, c) <= tolerances.CHAIN
