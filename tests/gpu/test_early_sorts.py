"""In a recorded step, ids of the batch are sorted before all else; computed ids are not.

The tape repeats early work before the rest, as a CUDA graph may: with ids or memory that are not
ready by then, the numbers would differ from plain torch's.
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

import recast
from recast.runtime import tolerances
from recast.runtime.recorded import recording
from recast.runtime.recorded.recording import Recording
from recast.runtime.recorded.training_step import TrainingStep

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder

ROWS, BAGS = (20, 5), 6
Read = Callable[[Tensor], Tensor]


def as_given(ids: Tensor) -> Tensor:
    return ids


def computed(ids: Tensor) -> Tensor:
    return (ids * 3).remainder(5)


def cut(ids: Tensor) -> Tensor:
    return ids[1:]  # of the batch's memory


class Net(nn.Module):
    """Bags of one table, single rows of another."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS[0], 8, mode="mean")
        self.rows = nn.Embedding(ROWS[1], 8)
        self.top = nn.Linear(16, 1)
        self.read = read

    def forward(self, many: Tensor, offsets: Tensor, one: Tensor) -> Tensor:
        parts = [self.bags(many, offsets), self.rows(self.read(one))]
        return self.top(torch.cat(parts, 1)).squeeze(1)


def batches(count: int, read: Read) -> list[Any]:
    g = torch.Generator().manual_seed(2)
    more = read is cut
    found = []
    for _ in range(count):
        many = torch.randint(ROWS[0], (2 * BAGS,), generator=g)
        offsets = torch.randint(2 * BAGS, (BAGS,), generator=g).sort().values
        offsets[0] = 0
        one = torch.randint(ROWS[1], (BAGS + more,), generator=g)
        found.append(((many, offsets, one), torch.rand(BAGS, generator=g).round()))
    return found


def another(read: Read) -> Any:
    """An example of another size."""
    return torch.arange(9), torch.tensor([0, 4, 4]), torch.arange(3 + (read is cut)) % ROWS[1]


def train(read: Read, clip: bool = False) -> TapeRecorder:
    """Compare recorded steps with plain torch's, float64 being the judge; returns the recorder."""
    data, loss = batches(7, read), F.binary_cross_entropy_with_logits
    torch.manual_seed(0)
    plain = Net(read)
    nets = [copy.deepcopy(plain), plain, copy.deepcopy(plain).double()]
    opts = [torch.optim.Adagrad(net.parameters(), lr=0.1) for net in nets]
    with emulated_gpu.serve():
        fast, _ = recast.optimize(nets[0], opts[0], example=[data[0][0], another(read)])
        recorder = TapeRecorder(opts[0])
        before = (lambda: nn.utils.clip_grad_norm_(fast.parameters(), 0.1)) if clip else None
        step = TrainingStep(fast, loss, opts[0], recorder=recorder, before_step=before)
        for inputs, label in data:
            step(inputs, label)
    assert (recorder.recordings, recorder.replays) == (1, 3)
    for net, opt in zip(nets[1:], opts[1:], strict=True):
        for inputs, label in data:
            opt.zero_grad()
            loss(net(*inputs), label.to(net.top.weight.dtype)).backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()
    for a, b, c in zip(*(net.parameters() for net in nets), strict=True):
        assert tolerances.excess(a, b, c) <= tolerances.CHAIN
    return recorder


@pytest.mark.parametrize("read", [as_given, cut])
def test_ids_of_the_batch(read: Read) -> None:
    assert train(read).early > 0


def test_norms_of_gradients_sort_early_too() -> None:
    """They do, and not the sorts that another recording has left behind."""
    found = [train(as_given, clip=True) for _ in range(2)]
    assert 0 < found[0].early == found[1].early


def test_ids_that_are_computed_are_sorted_in_turn() -> None:
    """All tables are sorted at once, so none is sorted early."""
    assert train(computed).early == 0


def test_all_in_turn() -> None:
    with recording.in_host_order():
        assert train(as_given).early == 0


def test_what_was_given() -> None:
    made, ids = Recording(), torch.arange(6)
    made.declare_inputs([ids, torch.empty(0)])
    assert made.are_inputs([ids, ids[2:], ids.view(2, 3), ids.detach()])
    assert not made.are_inputs([ids, ids.clone()])
    assert not made.are_inputs([torch.empty(0)])
    ids[3] = 1  # what was sorted would be another
    assert not made.are_inputs([ids])
    with torch.inference_mode():
        there = torch.arange(3)
        made.declare_inputs([there])
        assert not made.are_inputs([there])
