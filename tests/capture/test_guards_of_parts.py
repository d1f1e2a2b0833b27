"""A question that costs a little of a submodule is asked of that submodule's own inputs."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning


class Routing(nn.Module):
    """As in DIEN: a branch on scores that take a product, before more work."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.randn(6, 6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(x, self.score).sum(1)
        if (scores > 1000).any():
            scores = scores.clamp(max=0) * 2
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * torch.sigmoid(scores).unsqueeze(1)


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bottom, self.routing = nn.Linear(4, 6), Routing(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.routing(self.bottom(x).relu())


@pytest.mark.parametrize(("layers", "whole"), [(4, True), (1, False)], ids=["little", "much"])
def test_it_is_captured_where_asking_costs_little(layers: int, whole: bool) -> None:
    torch.manual_seed(0)
    net = Net(layers)
    fast = recast.optimize(copy.deepcopy(net), example=torch.randn(8, 4))
    told = fast.report.to_dict()
    missed = [m for m in fast.report.journal.missed if m.rule == "capture"]
    assert (told["captured"] == "whole") == whole
    assert [m.node for m in missed] == ([] if whole else ["routing"])
    for scale in (1.0, 1e5):  # the second takes the other branch
        x = torch.randn(5, 4) * scale
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecastWarning)
            out, want = fast(x), net(x)
        torch.testing.assert_close(out, want)
        out.square().sum().backward()
        want.square().sum().backward()
    for (name, one), two in zip(fast.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, msg=name)
