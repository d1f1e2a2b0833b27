"""A rank in eval mode while others are in train mode: an error on all of them, and none waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run
from torch import Tensor, nn

import recast
from recast.errors import UsageError


class Net(nn.Module):
    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(30, 4)
        self.top = nn.Sequential(nn.Linear(4, 8), *between, nn.ReLU(), nn.Linear(8, 1))
        g = torch.Generator().manual_seed(0)  # ranks that are threads share the other one
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=g) - 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(self.bags(ids)).squeeze(1)
        return out


def batch(rank: int, step: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(30, (4, 3), generator=g)


def spread(*between: nn.Module, sharding: str = "row_wise") -> tuple[Any, Any]:
    net = Net(*between)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    return recast.optimize(net, opt, example=batch(0, 0), sharding=sharding)


@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
@pytest.mark.parametrize("between", [nn.BatchNorm1d(8), nn.Dropout(0.5)], ids=["norm", "dropout"])
def test_one_rank_in_eval_mode_is_told_to_all(between: nn.Module, sharding: str) -> None:
    def one(rank: int) -> list[str]:
        torch.manual_seed(3)
        own = type(between)(*([8] if isinstance(between, nn.BatchNorm1d) else [0.5]))
        fast, opt = spread(own, sharding=sharding)
        said = []
        for step in range(3):
            fast.train(not (rank == 1 and step == 1))
            opt.zero_grad()
            try:
                fast(batch(rank, step)).square().mean().backward()
                opt.step()
            except UsageError as error:
                said.append(f"{step}: {error.what}")
        return said

    told = "1: rank 1 of 3 calls the model in eval mode, rank 0 in train mode"
    assert run(3, one) == [[told]] * 3


def test_a_rank_that_has_all_tables_may_evaluate_by_itself() -> None:
    def one(rank: int) -> Tensor:
        fast, opt = spread(nn.BatchNorm1d(8), sharding="data_parallel")
        for step in range(3):
            if rank == 1 and step == 1:
                with torch.no_grad():
                    assert fast.eval()(batch(rank, step)).shape == (4,)
                fast(batch(rank, step))  # gradients that nobody asks for
            opt.zero_grad()
            fast.train()(batch(rank, step)).square().mean().backward()
            opt.step()
        return fast.top[0].weight.detach()

    first, *others = run(3, one)
    assert all(torch.equal(first, other) for other in others)


def test_a_part_in_eval_mode_on_one_rank() -> None:
    def one(rank: int) -> None:
        fast, _ = spread(nn.BatchNorm1d(8))
        if rank == 2:
            fast.top[1].eval()
        with pytest.raises(UsageError, match="rank 2 of 3 calls the model with other modules"):
            fast(batch(rank, 0))

    run(3, one)


def test_modes_that_make_no_difference_may_differ() -> None:
    def one(rank: int) -> Tensor:
        fast, _ = spread()
        fast.train(rank == 0)
        out: Tensor = fast(batch(rank, 0))
        return out.detach()

    for rank, got in enumerate(run(2, one)):
        torch.testing.assert_close(got, Net()(batch(rank, 0)))


def test_flags_of_modules_that_take_no_part_may_differ() -> None:
    def one(rank: int) -> bool:
        torch.manual_seed(3)
        net = Net(nn.Dropout(0.5))
        net.teacher = nn.Dropout(0.1)
        fast, _ = recast.optimize(
            net, torch.optim.SGD(net.parameters(), lr=0.1), example=batch(0, 0),
            sharding="row_wise",
        )  # fmt: skip
        if rank == 0:
            fast.teacher.eval()
            fast.logger = nn.Identity()
        return bool(fast(batch(rank, 0)).isfinite().all())

    assert run(3, one) == [True] * 3
