"""A batch that fails in a dense layer of one rank: caught there, and named by all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import forked
from harness import run
from torch import Tensor, nn

import recast
from recast.errors import IdError, RankError
from recast.runtime import device
from recast.runtime.ranks import failed_calls, faults, shards_state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(30, 4)
        self.bottom = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.top = nn.Linear(8, 1)
        g = torch.Generator().manual_seed(0)  # ranks that are threads share the other one
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=g) - 0.5)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.top(torch.cat([self.bags(ids), self.bottom(x)], 1)).squeeze(1)
        return out


def batch(rank: int, step: int, width: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(30, (4, 3), generator=g), torch.randn(4, width, generator=g)


def trained(rank: int, bad: tuple[int, ...], steps: int = 4) -> tuple[list[str], list[Tensor]]:
    """Errors by step, of a loop that goes on after them; ``bad``: ranks whose step 1 fails."""
    net: Any = Net()
    opt: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    fast, opt = recast.optimize(net, opt, example=batch(0, 0), sharding="row_wise")
    said = []
    for step in range(steps):
        given = batch(rank, step, 2 if step == 1 and rank in bad else 3)
        opt.zero_grad()
        try:
            fast(*given).square().mean().backward()
            opt.step()
        except (RuntimeError, RankError) as error:
            said.append(f"{step} {type(error).__name__}: {error}")
    return said, [p.detach().clone() for p in (*fast.bottom.parameters(), *fast.top.parameters())]


def test_all_ranks_may_go_on_where_all_have_failed() -> None:
    first, second = run(2, lambda rank: trained(rank, (0, 1)))
    for said, _ in (first, second):
        assert len(said) == 1 and said[0].startswith("1 RuntimeError")
    for a, b in zip(first[1], second[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_refused_ids_are_of_all_ranks_and_leave_nobody_behind() -> None:
    def one(rank: int) -> None:
        fast = recast.optimize(Net(), example=batch(0, 0), sharding="row_wise")
        for step in range(3):
            ids, x = batch(rank, step)
            with pytest.raises(IdError):
                fast(ids + 30 * (rank == 1), x)
            torch.testing.assert_close(fast(ids, x), Net()(ids, x))

    run(2, one)


def test_who_did_not_leave_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "INTERVAL", 0.02)

    def one(rank: int) -> None:
        failed_calls.begin()
        if rank == 1:
            failed_calls.record(RuntimeError("of this batch\nand more"))
            for _ in range(2):
                with pytest.raises(RankError, match="rank 1 left a step by RuntimeError: of this"):
                    failed_calls.begin()
        dist.barrier()
        if rank != 1:
            failed_calls.record(ValueError("late"))
        dist.barrier()
        failed_calls.begin()

    run(3, one)


@pytest.mark.long
@pytest.mark.skipif(not dist.is_available() or not hasattr(os, "fork"), reason="gloo and fork")
def test_one_that_failed_alone_begins_no_other_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ids would be taken for rows of the step before, which makes torch end a process."""
    monkeypatch.setattr(faults, "INTERVAL", 0.1)
    device.extension()
    recast.optimize(Net(), example=batch(0, 0))
    assert shards_state.hook
    found = forked(3, tmp_path, 5.0, lambda rank: trained(rank, (1,), 3)[0])
    assert None not in found, "a process was ended"
    said = [value for value, _, _ in found]
    assert said[1][0].startswith("1 RuntimeError: ")
    assert said[1][1].startswith("2 RankError: rank 1 left a step by RuntimeError")
    assert "ranks 0, 2 did not leave it" in said[1][1]
    for others in (said[0], said[2]):
        assert others[0].startswith("1 RankError: ")
        assert "rank 1 left a step by RuntimeError" in others[0]
