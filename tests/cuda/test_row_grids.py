"""Launches for rows: only the first direction of a grid may have more than 65,535 blocks, so that
one grows with the number of tables and lookups.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_gpu import Emulated
from emulated_updates import F32, grad_of, same, states, table
from torch import Tensor

from recast.runtime.gpu.cuda_launch import Dims
from recast.runtime.rows import cuda as row_cuda
from recast.runtime.rows import cuda_shared_sorts as row_sorts
from recast.runtime.rows import cuda_sort as row_cuda_sort
from recast.runtime.rows.pieces import Piece
from recast.runtime.rows.update import Update


def updates(tables: int, bags: int) -> tuple[list[Tensor], list[Update]]:
    """What is written to, and updates of means of two ids."""
    g = torch.Generator().manual_seed(bags)
    made = []
    for _ in range(tables):
        weight = table(g, 40, 8, F32)
        ids, rows = torch.randint(40, (2 * bags,), generator=g), torch.randn(bags, 8, generator=g)
        piece = Piece(ids, rows, None, 2, None, True, 0, None)
        held = states("adagrad", weight, F32)
        made.append(Update("adagrad", weight, grad_of(weight, [piece]), held, 0.1, 1e-2))
    return [t for u in made for t in (u.weight, *u.states)], made


@pytest.fixture
def grids(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> dict[str, Dims]:
    """Those of the launches so far, by kernel."""
    # Gradients of other tests, as long as garbage holds them, would be sorted along.
    monkeypatch.setattr(row_sorts, "_LIVE", [])
    found: dict[str, Dims] = {}
    launch = emulated.launch

    def noting(kernel: Any, grid: Dims, *rest: Any) -> None:
        found[kernel.name] = grid
        launch(kernel, grid, *rest)

    monkeypatch.setattr(emulated, "launch", noting)
    return found


def test_any_number_of_tables(grids: dict[str, Dims]) -> None:
    across = []
    for tables in (2, 5):
        _, made = updates(tables, 3)
        assert row_sorts.norms([u.grad for u in made], 2.0) is not None
        assert row_cuda.update(made) == []
        assert grids["bag_factors"][0] == grids["table_norms"][0] == tables
        across.append({name: grid[1:] for name, grid in grids.items()})
    assert across[0] == across[1]


@pytest.mark.usefixtures("emulated")
def test_more_bags_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, made = updates(2, 700)
    assert row_cuda.update(made) == []
    monkeypatch.setattr(row_cuda_sort, "_MOST_BLOCKS", 2)
    found, made = updates(2, 700)
    assert row_cuda.update(made) == []
    assert same(found, wanted)
