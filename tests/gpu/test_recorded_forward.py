"""mode="graph": forwards without gradients are replayed, with the numbers of the plain model.

Those with gradients: test_recorded_training.
"""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning, UsageError
from recast.rewriter.compiled.module import Compiled
from recast.runtime.recorded.forward import RecordedForward

sys.path.insert(0, str(Path(__file__).parent))
from tape import TapeRecorder


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 4)
        self.deep = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        rows = self.emb(ids)
        return {"out": self.deep(rows.flatten(1)), "sum": rows.sum((1, 2))}


def ids(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(30, (rows, 3), generator=torch.Generator().manual_seed(seed))


def recorded() -> tuple[Net, Compiled, TapeRecorder]:
    """The model, optimised by nothing, so that its forward is torch's, and recorded."""
    torch.manual_seed(0)
    model = Net().eval()
    fast = recast.optimize(model, example=ids(6), passes=())
    recorder = TapeRecorder()
    vars(fast)["_replays"] = RecordedForward(fast, recorder)
    return model, fast, recorder


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name])


@torch.no_grad()
def test_replays_give_the_numbers_of_the_model() -> None:
    model, fast, recorder = recorded()
    results = [fast(ids(6, k)) for k in range(6)]
    assert (recorder.recordings, recorder.replays) == (1, 3)
    for k, result in enumerate(results):  # no replay has overwritten an earlier result
        same(result, model(ids(6, k)))
    for k in range(4):  # another size is another form
        same(fast(ids(9, k)), model(ids(9, k)))
    assert recorder.recordings == 2


@torch.no_grad()
def test_changed_weights_and_modes_are_seen() -> None:
    model, fast, recorder = recorded()
    for k in range(4):
        fast(ids(6, k))
    model.emb.weight.add_(1)  # in place: the recording reads it
    same(fast(ids(6)), model(ids(6)))
    assert recorder.recordings == 1
    model.emb.weight = nn.Parameter(torch.randn(30, 4))  # elsewhere: it must be recorded anew
    fast.emb.weight = model.emb.weight
    for k in range(3):
        same(fast(ids(6, k)), model(ids(6, k)))
    assert recorder.recordings == 2
    twin = copy.deepcopy(model).train()
    fast.train()
    for k in range(4):  # running statistics move in a replay too
        same(fast(ids(6, k)), twin(ids(6, k)))
    assert recorder.recordings == 3
    torch.testing.assert_close(fast.deep[1].running_mean, twin.deep[1].running_mean)


@torch.no_grad()
def test_copies_record_nothing() -> None:
    model, fast, recorder = recorded()
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        for k in range(5):
            same(twin(ids(6, k)), model(ids(6, k)))
    assert recorder.recordings == 0


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.abs().sum()) >= 0 else x


@torch.no_grad()
def test_a_forward_that_waits_for_the_device_runs_as_always() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Reads())
    recorder = TapeRecorder()
    run = RecordedForward(model, recorder)
    x = torch.randn(2, 3)
    with pytest.warns(RecastWarning, match='mode="graph" runs without being recorded'):
        for _ in range(4):
            found = run(lambda args, kwargs: model(*args, **kwargs), (x,), {})
    torch.testing.assert_close(found, model(x))


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a model on one CUDA device"):
        recast.optimize(Net(), example=ids(4), mode="graph")
    with pytest.raises(UsageError, match="no mode 'fast'"):
        recast.optimize(Net(), example=ids(4), mode="fast")
