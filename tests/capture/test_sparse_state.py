"""Sparse tensors that a model holds, as graph recommenders keep their adjacency."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recast

KEPT = ("attribute", "list", "buffer", "parameter")


def adjacency(layout: torch.layout) -> Tensor:
    g = torch.Generator().manual_seed(0)
    dense = torch.rand(50, 50, generator=g) * (torch.rand(50, 50, generator=g) < 0.2)
    return dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr()


class Graph(nn.Module):
    def __init__(self, kept: str, layout: torch.layout = torch.sparse_coo) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.kept = nn.Embedding(50, 8), kept
        held = adjacency(layout)
        if kept == "buffer":
            self.register_buffer("near", held)
        elif kept == "list":
            self.near = [held]
        else:
            self.near = nn.Parameter(held, requires_grad=False) if kept == "parameter" else held

    def adjacency(self) -> Any:
        return self.near[0] if self.kept == "list" else self.near

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        rows = torch.sparse.mm(self.adjacency(), self.rows.weight)
        return (rows[users] * rows[items]).sum(1)


class Dropped(Graph):
    """Dropout in place, which thins out the model's own values for good."""

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        near = self.adjacency()
        values = nn.functional.dropout(near._values(), 0.5, self.training, inplace=True)
        thinned = torch.sparse_coo_tensor(near._indices(), values, near.shape, is_coalesced=True)
        rows = torch.sparse.mm(thinned, self.rows.weight)
        return (rows[users] * rows[items]).sum(1)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows) % 50, torch.arange(rows) * 7 % 50


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.parametrize("kept", KEPT)
def test_it_may_be_kept_in_any_way(kept: str, layout: torch.layout) -> None:
    plain = Graph(kept, layout)
    fast = recast.optimize(plain, example=batch(6))
    assert fast.report.to_dict()["captured"] == "whole", str(fast.report)
    for rows in (6, 9):
        torch.testing.assert_close(fast(*batch(rows)), plain(*batch(rows)))
    assert list(fast.state_dict()) == list(plain.state_dict())
    if layout is torch.sparse_coo:
        assert recast.diff(plain, fast, batch(9)).ok
    if layout is torch.sparse_coo and kept != "parameter":  # else torch cannot copy the plain one
        torch.testing.assert_close(copy.deepcopy(fast)(*batch(4)), plain(*batch(4)))


@pytest.mark.parametrize("kept", ("attribute", "list", "buffer"))
def test_values_that_forward_writes_are_as_before(kept: str) -> None:
    plain = Dropped(kept)
    alone = copy.deepcopy(plain)
    before = plain.adjacency()._values().clone()
    fast = recast.optimize(plain, example=batch(6))
    assert torch.equal(plain.adjacency()._values(), before)
    for rows in (6, 9, 6):
        found = []
        for model in (fast, alone):
            torch.manual_seed(rows)
            found.append(model.train()(*batch(rows)))
        torch.testing.assert_close(*found)
    assert not torch.equal(alone.adjacency()._values(), before)
