"""An ordinary model, plain and compiled, for the tests of how a Compiled is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recast.rewriter.capture.capture_model import capture
from recast.rewriter.compiled.module import Compiled


class Ranker(nn.Module):
    """An ordinary model: tables, a chain with BatchNorm and Dropout, defaults and keywords."""

    kind = "ranker"

    def __init__(self, tables: int = 4) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(10, 4) for _ in range(tables))
        self.top = nn.Sequential(
            nn.Linear(4 * tables + 3, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(8, 1),
        )
        self.temperature = 1.0

    def forward(self, dense: Tensor, ids: Tensor, *, bias: float = 0.0) -> Tensor:
        raise NotImplementedError

    def predict(self, *args: Tensor) -> Tensor:
        return torch.sigmoid(self(*args))


class Plain(Ranker):
    def forward(self, dense: Tensor, ids: Tensor, bias: float = 0.0) -> Tensor:  # type: ignore[override]
        e = [t(ids[:, k]) for k, t in enumerate(self.emb)]
        return self.top(torch.cat([dense, *e], 1)).squeeze(1) / self.temperature + bias


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 10, (rows, 4), generator=generator)
    return torch.randn(rows, 3, generator=generator), ids


def pair() -> tuple[Plain, Compiled]:
    """The plain model, and a compiled copy that shares its parameters."""
    torch.manual_seed(0)
    model = Plain()
    return model, Compiled(capture(model, batch(16)))


def twins() -> tuple[Plain, Compiled]:
    """The same, with parameters of their own."""
    torch.manual_seed(0)
    return Plain(), pair()[1]


def same(plain: Any, fast: Any, args: tuple[Any, ...] = batch(7), **kw: Any) -> None:
    torch.manual_seed(3)
    wanted = plain(*args, **kw)
    torch.manual_seed(3)
    torch.testing.assert_close(fast(*args, **kw), wanted)
