"""What a model lacked when it was optimised and has later, or the other way round, is noticed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.errors import RecastWarning

IDS = torch.randint(9, (6, 3), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.bag = nn.Embedding(9, 4), nn.EmbeddingBag(9, 4, mode="sum")
        self.net = nn.Sequential(
            nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 4)
        )
        self.register_buffer("mask", None)
        self.register_buffer("shift", torch.ones(4))
        self.register_parameter("scale", None)
        self.register_module("last", None)
        self.factor, self.act = 2.0, torch.tanh
        self.many = nn.ParameterList([torch.ones(4)])

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.act(self.net(self.emb(ids).sum(1))) * self.factor + self.bag(ids)
        y = y if self.mask is None else y * self.mask
        y = y if self.shift is None else y + self.shift
        y = y if self.scale is None else y * self.scale
        y = y if self.last is None else self.last(y)
        y = self.more(y) if hasattr(self, "more") else y
        for one in self.many:
            y = y * one + 1
        y = y / getattr(self.emb, "temperature", 1.0)
        return y, sum((p.square().sum() for p in self.parameters()), torch.zeros(()))


def filled(make: Callable[[], nn.Module]) -> nn.Module:
    module = make()
    for p in module.parameters():
        nn.init.constant_(p, 0.3)
    return module


CHANGES: dict[str, Callable[[Any], object]] = {
    "a buffer that was None": lambda m: setattr(m, "mask", torch.arange(4.0)),
    "a buffer that is None": lambda m: setattr(m, "shift", None),
    "a parameter that was None": lambda m: setattr(m, "scale", nn.Parameter(torch.full((4,), 3.0))),
    "a module that was None": lambda m: setattr(m, "last", nn.Softmax(1)),
    "a module that was not there": lambda m: setattr(m, "more", filled(lambda: nn.Linear(4, 4))),
    "a number becomes a parameter": lambda m: setattr(m, "factor", nn.Parameter(torch.ones(4))),
    "a function becomes a module": lambda m: setattr(m, "act", nn.Sigmoid()),
    "a longer list": lambda m: m.many.append(torch.full((4,), 2.0)),
    "one parameter more": lambda m: setattr(m.bag, "own", nn.Parameter(torch.ones(2))),
    "an attribute of a layer": lambda m: setattr(m.emb, "temperature", 2.0),
    "the bias of a layer": lambda m: setattr(m.net[0], "bias", nn.Parameter(torch.ones(4))),
    "padding": lambda m: setattr(m.emb, "padding_idx", 2),
    "how an activation is computed": lambda m: setattr(m.net[2], "approximate", "tanh"),
    "statistics of the batch": lambda m: setattr(m.net[1], "track_running_stats", False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    fast = recast.optimize(copy.deepcopy(plain), example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(IDS), plain(IDS))
    CHANGES[name](plain)
    CHANGES[name](fast)
    with pytest.warns(RecastWarning, match="plain forward"):
        got = fast(IDS)
    wanted = plain(IDS)
    torch.testing.assert_close(got, wanted)
    for y, reg in (got, wanted):
        ((y * torch.linspace(-1, 1, 24).view(6, 4)).sum() + reg).backward()
    for (n, p), q in zip(plain.named_parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda text, n=n: f"{n}: {text}")


class Scaled(nn.Module):
    """Asks for a parameter and a buffer behind a chain, which has then drawn random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(10, 4)
        self.top = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.top(self.emb(ids))
        y = y if self.scale is None else y * self.scale
        return y if self.shift is None else y + self.shift


@pytest.mark.parametrize("name", ["scale", "shift"])
def test_what_is_set_to_none_behind_a_chain(name: str) -> None:
    plain = Scaled()
    fast = recast.optimize(copy.deepcopy(plain), example=IDS)
    for model in (plain, fast):
        setattr(model, name, None)
    with pytest.warns(RecastWarning, match=f"plain forward: {name} is None"):
        recast.diff(plain, fast, IDS, steps=1).check()
