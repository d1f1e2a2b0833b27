"""Seeded batches of the forms that recommendation models take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCAB = (11, 7, 13, 5)  # rows of the tables
DIM = 4


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def field_ids(rows: int, seed: int, vocab: tuple[int, ...] = VOCAB) -> tuple[Tensor]:
    """One int64 matrix (rows, fields) of ids, each local to its field; many repeat."""
    g = generator(seed)
    return (torch.stack([torch.randint(v, (rows,), generator=g) for v in vocab], 1),)


def dense_and_bags(
    rows: int,
    seed: int,
    dense: int = 3,
    tables: int = 4,
    *,
    last: bool = False,
    stacked: bool = False,
) -> tuple[Any, ...]:
    """``(dense (rows, dense), offsets, ids)`` with a list entry per table; bags of 0 to 3 ids."""
    g = generator(seed)
    offsets, ids = [], []
    for k in range(tables):
        counts = torch.randint(0, 4, (rows,), generator=g)
        ends = torch.cumsum(counts, 0)
        start = torch.cat([torch.zeros(1, dtype=torch.long), ends])
        offsets.append(start if last else start[:-1])
        ids.append(torch.randint(VOCAB[k % len(VOCAB)], (int(ends[-1]),), generator=g))
    x = torch.randn(rows, dense, generator=g)
    return x, (torch.stack(offsets) if stacked else offsets), ids


def features(rows: int, seed: int) -> tuple[dict[str, Tensor]]:
    """A dict of named features: three ids, a sequence padded with 0, a number."""
    g = generator(seed)
    history = torch.randint(1, VOCAB[1], (rows, 5), generator=g)
    history[torch.arange(5) >= torch.randint(1, 6, (rows, 1), generator=g)] = 0
    return (
        {
            "user": torch.randint(VOCAB[0], (rows,), generator=g),
            "item": torch.randint(VOCAB[1], (rows,), generator=g),
            "city": torch.randint(VOCAB[2], (rows,), generator=g),
            "history": history,
            "price": torch.randn(rows, generator=g),
        },
    )


def sequences(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Histories of six ids, padded with 0 in front, and an item for each place."""
    g = generator(seed)
    history = torch.randint(1, VOCAB[0], (rows, 6), generator=g)
    history[torch.arange(6) < torch.randint(0, 6, (rows, 1), generator=g)] = 0
    return history, torch.randint(VOCAB[0], (rows, 6), generator=g)


def packed(rows: int, seed: int) -> tuple[Tensor]:
    """One float matrix: four id columns, a sequence of four ids padded with 0, two numbers."""
    g = generator(seed)
    ids = field_ids(rows, seed)[0]
    history = torch.randint(1, VOCAB[0], (rows, 4), generator=g)
    history[torch.arange(4) >= torch.randint(1, 5, (rows, 1), generator=g)] = 0
    return (torch.cat([ids.float(), history.float(), torch.randn(rows, 2, generator=g)], 1),)
