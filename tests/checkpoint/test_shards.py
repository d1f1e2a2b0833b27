"""The local parts of a table: every element once, the same parameter object, its state too."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from recast.errors import UsageError
from recast.optim import RowWiseAdagrad
from recast.runtime.plan import Placement, Plan, Shard, Table, explicit
from recast.runtime.ranks import shards
from recast.runtime.ranks.shards import ShardedTable
from recast.runtime.rows.grad import claim, claimed

_KINDS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise")


def _ranks(plan: Plan, name: str) -> list[ShardedTable]:
    table = next(t for t in plan.tables if t.name == name)
    return [
        ShardedTable(table, plan.placement(name), rank, plan.world_size)
        for rank in range(plan.world_size)
    ]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("rows,dim,world", [(7, 5, 4), (1, 3, 2), (13, 8, 3)])
def test_every_element_lives_once(kind: str, rows: int, dim: int, world: int) -> None:
    whole = torch.randn(rows, dim)
    plan = explicit([Table("e.weight", rows, dim)], world, kind)
    back = torch.full((rows, dim), torch.nan)
    for part in _ranks(plan, "e.weight"):
        local = part.local(whole)
        assert local.shape == part.local_shape and local.is_contiguous()
        for (row, column), piece in part.pieces(local):
            at = back[row : row + piece.shape[0], column : column + piece.shape[1]]
            assert at.isnan().all()  # nobody else's
            at.copy_(piece)
    assert torch.equal(back, whole)


def test_several_columns_of_one_rank_lie_side_by_side() -> None:
    cut = (Shard(0, (0, 4), (6, 1)), Shard(1, (0, 2), (6, 2)), Shard(0, (0, 0), (6, 2)))
    table = Table("e.weight", 6, 5)
    own = ShardedTable(table, Placement("e.weight", "column_wise", cut), 0, 2)
    whole = torch.randn(5, 6).t()  # not contiguous
    assert own.columns == ((0, 2), (4, 5)) and own.rows == (0, 6)
    assert torch.equal(own.local(whole), whole[:, [0, 1, 4]])
    assert [offset for offset, _ in own.pieces(own.local(whole))] == [(0, 0), (0, 4)]


def test_shards_of_other_rows_are_refused() -> None:
    cut = (Shard(0, (0, 0), (3, 4)), Shard(0, (3, 0), (3, 4)))
    with pytest.raises(UsageError, match="same rows"):
        ShardedTable(Table("e", 6, 4), Placement("e", "row_wise", cut), 0, 1)


@pytest.mark.parametrize("meta", [False, True])
def test_the_parameter_stays_the_same_object(meta: bool) -> None:
    whole = torch.randn(7, 4)
    parameter = nn.Parameter(torch.empty(7, 4, device="meta") if meta else whole.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    claim(parameter, optimizer)
    own = _ranks(explicit([Table("e", 7, 4)], 2, "row_wise"), "e")[1]
    shards.place(parameter, own, own.local(whole) if meta else None)
    assert optimizer.param_groups[0]["params"][0] is parameter and claimed(parameter)
    assert torch.equal(parameter, whole[4:]) and parameter.requires_grad and parameter.is_leaf
    assert shards.of(parameter) is own
    upstream = torch.randn(3, 4)
    parameter.backward(upstream)
    optimizer.step()
    assert torch.equal(parameter.detach(), whole[4:] - 0.5 * upstream)


def test_a_data_parallel_table_stays_whole() -> None:
    parameter = nn.Parameter(torch.randn(3, 2))
    before = parameter.data_ptr()
    shards.place(parameter, _ranks(explicit([Table("e", 3, 2)], 2, "data_parallel"), "e")[1])
    assert shards.of(parameter) is None and parameter.data_ptr() == before


def test_a_rank_may_own_nothing() -> None:
    parameter = nn.Parameter(torch.randn(3, 2))
    optimizer = torch.optim.Adagrad([parameter])
    shards.place(parameter, _ranks(explicit([Table("e", 3, 2)], 2, "table_wise"), "e")[1])
    shards.place_state(optimizer)
    assert parameter.shape == (0, 2) and optimizer.state[parameter]["sum"].shape == (0, 2)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_state_is_cut_as_its_table(kind: str) -> None:
    parameter = nn.Parameter(torch.randn(7, 4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.backward(torch.randn(7, 4))
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state[parameter])
    own = _ranks(explicit([Table("e", 7, 4)], 2, kind), "e")[0]
    shards.place(parameter, own)
    shards.place_state(optimizer)
    after = optimizer.state[parameter]
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(after[key], own.local(before[key]))
    assert after["step"] == 1


def test_a_value_a_row_is_cut_by_rows_and_refused_by_columns() -> None:
    def trained() -> tuple[nn.Parameter, RowWiseAdagrad]:
        parameter = nn.Parameter(torch.randn(7, 4))
        optimizer = RowWiseAdagrad([parameter])
        parameter.backward(torch.randn(7, 4))
        optimizer.step()
        optimizer.zero_grad()
        return parameter, optimizer

    parameter, optimizer = trained()
    sums = optimizer.state[parameter]["sum"].clone()
    shards.place(parameter, _ranks(explicit([Table("e", 7, 4)], 3, "row_wise"), "e")[1])
    shards.place_state(optimizer)
    assert torch.equal(optimizer.state[parameter]["sum"], sums[3:5])
    parameter, optimizer = trained()
    shards.place(parameter, _ranks(explicit([Table("e", 7, 4)], 3, "column_wise"), "e")[1])
    with pytest.raises(UsageError, match="one value a row"):
        shards.place_state(optimizer)


def test_state_on_meta_starts_as_the_optimizer_starts_it() -> None:
    with torch.device("meta"):
        parameter = nn.Parameter(torch.empty(7, 4))
        optimizer = torch.optim.Adagrad([parameter], initial_accumulator_value=0.25)
    own = _ranks(explicit([Table("e", 7, 4)], 2, "row_wise"), "e")[0]
    shards.place(parameter, own, torch.zeros(4, 4))
    shards.place_state(optimizer)
    state = optimizer.state[parameter]
    assert (
        torch.equal(state["sum"], torch.full((4, 4), 0.25)) and state["step"].device.type == "cpu"
    )


def test_refusals() -> None:
    own = _ranks(explicit([Table("e", 7, 4)], 2, "row_wise"), "e")[0]
    with pytest.raises(UsageError, match="not the shape of the whole"):
        shards.place(nn.Parameter(torch.zeros(7, 5)), own)
    with pytest.raises(UsageError, match="must be given"):
        shards.place(nn.Parameter(torch.empty(7, 4, device="meta")), own)
    parameter = nn.Parameter(torch.zeros(7, 4))
    parameter.grad = torch.zeros(7, 4)
    with pytest.raises(UsageError, match="has a gradient"):
        shards.place(parameter, own)
    parameter.grad = None
    shards.place(parameter, own)
    with pytest.raises(UsageError, match="placed already"):
        shards.place(parameter, own)


def test_it_is_copied_and_pickled() -> None:
    own = _ranks(explicit([Table("e", 7, 4)], 2, "row_wise"), "e")[1]
    assert copy.deepcopy(own) is own
    assert pickle.loads(pickle.dumps(own)) == own
