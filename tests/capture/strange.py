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
