"""Tables stepped whole, beside torch's own on a dense gradient. The judge is torch's in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from row_lookup import piece
from row_optimizers import densified, fused
from row_trio import DECAYING, MOVING, STATELESS, Trio, Way
from torch import Tensor
from torch.optim import AdamW, Optimizer, lr_scheduler

from recast.runtime.rows import whole
from recast.runtime.rows.ages import Moment
from recast.runtime.rows.grad import row_grad

pytestmark = pytest.mark.parametrize("kernel", ["kernel"], indirect=True)

WAYS: dict[str, Way] = {
    **MOVING,
    **DECAYING,
    **STATELESS,
    "adamw": lambda **how: lambda p: AdamW(p, **{"lr": 1e-2, "weight_decay": 0.2, **how}),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture(autouse=True)
def _no_dense_gradients() -> Iterator[None]:
    yield
    assert densified() == 0 and fused() > 0


def check(trio: Trio) -> None:
    """Its state is torch's own at any time."""
    assert all(type(trio.state(name)) is Tensor for name in trio.names())
    trio.check()


@pytest.mark.parametrize("width", [1, 3, 4, 7, 8, 31, 100])
def test_widths(width: int, way: Way) -> None:
    trio = Trio(way(), width)
    trio.train(30)
    check(trio)


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (2, 5000), (819, 5), (820, 5), (5000, 3)])
def test_gradients_of_some_rows_at_a_time(
    rows: int, width: int, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "SMALL", 1 << 40)
    trio = Trio(way(), width, rows)
    for _ in range(10):
        trio.step(torch.randint(0, rows, (30,), generator=trio.draws))
    check(trio)


def test_a_gradient_of_no_rows(way: Way) -> None:
    trio = Trio(way())
    trio.train(3)
    for _ in range(10):
        trio.step(torch.empty(0, dtype=torch.int64))
    check(trio)


@pytest.mark.parametrize("way", [way for name, way in WAYS.items() if name not in STATELESS])
def test_a_view_of_the_state(way: Way) -> None:
    trio = Trio(way())
    trio.train(3)
    seen = trio.state(trio.names()[0]).view(-1)
    trio.train(10)
    assert torch.equal(seen, trio.state(trio.names()[0]).view(-1))
    check(trio)


@pytest.mark.parametrize("way", [way for name, way in WAYS.items() if name in (*MOVING, "adamw")])
def test_from_ages_and_to_them(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    trio = Trio(way())
    for size in (1 << 21, 0, 1 << 21):
        monkeypatch.setattr(whole, "SMALL", size)
        trio.train(20)
        assert all((type(trio.state(name)) is Moment) == (size == 0) for name in trio.names())
    check(trio)


def _one_cycle(optimizer: Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=200)


@pytest.mark.parametrize("small", [whole.SMALL, 0])
@pytest.mark.parametrize("way", MOVING.values(), ids=MOVING)
def test_betas_on_a_schedule(way: Way, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "SMALL", small)
    trio = Trio(way())
    trio.train(10)
    schedules = [_one_cycle(optimizer) for optimizer in trio.optimizers]
    for _ in range(60):
        trio.step()
        for one in schedules:
            one.step()
    check(trio)
    trio.train(20)
    if small == 0:
        assert all(type(trio.state(name)) is Moment for name in trio.names())
    trio.check()


@pytest.mark.parametrize("way", [MOVING["adam"], MOVING["momentum"]], ids=["adam", "momentum"])
def test_rows_that_move_for_thousands_of_steps(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "SMALL", 0)
    how = {"momentum": 0.9999} if way is MOVING["momentum"] else {"betas": (0.9995, 0.999)}
    trio = Trio(way(**how))
    trio.train(50)
    check(trio)


def test_no_state_appears_where_torch_has_none() -> None:
    trio = Trio(STATELESS["sgd-decay"]())
    trio.train(3)
    assert trio.ours.state_dict() == trio.optimizers[1].state_dict()
    assert not trio.ours.state


@pytest.mark.parametrize("bad", [1e25, float("inf"), float("nan")])
def test_gradients_that_overflow(bad: float, way: Way) -> None:
    """Then only what torch's becomes NaN or infinite does."""
    trio = Trio(way())
    trio.train(5)
    trio.step(torch.tensor([1, 50]), by=bad)
    trio.train(5)
    for find in (_of_table, *(_of_state(name) for name in trio.names())):
        ours, plain = find(trio, 0), find(trio, 1)
        rest = plain.isfinite()
        assert torch.equal(ours.isfinite(), rest)
        torch.testing.assert_close(ours[rest], plain[rest])


def _of_table(trio: Trio, k: int) -> Tensor:
    return trio.tables[k].detach()


def _of_state(name: str) -> Callable[[Trio, int], Tensor]:
    return lambda trio, k: trio.optimizers[k].state[trio.tables[k]][name]


def test_gradients_below_float32(way: Way) -> None:
    trio = Trio(way())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        ids = trio.ids()
        trio.give(ids)
        rows = torch.randn(12, 5, generator=trio.draws).to(dtype)
        like = trio.table
        like.grad = row_grad(like.shape, like.dtype, like.device, [piece(ids, rows)])
        for table in trio.tables[1:]:
            table.grad = torch.zeros_like(table).index_add_(0, ids, rows.to(table.dtype))
        for optimizer in trio.optimizers:
            optimizer.step()
    check(trio)
