"""A forward that is no plain method: an object that can be called, a static method, one that a
decorator made.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast

IDS = torch.randint(9, (6, 4), generator=torch.Generator().manual_seed(0))
TABLE = nn.Parameter(torch.rand(9, 3))


def look_up(ids: Tensor, scale: float = 2.0) -> Tensor:
    return F.embedding(ids, TABLE).sum(1) * scale


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.emb(ids).sum(1)
        return out


class Lookup:
    def __call__(self, ids: Tensor) -> Tensor:
        return look_up(ids, scale=4.0)


class Partial(nn.Module):
    forward = functools.partial(look_up, scale=3.0)


class Callee(nn.Module):
    forward = Lookup()


class OfModule(nn.Module):
    forward: Any = Pooled()


class Static(nn.Module):
    @staticmethod
    def forward(ids: Tensor) -> Tensor:
        return look_up(ids)


class OfClass(nn.Module):
    factor = 2.0

    @classmethod
    def forward(cls, ids: Tensor) -> Tensor:
        return look_up(ids, scale=cls.factor)


def scaled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Hands on an argument that the caller of the model does not give."""

    @functools.wraps(forward)
    def inner(self: nn.Module, *args: Any) -> Tensor:
        return forward(self, *args, 2.0)

    return inner


class Decorated(Pooled):
    @scaled
    def forward(self, ids: Tensor, scale: float) -> Tensor:
        return super().forward(ids) * scale


@pytest.mark.filterwarnings("ignore:functools.partial will be:FutureWarning")  # from Python 3.13
@pytest.mark.parametrize("kind", [Partial, Callee, OfModule, Static, OfClass, Decorated])
def test_a_forward_of_any_kind(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    fast = recast.optimize(model, example=IDS)
    assert fast.report.to_dict()["captured"] == "whole"
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    for ids in (IDS, IDS[:2], IDS[0, :, None], IDS[None]):  # the last runs the plain forward
        with pytest.warns(recast.RecastWarning) if ids.dim() == 3 else torch.enable_grad():
            torch.testing.assert_close(fast(ids), model(ids))


def test_a_forward_whose_arguments_cannot_be_read() -> None:
    class Builtin(nn.Module):
        forward = torch.relu

    fast = recast.optimize(Builtin(), example=torch.randn(4))
    assert "no signature found" in str(fast.report.to_dict()["why"])
    torch.testing.assert_close(fast(-torch.ones(3)), torch.zeros(3))
