"""``sparse_semantics="lazy"`` on ranks: a replicated table would have all of its rows stepped."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import run
from torch import Tensor, nn

import recast
from recast.errors import UsageError


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 1)).double()


def _batches(rows: slice) -> list[Tensor]:
    return [torch.tensor(ids)[rows] for ids in ([1, 2, 3, 3], [4, 1, 0, 0], [2, 2, 5, 1])]


def _trained(model: nn.Module, rows: slice = slice(None), **options: object) -> Tensor:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fast, optimizer = recast.optimize(
        model, optimizer, example=_batches(rows)[0], sparse_semantics="lazy", **options
    )
    for ids in _batches(rows):
        optimizer.zero_grad()
        fast(ids).square().mean().backward()
        optimizer.step()
    state: dict[str, Tensor] = fast.full_state_dict(ranks="all")
    return state["0.weight"].clone()


def test_the_numbers_of_one_process() -> None:
    made = _made()
    ranks = [copy.deepcopy(made) for _ in range(2)]
    asked = {"data_parallel_threshold": 28}  # would replicate the table

    def rank(r: int) -> Tensor:
        return _trained(ranks[r], slice(2 * r, 2 * r + 2), sharding=asked, topology="dgx-a100")

    wanted = _trained(made)
    for found in run(2, rank):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_replicating_is_refused() -> None:
    given = {"sharding": {"0": "data_parallel"}, "world_size": 2}
    with pytest.raises(UsageError, match="Adam step looked-up rows only, and all ranks reduce"):
        _trained(_made(), **given)
    optimizer = torch.optim.Adam((model := _made()).parameters())
    many, _ = recast.optimize(model, optimizer, example=_batches(slice(None))[0], **given)
    assert many.plan.placement("0.weight").sharding_type == "data_parallel"
