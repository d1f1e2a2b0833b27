"""The norm in clipping and the finiteness in loss scaling are of all ranks, on every rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import processes, run
from torch import Tensor, nn

from recast.runtime.plan import Table, explicit
from recast.runtime.ranks import shards
from recast.runtime.rows import ranks as row_ranks
from recast.runtime.rows.grad import RowGrad, row_grad
from recast.runtime.rows.optimizer import attach
from recast.runtime.rows.pieces import unique_piece

ROWS, DIM = 7, 5
SHARDINGS = ("row_wise", "column_wise", "table_wise")
ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf)


def _whole() -> tuple[Tensor, Tensor, Tensor]:
    """(rows, dim) gradient of a table with untouched rows, and (4,) of a dense parameter."""
    g = torch.Generator().manual_seed(0)
    table = torch.randn(ROWS, DIM, generator=g)
    table[::3] = 0.0
    return torch.randn(ROWS, DIM, generator=g), table, torch.randn(4, generator=g)


def _rank(world: int, sharding: str, rank: int) -> list[nn.Parameter]:
    """The parameters of one rank with their gradients: a part of the table, a replica."""
    value, grad, dense = _whole()
    table = Table("table", ROWS, DIM)
    placement = explicit((table,), world, {"table": sharding}).placement("table")
    sharded = shards.ShardedTable(table, placement, rank, world)
    parameter = nn.Parameter(value.clone())
    shards.place(parameter, sharded)
    part = sharded.local(grad)
    touched = part.abs().sum(1).nonzero().squeeze(1) if part.numel() else torch.empty(0).long()
    pieces = [unique_piece(touched, part[touched])]
    shape, device = parameter.shape, parameter.device
    parameter.grad = row_grad(shape, torch.float32, device, pieces, table=sharded)
    replica = nn.Parameter(torch.zeros(4))
    replica.grad = dense.clone()
    return [parameter, replica]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world", [2, 3, 8])  # 8: ranks that own nothing
def test_norms(world: int, sharding: str) -> None:
    _, table, dense = _whole()

    def rank(r: int) -> list[Tensor]:
        found = []
        for order in ORDERS:
            parameters = _rank(world, sharding, r)
            grads = [p.grad for p in parameters]
            ways = (None, False, True)
            found += [torch.nn.utils.get_total_norm(grads, order, foreach=way) for way in ways]
            found.append(grads[0].norm(order))  # type: ignore[union-attr]
        return found

    answers = run(world, rank)
    for k, order in enumerate(ORDERS):
        wanted = torch.nn.utils.get_total_norm([table, dense], order)
        for answer in answers:
            for norm in answer[4 * k : 4 * k + 3]:
                torch.testing.assert_close(norm, wanted)
                assert torch.equal(norm, answers[0][4 * k])  # to the bit, or replicas part
            torch.testing.assert_close(answer[4 * k + 3], table.norm(order))


@pytest.mark.parametrize("order", [0.0, -1.0, -math.inf])
def test_norms_that_see_untouched_rows(order: float) -> None:
    _, table, _ = _whole()
    answers = run(8, lambda r: torch.linalg.vector_norm(_grad(_rank(8, "row_wise", r)[0]), order))
    for answer in answers:
        torch.testing.assert_close(answer, torch.linalg.vector_norm(table, order))


def _grad(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter.grad, RowGrad)
    return parameter.grad


def test_norms_whose_squares_leave_fp32() -> None:
    def rank(r: int) -> Tensor:
        parameter, _ = _rank(3, "row_wise", r)
        return _grad(parameter).mul_(1e30).norm()

    for norm in run(3, rank):
        torch.testing.assert_close(norm, _whole()[1].norm() * 1e30)


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "scaled": lambda p: _grad(p).mul_(2.0),
    "cloned": lambda p: setattr(p, "grad", _grad(p).clone().mul_(2.0)),
    "summed": lambda p: setattr(p, "grad", _grad(p) + _grad(p)),
    "accumulated": lambda p: _grad(p).add_(_grad(p).clone()),
    "dense": lambda p: _grad(p).clamp_(-100, 100).mul_(2.0),
    "dense and rows": lambda p: setattr(p, "grad", _promoted(_grad(p).clone()) + _grad(p)),
    "data": lambda p: setattr(_grad(p), "data", _grad(p).data * 2.0),
    "copied": lambda p: setattr(p, "grad", copy.deepcopy(_grad(p)).mul_(2.0)),
}


def _promoted(grad: Tensor) -> Tensor:
    return grad.clamp_(-100, 100)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_happened_to_the_gradient(change: str) -> None:
    def rank(r: int) -> Tensor:
        parameter, _ = _rank(3, "row_wise", r)
        CHANGES[change](parameter)
        return torch.nn.utils.clip_grad_norm_([parameter], 1e9)

    for norm in run(3, rank):
        torch.testing.assert_close(norm, _whole()[1].norm() * 2.0)


def test_clipping_gives_the_gradients_of_one_process() -> None:
    _, table, dense = _whole()
    plain = [nn.Parameter(torch.zeros_like(g)) for g in (table, dense)]
    plain[0].grad, plain[1].grad = table.clone(), dense.clone()
    torch.nn.utils.clip_grad_norm_(plain, 0.7)

    def rank(r: int) -> list[Tensor]:
        parameters = _rank(3, "row_wise", r)
        torch.nn.utils.clip_grad_norm_(parameters, 0.7)
        assert _grad(parameters[0]).lazy
        return [_grad(parameters[0]).dense(), parameters[1].grad]

    answers = run(3, rank)
    torch.testing.assert_close(torch.cat([a[0] for a in answers]), plain[0].grad)
    for answer in answers:
        assert torch.equal(answer[1], answers[0][1])
        torch.testing.assert_close(answer[1], plain[1].grad)


def _steps(spoil: float | None, world: int, sharding: str) -> Callable[[int], Any]:
    """Two steps under a loss scaler; in the first, one element of the table's gradient is bad."""

    def rank(r: int) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        parameters = _rank(world, sharding, r)
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        attach(optimizer)
        before = [p.detach().clone() for p in parameters]
        grad = _grad(parameters[0])
        if spoil is not None and isinstance(grad, RowGrad) and r == 1 and grad.numel():
            grad.cell.pieces[0].rows.data[0, 0] = spoil
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(a, b) for a, b in zip(before, parameters, strict=True)]
        return [torch.tensor(scaler.get_scale()), torch.tensor(changed), parameters[1].detach()]

    return rank


