"""Models that are not captured whole: statistics and masks of all ranks, or a refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from generators import own_generator
from harness import run
from torch import Tensor, nn

import recast
from recast import UsageError


class Opaque(nn.Module):
    """Cannot be traced; its children can. ``own``: it calls a batch norm by itself."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.own = nn.BatchNorm1d(6) if own else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.own(x)
        return self.chain(h * 2 if float(h.detach().sum()) > 1e9 else h)


class Outer(nn.Module):
    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(9, 6, mode="sum")
        self.opaque = Opaque(own)
        self.top = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.opaque(self.rows(ids)))


class Inline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(9, 6, mode="sum")
        self.norm = nn.BatchNorm1d(6)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.rows(ids))
        return h * 2 if float(h.detach().sum()) > 1e9 else h


IDS = torch.randint(9, (10, 3), generator=torch.Generator().manual_seed(0))


def test_parts_have_the_statistics_and_masks_of_all() -> None:
    model = Outer()
    plain = copy.deepcopy(model)

    def rank(r: int) -> tuple[list[Tensor], Any]:
        fast: Any = recast.optimize(copy.deepcopy(model), example=IDS[:6])
        for buffer, before in zip(fast.buffers(), model.buffers(), strict=True):
            buffer.copy_(before)  # the capture of parts runs the model, and they count it
        own_generator(7)
        outs = [fast(IDS[:7] if r == 0 else IDS[7:]).detach() for _ in range(2)]
        return outs, [b.clone() for b in fast.buffers()]

    answers = run(2, rank)
    torch.manual_seed(7)
    for k in range(2):
        torch.testing.assert_close(torch.cat([a[0][k] for a in answers]), plain(IDS).detach())
    for _, buffers in answers:
        torch.testing.assert_close(buffers, list(plain.buffers()))


def test_a_batch_norm_outside_of_all_graphs_is_refused() -> None:
    def rank(r: int) -> None:
        fast: Any = recast.optimize(Outer(own=True), example=IDS[:6])
        with pytest.raises(UsageError, match=r"batch norm opaque.own on several ranks"):
            fast(IDS)
        assert fast.eval()(IDS).shape == (10, 4)
        with pytest.raises(UsageError, match="norm on several ranks"):
            recast.optimize(Inline(), example=IDS[:6])

    run(2, rank)


class Counts(nn.Module):
    """Runs as it is, for it notes its calls; its chain is a part."""

    def __init__(self, table: nn.EmbeddingBag | None) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
        self.table = table
        self.calls: list[int] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.calls.append(len(x))
        out: Tensor = self.chain(x if self.table is None else x + self.table(ids))
        return out


class Beside(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.rows, self.others = (nn.EmbeddingBag(9, 6, mode="sum") for _ in range(2))
        self.counts = Counts(self.rows if shared else None)

    def forward(self, ids: Tensor) -> Tensor:
        return self.counts(self.rows(ids) + self.others(ids), ids)


@pytest.mark.parametrize("shared", [False, True])
def test_tables_beside_a_module_that_runs_as_it_is_are_spread(shared: bool) -> None:
    """But for those that it holds."""
    model = Beside(shared)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        plain(IDS).square().mean().backward()
        optimizer.step()

    def rank(r: int) -> tuple[Tensor, dict[str, str]]:
        twin = copy.deepcopy(model)
        own = torch.optim.Adagrad(twin.parameters(), lr=0.1)
        pins = {"others.weight": "row_wise"}
        fast, own = recast.optimize(twin, own, example=IDS[:6], sharding=pins)
        assert fast._parts
        mine = IDS[r * 5 : r * 5 + 5]
        for _ in range(3):
            own.zero_grad()
            fast(mine).square().mean().backward()
            own.step()
        kinds = {p.table: p.sharding_type for p in fast.plan.placements}
        return fast(mine).detach(), kinds

    answers = run(2, rank)
    torch.testing.assert_close(torch.cat([a[0] for a in answers]), plain(IDS).detach())
    kinds = answers[0][1]
    assert kinds["others.weight"] == "row_wise"
    assert not shared or kinds["rows.weight"] == "data_parallel"


def test_a_table_of_a_module_that_runs_as_it_is_cannot_be_spread() -> None:
    with pytest.raises(UsageError, match=r"rows\.weight cannot be row_wise") as caught:
        pins = {"rows.weight": "row_wise"}
        recast.optimize(Beside(True), example=IDS, world_size=2, sharding=pins)
    assert "counts looks it up by itself" in caught.value.why
