"""Numbers that the training loop sets between calls, on ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import run
from torch import Tensor, nn

import recast
from recast.errors import UsageError

IDS = torch.arange(96).view(32, 3) % 50


class Heated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.head, self.heat = nn.EmbeddingBag(50, 8), nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.e(x)) / self.heat).softmax(-1)


def test_a_number_that_varies() -> None:
    plain = Heated()

    def rank_of(rank: int) -> Tensor:
        fast = recast.optimize(
            copy.deepcopy(plain), example=IDS, varying=["heat"], sharding="row_wise"
        )
        fast.heat = 0.25
        return fast(IDS[rank:]).detach()

    found = run(2, rank_of)
    plain.heat = 0.25
    for rank, out in enumerate(found):
        torch.testing.assert_close(out, plain(IDS[rank:]))


def test_another_that_is_set_is_an_error_with_a_remedy() -> None:
    def rank_of(rank: int) -> tuple[str, ...]:
        fast = recast.optimize(Heated(), example=IDS, sharding="row_wise")
        fast.heat = 0.25
        with pytest.raises(UsageError, match=r"heat was 1\.0 and is now 0\.25") as caught:
            fast(IDS)
        return caught.value.tries

    for tries in run(2, rank_of):
        assert any("or give it varying=['heat'] first" in t for t in tries)