@pytest.mark.parametrize("spoil", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_what_is_not_finite_on_one_rank_stops_all(spoil: float, sharding: str) -> None:
    for scale, changed, _ in run(3, _steps(spoil, 3, sharding)):
        assert scale == 2.0  # halved, on every rank
        assert not changed.any()


def test_finite_gradients_step_everywhere() -> None:
    answers = run(3, _steps(None, 3, "row_wise"))
    for scale, changed, dense in answers:
        assert scale == 4.0
        assert changed.all()
        assert torch.equal(dense, answers[0][2])


def test_over_gloo() -> None:
    def rank(r: int) -> list[Tensor]:
        norm = torch.nn.utils.clip_grad_norm_(_rank(2, "row_wise", r), 1.0)
        return [norm, *_steps(math.nan, 2, "row_wise")(r)]

    _, table, dense = _whole()
    for norm, scale, changed, _ in processes(2, rank):
        torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([table, dense]))
        assert scale == 2.0
        assert not changed.any()


def test_tables_of_one_process_ask_nobody() -> None:
    _, table, _ = _whole()
    grad = row_grad((ROWS, DIM), torch.float32, torch.device("cpu"), [_all(table)])
    assert row_ranks._by_group([grad, table]) == []


def _all(table: Tensor) -> Any:
    return unique_piece(torch.arange(ROWS), table)
