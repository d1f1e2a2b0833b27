"""Ranks that wait for each other in different collectives end soon, not at the group's timeout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import forked
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import recast
from recast.errors import RankError
from recast.runtime import device
from recast.runtime.ranks import faults, shards_state


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "INTERVAL", 0.1)
    monkeypatch.setattr(faults, "STANDSTILL", 0.5)


def test_only_if_every_rank_waits_and_not_in_one_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "STANDSTILL", 0.0)
    store = HashStore()
    watches: Any = [faults.Watch(store, rank, 3) for rank in range(3)]

    def found() -> Any:
        for watch in watches:
            watch.beat()
        return watches[0].standstill()

    for watch in watches:
        watch.enter("counts of ids")
    assert found() is None  # it may be slow
    watches[2].leave()
    watches[2].enter("checkpoint")
    assert found() == [1, 1, 2]
    watches[1].leave()
    assert found() is None  # rank 1 computes, and may come
    watches[1].enter("counts of ids")
    monkeypatch.setattr(faults, "STANDSTILL", 60.0)
    assert found() is None
    for watch in watches:
        watch.ended.set()
        watch.thread.join()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(30, 4)
        self.top = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.rows(ids)).squeeze(1)


@pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"), reason="needs gloo and fork"
)
@pytest.mark.parametrize(
    ("alone", "where"),
    [
        (lambda fast, path: fast.full_state_dict(), "rows of whole tables"),
        (lambda fast, path: recast.checkpoint.save(path, fast), "checkpoint"),
    ],
)
def test_rank_0_saves_alone(alone: Callable[..., Any], where: str, tmp_path: Path) -> None:
    ids = torch.randint(30, (6, 3), generator=torch.Generator().manual_seed(0))
    device.extension()  # not in every rank
    recast.optimize(Net(), example=ids)
    assert shards_state.hook

    def trained(rank: int) -> None:
        torch.manual_seed(0)
        model = Net()
        opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        fast, opt = recast.optimize(model, opt, example=ids, sharding="row_wise")
        for step in range(3):
            opt.zero_grad()
            fast(ids).square().mean().backward()
            opt.step()
            if rank == 0 and step == 1:
                alone(fast, tmp_path / "last")

    # Rank 0 is told once the process of rank 1 ends.
    _, (_, second, seconds) = forked(2, tmp_path, 300.0, trained, missing=0)
    assert isinstance(second, RankError) and seconds < 60
    assert second.what.startswith(f"counts of ids: rank 0 does something else, in {where} (")
    assert "all ranks wait, in different collectives" in str(second.why)
