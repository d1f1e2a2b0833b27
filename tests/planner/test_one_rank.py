"""Options for many ranks on a single one: checked all the same, and reported to have no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import UsageError
from recast.runtime import topology


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(20, 4) for _ in range(2))
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(torch.cat([e(ids) for e in self.emb], 1))
        return out


IDS = torch.randint(20, (6, 3), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sharding": "row_wise"}, "there is one rank: sharding has no effect"),
        ({"sharding": {"emb.0": "row_wise"}, "wire": "int8"}, "sharding, wire have no effect"),
        ({"wire": {"backward": "fp16"}}, "wire has no effect"),
        ({"topology": topology.PRESETS["cpu"]}, "topology has no effect"),
    ],
)
def test_the_report_says_that_it_has_no_effect(options: dict[str, Any], said: str) -> None:
    net = Net()
    fast = recast.optimize(net, example=IDS, **options)
    assert any(said in note for note in fast.report.notes)
    torch.testing.assert_close(fast(IDS), net(IDS))


def test_nothing_is_said_where_nothing_was_asked() -> None:
    fast = recast.optimize(Net(), example=IDS)
    assert not any("one rank" in note for note in fast.report.notes)


@pytest.mark.parametrize(
    ("sharding", "said"),
    [
        ({"emb.7": "row_wise"}, "no table is named .emb.7"),
        ({"emb.0": "row_wize"}, "cannot be row_wize"),
        ({"emb.0": 3}, "is to be 3"),
    ],
)
def test_what_many_ranks_would_refuse_is_refused(sharding: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        recast.optimize(Net(), example=IDS, sharding=sharding)
