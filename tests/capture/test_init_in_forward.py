"""``nn.init`` and other writes in forward that name what they write to, and all that draws."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recast
from recast.rewriter import order

INIT: dict[str, Callable[[Tensor], Any]] = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "ones": nn.init.ones_,
    "constant": lambda b: nn.init.constant_(b, 0.5),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "relu": lambda x: F.relu(input=x, inplace=True),
    "relu_": lambda x: torch.relu_(input=x),
    "clamp_": lambda x: torch.clamp_(input=x, min=0.1),
    "dropout": lambda x: F.dropout(input=x, p=0.5, training=True, inplace=True),
}


class Routed(nn.Module):
    """As the routing of MIND begins; the output hangs on ``b`` but weakly."""

    def __init__(self, init: Callable[[Tensor], Any], weak: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.top = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.init, self.weak = init, weak

    def forward(self, ids: Tensor) -> Tensor:
        b = torch.zeros(3, 5)
        self.init(b)
        found = (torch.softmax(b, -1) @ self.top(self.items(ids))).square().sum((1, 2))
        return 1 + 1e-6 * found.mean() if self.weak else found


class Written(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.top = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.write = write

    def forward(self, ids: Tensor) -> Tensor:
        y = self.top(self.items(ids)) * 1
        self.write(y)
        return y.sum(1)


def same(plain: nn.Module, ids: Callable[[int], Tensor]) -> None:
    """Equal outputs and gradients from equal seeds, call by call."""
    alone = copy.deepcopy(plain)
    fast = recast.optimize(plain, example=[ids(6), ids(4)])
    assert fast.report.to_dict()["captured"] == "whole", str(fast.report)
    for rows in (6, 9):
        found = []
        for model in (fast, alone):
            torch.manual_seed(rows)
            model.zero_grad()
            out = model(ids(rows))
            out.backward(torch.randn_like(out))
            found.append([out, torch.rand(2), *(p.grad for p in model.parameters())])
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("init", INIT)
def test_a_tensor_that_is_initialised_in_forward(init: str, weak: bool) -> None:
    same(Routed(INIT[init], weak), lambda rows: torch.arange(rows * 5).view(rows, 5) % 50)


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_is_given_by_its_name(write: str) -> None:
    same(Written(WRITES[write]), lambda rows: torch.arange(rows))


def test_all_that_draws_is_known() -> None:
    """Every function of torch whose operator is tagged as drawing random numbers."""
    tag, unknown = torch.Tag.nondeterministic_seeded, []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        tagged = isinstance(packet, torch._ops.OpOverloadPacket) and any(
            tag in getattr(packet, one).tags for one in packet.overloads()
        )
        if not tagged or name.startswith(("_", "miopen")):
            continue
        functions = [getattr(home, name, None) for home in (torch, F, nn.init)]
        given = [f for f in functions if f is not None and "deprecated" not in (f.__doc__ or "")]
        unknown += [f"{f.__module__}.{name}" for f in given if f not in order._RANDOM]
        if hasattr(Tensor, name) and name not in order._RANDOM_METHODS:
            unknown.append(f"Tensor.{name}")
    assert unknown == []
