"""A full device: the error says what takes the memory, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recast
from recast.rewriter import api, memory
from recast.runtime.rows import native_step
from recast.runtime.rows import update as row_update


class Full(nn.Module):
    """Stands for a device that is out of memory."""

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


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(rows, 4, mode="sum") for rows in (1000, 20))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(ids) for table in self.emb], 1)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_step_on_rows(monkeypatch: pytest.MonkeyPatch, lazy: bool) -> None:
    """A failed step loses nothing: no table has changed, and the step can be repeated."""
    model = Bags()
    kind = torch.optim.Adam if lazy else torch.optim.Adagrad
    optimizer = kind(model.parameters(), lr=0.1)
    ids = torch.tensor([[0, 1], [1, 2], [3, 3]])
    fast, _ = recast.optimize(
        model, optimizer, example=[(ids,), (ids[:2],)], sparse_semantics="lazy" if lazy else "exact"
    )
    before = [p.detach().clone() for p in model.parameters()]
    fast(ids).square().sum().backward()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError) as caught:
        where, name = (row_update, "apply") if lazy else (native_step, "step")
        patched.setattr(where, name, full)
        optimizer.step()
    (note,) = caught.value.__notes__
    size = "32.6 kB" if lazy else "16.3 kB"
    assert f"2 tables, 16.3 kB and {size} of optimizer state (emb.0.weight 16 kB, emb.1" in note
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old) and p.grad is not None
    assert all(float(optimizer.state[p]["step"]) == 0 for p in model.parameters())
    optimizer.step()
    assert all(float(optimizer.state[p]["step"]) == 1 for p in model.parameters())
    assert not torch.equal(model.emb[0].weight, before[0])


def test_how_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 kB of tables and, once it steps, 80 of state; 30 kB of other tensors stay everywhere."""
    model = nn.Sequential(nn.Embedding(1000, 10), nn.Linear(10, 1))
    optimizer = torch.optim.Adam(model.parameters())
    memory.trains(model, optimizer)
    monkeypatch.setattr(memory, "_memory", lambda device: (70_000, 70_000))
    told = memory.hint(model)
    assert "40 kB and 80 kB of optimizer state, 80 kB of it still to be made" in told
    assert "world_size=4) under torchrun: on 4 the tables fit" in told  # 120 / (63 - 30) = 3.6
    monkeypatch.setattr(memory, "_memory", lambda device: (170_000, 70_000))
    assert "world_size=N" in memory.hint(model)  # what else is there leaves no room at all


def test_optimize_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(api, "link_what_holds", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        optimised(2)
    assert "2 tables, 480 B without" in caught.value.__notes__[0]
