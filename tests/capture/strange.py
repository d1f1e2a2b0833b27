"""What the tests of strange forwards share: a model to derive from, and its result."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recast

IDS = torch.randint(9, (6, 4), generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)
        self.reset()

    def reset(self) -> None: ...

    def rows(self, ids: Tensor) -> Tensor:
        return F.relu(self.out(self.emb(ids).sum(1)))


def pair(kind: type[Base], *example: Any) -> tuple[Any, Any]:
    plain = kind()
    return plain, recast.optimize(copy.deepcopy(plain), example=example or IDS)


def why(fast: recast.Compiled) -> str:
    return str(fast.report.to_dict().get("why"))


def train_alike(plain: nn.Module, fast: nn.Module) -> None:
    """Three steps of both, drawing from one seed, end in the same parameters and buffers."""
    for model in (plain, fast):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            out = model(IDS)
            (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum().backward()
            optimizer.step()
    for (name, a), b in zip(plain.state_dict().items(), fast.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, msg=lambda text, name=name: f"{name}: {text}")
