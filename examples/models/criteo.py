"""The shape of the data for the models in this folder: click logs, one id per field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Subject = tuple[nn.Module, Any, Callable[[Tensor], Tensor]]

# Rows of the tables of Criteo x4: 13 numbers as categories, then 26 categories.
X4 = (
    649, 9364, 14746, 490, 476707, 11618, 4142, 1373, 7275, 13, 169, 407, 1376, 1460, 583, 10131227,
    2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173,
    4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
SMALL = (20, 7, 300, 50, 11, 3, 1000, 80)


def rows(full: bool) -> tuple[int, ...]:
    return X4 if full else SMALL


def ids(rows: Sequence[int], batch: int) -> Tensor:
    """(batch, fields): one id of every field."""
    g = torch.Generator().manual_seed(0)
    return torch.stack([torch.randint(n, (batch,), generator=g) for n in rows], 1)


def tables(rows: Sequence[int], dim: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Embedding(n, dim) for n in rows)


def lookup(tables: nn.ModuleList, x: Tensor) -> Tensor:
    """(batch, fields, dim)."""
    return torch.stack([table(x[:, k]) for k, table in enumerate(tables)], 1)


def mlp(sizes: Sequence[int], dropout: float = 0.0, last: bool = False) -> nn.Sequential:
    """Linear, ReLU, Dropout; the last layer is a Linear alone unless ``last``."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers if last else layers[:-2])


def loss(logit: Tensor) -> Tensor:
    """Cross entropy against made-up labels: every fourth row is a click."""
    label = (torch.arange(len(logit), device=logit.device) % 4 == 0).to(logit.dtype)
    return F.binary_cross_entropy_with_logits(logit, label)
