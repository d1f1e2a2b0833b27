"""A full device: the error says what takes the memory, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recast


class Full(nn.Module):
    """Stands for a device whose memory is at an end."""

    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


class Model(nn.Module):
    def __init__(self, tables: int) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(10 * (k + 1), 4) for k in range(tables))
        self.last = nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.cat([table(ids[:, 0]) for table in self.emb], 1))


def optimised(tables: int) -> recast.Compiled:
    ids = torch.zeros(4, 1, dtype=torch.int64)
    return recast.optimize(Model(tables), example=[(ids,), (ids[:3],)], passes="group-embeddings")


def test_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = optimised(4)
    monkeypatch.setattr(nn.Identity, "forward", Full.forward)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fast(torch.zeros(2, 1, dtype=torch.int64))
    note = caught.value.__notes__[-1]
    assert "4 tables, 1.6 kB without optimizer state (the 3 largest: emb.3.weight 640 B," in note
    assert "world_size=N" in note and "recast plan" in note


def test_a_move() -> None:
    fast = optimised(1)

    def full(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fast._apply(full)
    assert (
        "1 table, 160 B without optimizer state (emb.0.weight 160 B)" in caught.value.__notes__[0]
    )
