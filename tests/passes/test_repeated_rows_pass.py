"""contract-shared-rows: what all rows of a sample share is multiplied once; what stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from passkit import fired, same
from torch import Tensor, nn
from torch.nn import functional as F

P, E, K, OUT = 48, 3, 4, 5


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(rows, P, generator=g, dtype=torch.float64)
    return u, torch.randn(rows, K, E, generator=g, dtype=torch.float64)


BATCHES = [batch(6, 0), batch(9, 1)]
Forward = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, forward: Forward, width: int = P + E) -> None:
        super().__init__()
        self.use = forward
        self.w = nn.Parameter(torch.randn(width, OUT))
        self.linear = nn.Linear(width, OUT)

    def forward(self, u: Tensor, m: Tensor) -> Tensor:
        return self.use(self, u.unsqueeze(1), m)


def matmul(net: Net, u: Tensor, m: Tensor) -> Tensor:
    return torch.matmul(torch.cat([u.expand([u.shape[0], K, P]), m], dim=-1), net.w)


def operator(net: Net, u: Tensor, m: Tensor) -> Tensor:
    return torch.cat([m, u.repeat(1, K, 1)], 2) @ net.w


def layer(net: Net, u: Tensor, m: Tensor) -> Tensor:
    return net.linear(torch.cat([u.expand(-1, K, -1), m], 2)).relu()


def function(net: Net, u: Tensor, m: Tensor) -> Tensor:
    return F.linear(torch.cat([u.expand(-1, K, -1), m], 2), net.w.t())


def both_sides(net: Net, u: Tensor, m: Tensor) -> Tensor:
    wide = torch.cat([m, u.expand(-1, K, -1), m * 2, u.tanh().expand(-1, K, -1)], 2)
    return net.linear(wide)


@pytest.mark.parametrize("use", [matmul, operator, layer, function])
def test_every_spelling(use: Forward) -> None:
    torch.manual_seed(2)
    fast = same(Net(use), BATCHES, steps=use is matmul)
    assert fired(fast)["contract-shared-rows"] == 1
    assert not [n for n in fast.graph.nodes if n.target is torch.cat]


def test_several_parts() -> None:
    torch.manual_seed(2)
    fast = same(Net(both_sides, 2 * (P + E)), BATCHES, steps=False)
    assert fired(fast)["contract-shared-rows"] == 1


def read_twice(net: Net, u: Tensor, m: Tensor) -> Tensor:
    wide = torch.cat([u.expand(-1, K, -1), m], 2)
    return net.linear(wide) + wide.sum(2, keepdim=True)


def all_shared(net: Net, u: Tensor, m: Tensor) -> Tensor:
    wide = torch.cat([u.expand(-1, K, -1), u[:, :, :E].expand(-1, K, -1)], 2)
    return net.linear(wide) + m.sum()


def not_shared(net: Net, u: Tensor, m: Tensor) -> Tensor:
    return net.linear(torch.cat([u.expand(-1, K, -1) * m[:, :, :1], m], 2))


def too_narrow(net: Net, u: Tensor, m: Tensor) -> Tensor:
    wide = torch.cat([u[:, :, :42].expand(-1, K, -1), m], 2)
    return F.linear(wide, net.w.t()[:, : 42 + E])


@pytest.mark.parametrize("use", [read_twice, all_shared, not_shared, too_narrow])
def test_what_stays(use: Forward) -> None:
    torch.manual_seed(2)
    fast = same(Net(use), BATCHES, steps=False)
    assert not fired(fast)["contract-shared-rows"]
