"""What a call that runs plain says to do: about the batch, about the model, or about neither."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning

IDS = torch.arange(48).view(16, 3) % 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.head, self.heat = nn.Embedding(20, 8), nn.Linear(8, 8), 1.0

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        pooled = (self.e(ids) * weights.unsqueeze(-1)).sum(1)
        return self.head(pooled) * self.heat


def made() -> tuple[Net, recast.Compiled]:
    plain = Net()
    return plain, recast.optimize(plain, example=(IDS, torch.rand(16, 3)))


def test_of_another_rank() -> None:
    plain, fast = made()
    batch = IDS, torch.rand(3)
    with pytest.warns(RecastWarning, match=r"dimension.*; give recast\.optimize a batch of this"):
        torch.testing.assert_close(fast(*batch), plain(*batch))


def test_of_fewer_rows() -> None:
    plain, fast = made()
    batch = IDS, torch.rand(1, 3)
    with pytest.warns(RecastWarning, match="equally many rows.*; expand that of fewer"):
        torch.testing.assert_close(fast(*batch), plain(*batch))


def test_of_a_model_that_has_changed() -> None:
    _, fast = made()
    fast.heat = 2.0
    with pytest.warns(RecastWarning, match=r"; call recast\.optimize again after such a change"):
        fast(IDS, torch.rand(16, 3))
