"""A class assigned to the result is the result's alone: the user's model keeps its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 4)
        self.top = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(self.bags(ids)).squeeze(1)
        return out


class Mixin:
    def who(self) -> str:
        return type(self).__name__


def test_the_plain_forward_runs_under_a_class_that_was_given() -> None:
    """As fully_shard gives one to a module and to its parts."""
    ids = torch.randint(20, (6, 3), generator=torch.Generator().manual_seed(0))
    net = Net()
    fast: Any = recast.optimize(net, example=ids)
    fast.__class__ = type("Sharded", (Mixin, type(fast)), {})
    assert fast.who() == "Sharded"
    assert type(fast._root) is Net and type(net) is Net
    torch.testing.assert_close(fast(ids), net(ids))
    fast.top[0].register_forward_hook(lambda module, args, out: out * 2)
    net.top[0].register_forward_hook(lambda module, args, out: out * 2)
    with pytest.warns(recast.RecastWarning, match="a hook was added"):
        got = fast(ids)
    torch.testing.assert_close(got, net(ids))
