"""Index tensors on the host for features on a GPU; "meta" stands for that."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any

import emulated_gpu
import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter.capture.constants import Constants
from recast.rewriter.compiled.module import Compiled
from recast.runtime.interactions import index_copies, pair_cuda
from recast.runtime.interactions.index_copies import on_device
from recast.runtime.recorded import recording

META = torch.device("meta")


def test_a_copy_is_made_once_for_each_version() -> None:
    index = torch.tensor([3, 1, 2])
    first = on_device(index, META)
    assert first is not None and first.device == META and on_device(index, META) is first
    assert on_device(index, torch.device("cpu")) is index
    index[0] = 0
    second = on_device(index, META)
    assert second is not first and on_device(index, META) is second
    pair = torch.zeros(2, 3, dtype=torch.int64)
    copies = [on_device(row, META) for row in pair]
    assert copies[0] is not copies[1] and copies == [on_device(row, META) for row in pair]
    pair[1] += 1
    assert on_device(pair[0], META) is not copies[0], "views have the version of their base"
    known = len(index_copies._kept)
    del index, pair
    gc.collect()
    assert len(index_copies._kept) == known - 3


def test_changes_that_nobody_counts_are_left_to_torch() -> None:
    with torch.inference_mode():
        assert on_device(torch.arange(3), META) is None
    assert on_device(torch.arange(3, device=META), torch.device("cpu")) is None


def test_a_recording_keeps_what_it_reads() -> None:
    index = torch.arange(3)
    first = on_device(index, META)
    with recording.recording() as made:
        assert on_device(index, META) is first
    assert any(one is first for one in made._kept)


@pytest.mark.parametrize("right", [False, True])
def test_pairs_are_served_whose_lists_are_on_the_host(right: bool) -> None:
    left = [torch.empty(4, 5, 8, device=META)]
    li, lj = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])
    found = pair_cuda.products(emulated_gpu.Emulated(), left, left if right else [], li, lj, None)
    assert found is not None and [t.device for t in found.pairs] == [META, META]
    again = pair_cuda.products(emulated_gpu.Emulated(), left, [], li, lj, None)
    assert again is not None and all(a is b for a, b in zip(again.pairs, found.pairs, strict=True))


def test_constants_of_two_devices_are_two() -> None:
    """Torch compares no tensors of two devices: a buffer of a GPU, and a list."""
    held = Constants()
    paths = [held.add(t, "rows") for t in (torch.arange(3, device=META), *both(), *both())]
    assert len(set(paths)) == 3


def test_constants_of_rewrites_go_to_the_device_of_the_model() -> None:
    """Those of the user's code do not: somebody may write to them."""
    held, own = Constants(), torch.arange(3)
    theirs, ours = held.hold(own, "own"), held.add(torch.arange(2), "rows")
    assert set(vars(held)) == {"own_0", "rows_1"}
    for copied in (held, copy.deepcopy(held)):
        copied.place(META)
        found = [vars(copied)[path.rpartition(".")[2]] for path in (theirs, ours)]
        assert [t.device.type for t in found] == ["cpu", "meta"]
    assert vars(held)["own_0"] is own


def test_constants_of_rewrites_are_none_of_the_user() -> None:
    held, own = Constants(), torch.arange(3)
    assert held.hold(own, "rows") != held.add(torch.arange(3), "rows")


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(9, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.stack([emb(ids[:, k]) for k, emb in enumerate(self.emb)], 1)
        return (rows[:, [0, 0, 1]] * rows[:, [1, 2, 2]]).sum(2)


def test_a_compiled_model_places_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[tuple[set[str], torch.device]] = []
    monkeypatch.setattr(
        Constants, "place", lambda self, where: placed.append(({*vars(self)}, where))
    )
    fast = recast.optimize(Listed(), example=(torch.zeros(4, 3, dtype=torch.int64),))
    assert not placed, "on the CPU they are there"
    there = [SimpleNamespace(device=torch.device("cuda", 0))] * 2
    captured: Any = vars(fast)["_captured"]
    monkeypatch.setattr(captured.root, "parameters", lambda: iter(there))
    Compiled(captured, vars(fast)["_runner"].graphs)
    assert placed == [({"rows_0", "columns_1"}, torch.device("cuda", 0))]


def both() -> list[Tensor]:
    return [torch.arange(3), torch.arange(1, 4)]
