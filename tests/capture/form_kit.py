"""How a form is written: its decorator, its batches, and a model to derive from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {}


def form(batch: Callable[[int], tuple[Any, ...]]) -> Callable[[type], type]:
    def add(kind: type) -> type:
        def make() -> nn.Module:
            torch.manual_seed(0)
            return kind()

        FORMS[kind.__name__] = make, batch
        return kind

    return add


def ids(rows: int, fields: int = 3) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randint(0, 10, (rows, fields), generator=generator),)


def floats(rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows)),)


def named(rows: int) -> tuple[dict[str, Tensor]]:
    x = ids(rows)[0]
    return ({"user": x[:, 0], "item": x[:, 1], "tag": x[:, 2]},)


def bags(rows: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    counts = torch.randint(0, 4, (2, rows), generator=generator)
    offsets = torch.cat([torch.zeros(2, 1, dtype=torch.long), counts.cumsum(1)[:, :-1]], 1)
    flat = [torch.randint(0, 10, (int(c.sum()) + 1,), generator=generator) for c in counts]
    return floats(rows)[0], offsets, flat


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4)
        self.out = nn.Linear(4, 1)
