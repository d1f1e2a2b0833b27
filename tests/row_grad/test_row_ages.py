"""Optimizers that step all rows of a table without a dense gradient, beside torch's own on a dense
one. The judge is torch's own in float64.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from row_lookup import piece
from row_optimizers import WHOLE, Make, Pair, adam, batch, densified, fused
from row_trio import (
    DECAYING,
    MOVING,
    ROWS,
    WAYS,
    Trio,
    Way,
    by_adam,
    by_momentum,
    by_nesterov,
    by_rmsprop,
    by_rmsprop_momentum,
)
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

from recast.errors import IdError
from recast.runtime import device
from recast.runtime.rows import whole
from recast.runtime.rows.ages import Moment
from recast.runtime.rows.grad import row_grad
from recast.runtime.rows.optimizer import attach, notes, why_dense

pytestmark = pytest.mark.parametrize("kernel", ["kernel"], indirect=True)


@pytest.fixture(autouse=True)
def _no_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are stepped whole: see test_row_whole."""
    monkeypatch.setattr(whole, "SMALL", 0)


@pytest.fixture(autouse=True)
def _no_dense_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "dense" not in request.node.name:
        assert densified() == 0 and fused() > 0


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture(params=[name for name in WAYS if name not in DECAYING])
def aging(request: pytest.FixtureRequest) -> Way:
    """Those whose tables have ages."""
    return WAYS[request.param]


@pytest.fixture(params=MOVING)
def moving(request: pytest.FixtureRequest) -> Way:
    """Those in which rows without gradient move."""
    return MOVING[request.param]


@pytest.mark.parametrize("name", WHOLE)
def test_numbers_over_many_steps(name: str) -> None:
    trio = Trio(WHOLE[name].make if name != "adam-groups" else by_adam(eps=0.1))
    trio.train(50)
    trio.check()


@pytest.mark.parametrize("width", [1, 3, 4, 7, 8, 31, 100])
@pytest.mark.parametrize("name", ["adamw", *WAYS])
def test_widths(width: int, name: str) -> None:
    make = WAYS[name]() if name in WAYS else lambda p: AdamW(p, lr=1e-2, weight_decay=0.2)
    trio = Trio(make, width)
    trio.train(8)
    trio.check()


@pytest.mark.parametrize("rows", [1, 21, 63, 64, 65, 128, 1000])
def test_blocks_of_rows(rows: int, way: Way) -> None:
    trio = Trio(way(), rows=rows)
    for _ in range(20):
        trio.step(torch.randint(0, rows, (3,), generator=trio.draws))
    trio.check()


@pytest.mark.parametrize("name", WHOLE)
def test_beside_a_dense_layer(name: str) -> None:
    pair = Pair(WHOLE[name])
    pair.train()
    pair.check()
    assert fused() == 4


def test_a_row_that_was_looked_up_once(moving: Way) -> None:
    """It moves for a while, comes to rest as torch's does, and moves again when it is looked up."""
    trio = Trio(moving())
    trio.step(torch.arange(100, 110))
    away = torch.tensor([0])
    for _ in range(400):
        trio.step(away)
    moment: Any = trio.state(trio.names()[0])  # of all the same age
    assert bool((moment.ages.last[100:110] < 0).all())
    settled = trio.table[100:110].clone()
    for _ in range(200):
        trio.step(away)
    assert torch.equal(trio.table[100:110], settled)
    trio.check()
    for _ in range(3):
        trio.step(torch.arange(100, 110))  # hundreds of steps later
    trio.check()


@pytest.mark.parametrize("when", [150, 300])
def test_a_learning_rate_that_jumps_wakes_rows(when: int, moving: Way) -> None:
    trio = Trio(moving(lr=1e-6))
    trio.step(torch.arange(100, 110))
    for turn in range(when + 40):
        if turn == when:
            for optimizer in trio.optimizers:
                optimizer.param_groups[0]["lr"] = 1.0
        trio.step(torch.tensor([0]))
    trio.check()


@pytest.mark.parametrize("when", [150, 200])
def test_a_weight_made_smaller_wakes_its_row(when: int, moving: Way) -> None:
    trio = Trio(moving())
    trio.step(torch.arange(100, 110), by=100.0)
    for turn in range(when + 60):
        if turn == when:
            for table in trio.tables:
                with torch.no_grad():
                    table[100:110] = 0.0
        trio.step(torch.tensor([0]))
    reached = [table.detach()[100:110].double() for table in trio.tables]
    assert float(reached[2].abs().max()) > 0
    torch.testing.assert_close(reached[0], reached[2], rtol=1e-4, atol=1e-20)


def _cosine(optimizer: Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40)


def _warm_up(optimizer: Optimizer) -> Any:
    return lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=100)


def _plateau(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 30, 0.1)


@pytest.mark.parametrize("schedule", [_cosine, _warm_up, _plateau])
def test_schedules(schedule: Callable[[Optimizer], Any], way: Way) -> None:
    trio = Trio(way())
    schedules = [schedule(optimizer) for optimizer in trio.optimizers]
    for _ in range(130):
        trio.step()
        for one in schedules:
            one.step()
    trio.check()


@pytest.mark.parametrize("name", DECAYING)
def test_weight_decay_that_comes_and_goes(name: str) -> None:
    trio = Trio(DECAYING[name](weight_decay=0.0))
    for decay in (0.0, 0.1, 0.3, 0.0):
        for optimizer in trio.optimizers:
            optimizer.param_groups[0]["weight_decay"] = decay
        trio.train(12)
    trio.check()


# --- others who read and write the state ---------------------------------------------------------


def _checkpoint(trio: Trio) -> None:
    for index, table in enumerate(trio.tables):
        file = io.BytesIO()
        torch.save(trio.optimizers[index].state_dict(), file)
        file.seek(0)
        again = type(trio.optimizers[index])([table], lr=0.5)
        again.load_state_dict(torch.load(file))
        trio.optimizers[index] = again
    attach(trio.ours)


def _deepcopy(trio: Trio) -> None:
    for index, optimizer in enumerate(trio.optimizers):
        trio.tables[index], trio.optimizers[index] = copy.deepcopy((trio.tables[index], optimizer))


def _pickle(trio: Trio) -> None:
    for index, optimizer in enumerate(trio.optimizers):
        kept = pickle.dumps((trio.tables[index], optimizer))
        trio.tables[index], trio.optimizers[index] = pickle.loads(kept)


def _read(trio: Trio) -> None:
    moments = [trio.state(name) for name in trio.names()]
    kept = Tensor if trio.ours.param_groups[0]["weight_decay"] else Moment
    assert all(type(moment) is kept and isinstance(moment, Tensor) for moment in moments)
    assert moments[0].shape == trio.table.shape and moments[-1].dtype is torch.float32
    assert type(moments[0]) is kept  # to ask for a shape reads no numbers
    for name, moment in zip(trio.names(), moments, strict=True):
        found = np.asarray(moment)
        theirs, exact = (trio.optimizers[k].state[trio.tables[k]][name].numpy() for k in (1, 2))
        # Sums of both signs are as inexact as torch's own.
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=2 * abs(theirs - exact).max())
        assert type(moment) is Tensor


def _read_one(trio: Trio) -> None:
    assert float(trio.state(trio.names()[-1]).norm()) > 0


def _write(trio: Trio) -> None:
    for table, optimizer in zip(trio.tables, trio.optimizers, strict=True):
        optimizer.state[table][trio.names()[0]].mul_(0.5)


def _write_in_a_list(trio: Trio) -> None:
    for table, optimizer in zip(trio.tables, trio.optimizers, strict=True):
        state = optimizer.state[table]
        torch._foreach_mul_([state[name] for name in reversed(trio.names())], 0.5)


def _replace(trio: Trio) -> None:
    for table, optimizer in zip(trio.tables, trio.optimizers, strict=True):
        state, name = optimizer.state[table], trio.names()[0]
        state[name] = state[name] * 2


def _begin_anew(trio: Trio) -> None:
    """Without a look at what is replaced."""
    for table, optimizer in zip(trio.tables, trio.optimizers, strict=True):
        optimizer.state[table][trio.names()[0]] = torch.zeros_like(table)


def _count_anew(trio: Trio) -> None:
    for table, optimizer in zip(trio.tables, trio.optimizers, strict=True):
        if "step" in optimizer.state[table]:
            optimizer.state[table]["step"].fill_(3.0)


def _forget(trio: Trio) -> None:
    if isinstance(trio.optimizers[0], torch.optim.Adagrad) and not _adagrad_starts_late():
        pytest.skip("this torch's Adagrad makes its state when it is made, and only then")
    for optimizer in trio.optimizers:
        optimizer.state.clear()


def _adagrad_starts_late() -> bool:
    weight = Parameter(torch.ones(1))
    optimizer = torch.optim.Adagrad([weight])
    optimizer.state.clear()
    weight.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def _load_in_place(trio: Trio) -> None:
    for optimizer in trio.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.sampled(40)
@pytest.mark.parametrize(
    "do",
    [
        _checkpoint, _deepcopy, _pickle, _read, _read_one, _write, _write_in_a_list, _replace,
        _begin_anew, _count_anew, _forget, _load_in_place,
    ],
)  # fmt: skip
def test_between_steps(do: Callable[[Trio], None], way: Way) -> None:
    trio = Trio(way())
    trio.train(30)
    do(trio)
    trio.train(30)
    do(trio)
    trio.train(5)
    trio.check()


def test_a_dense_gradient_in_between(way: Way) -> None:
    """As of a call of the plain model."""
    trio = Trio(way())
    for turn in range(60):
        trio.give(trio.ids())
        if turn % 20 == 7:
            trio.table.grad = trio.tables[1].grad.clone()  # type: ignore[union-attr]
        for optimizer in trio.optimizers:
            optimizer.step()
    trio.check()
    assert fused() == 57


def test_torch_steps_the_rest_after_the_hooks_are_gone_dense(way: Way) -> None:
    """Whatever calls torch's own step finds ordinary state."""
    trio = Trio(way())
    trio.train(10)
    trio.give(trio.ids())
    trio.table.grad = trio.tables[1].grad.clone()  # type: ignore[union-attr]
    with torch.no_grad():
        for optimizer in trio.optimizers:
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    trio.check()


def test_kernels_that_are_switched_off_leave_the_dense_step(way: Way) -> None:
    trio = Trio(way())
    trio.train(10)
    with device.use("torch"):
        assert trio.steps_to_come(10) == 10
        trio.check()
    trio.train(10)
    trio.check()


def test_a_view_of_the_state_takes_the_dense_step(aging: Way) -> None:
    trio = Trio(aging())
    trio.train(3)
    name = trio.names()[0]
    seen = trio.state(name).view(-1)
    assert trio.steps_to_come(10) == 10
    exact = trio.optimizers[2].state[trio.tables[2]][name].view(-1)
    torch.testing.assert_close(seen, exact.float())
    del seen
    trio.train(10)
    trio.check()
    assert fused() == 13


def test_steps_without_a_gradient_leave_all_as_it_is(way: Way) -> None:
    trio = Trio(way())
    trio.train(10)
    before = trio.table.clone()
    for table, optimizer in zip(trio.tables, trio.optimizers, strict=True):
        table.grad = None
        optimizer.step()
    assert torch.equal(trio.table, before)
    trio.train(10)
    trio.check()


@pytest.mark.parametrize("before", [0, 10])
def test_a_gradient_of_no_rows_moves_all_that_move(before: int, way: Way) -> None:
    trio = Trio(way())
    trio.train(before)
    for _ in range(10):
        trio.step(torch.empty(0, dtype=torch.int64))
    trio.train(10)
    trio.check()


@pytest.mark.parametrize(
    ("ids", "offsets", "wrong"),
    [
        ([3, ROWS], None, f"row {ROWS} of a table of {ROWS} rows"),
        ([3, 4], [0, 7], f"a table of {ROWS} rows, by offsets that do not fit its ids"),
    ],
)
@pytest.mark.parametrize("done", [0, 10])
def test_a_failed_step_changes_nothing(
    done: int, ids: list[int], offsets: list[int] | None, wrong: str, way: Way
) -> None:
    trio = Trio(way())
    trio.train(done)
    for table in trio.tables[1:]:
        table.grad = None
    before = trio.table.clone()
    outside = piece(torch.tensor(ids), torch.ones(2, 5))
    outside.offsets = None if offsets is None else torch.tensor(offsets)
    trio.table.grad = row_grad(before.shape, before.dtype, before.device, [outside])
    with pytest.raises(IdError, match=wrong):
        trio.ours.step()
    assert torch.equal(trio.table, before)
    trio.ours.state_dict()
    trio.train(10)
    trio.check()


@pytest.mark.parametrize("first", [0, 5])
def test_rows_below_float32_take_a_dense_gradient_of_their_own(first: int, way: Way) -> None:
    """The kernel takes one 16-bit format at a time."""
    trio = Trio(way())
    trio.train(first)
    for turn in range(1 if first == 0 else 0, 4):
        ids = trio.ids()
        trio.give(ids)
        rows = torch.randn(2, 12, 5, generator=trio.draws)
        halves = rows[0].half(), rows[1].bfloat16()
        if turn % 2:
            like = trio.table
            found = [piece(ids, half) for half in halves]
            like.grad = row_grad(like.shape, like.dtype, like.device, found)
            for table in trio.tables[1:]:
                table.grad = torch.zeros_like(table)
                for half in halves:
                    table.grad.index_add_(0, ids, half.to(table.dtype))
        for optimizer in trio.optimizers:
            optimizer.step()
    trio.check()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite(bad: float, way: Way) -> None:
    trio = Trio(way())
    trio.train(5)
    ids = torch.tensor([1, 50])
    trio.step(ids, by=bad)
    trio.train(5)
    states = [o.state_dict()["state"][0] for o in trio.optimizers]
    for name in ["table", *trio.names()]:
        ours, plain, exact = (
            table.detach() if name == "table" else state[name]
            for table, state in zip(trio.tables, states, strict=True)
        )
        assert bool((~ours[50].isfinite()).all())
        rest = ours.isfinite()
        assert torch.equal(rest, plain.isfinite())
        if name != "exp_avg_sq":  # the second gradient after infinity finds NaN here
            assert torch.equal(ours[~rest].nan_to_num(), plain[~rest].nan_to_num())
        torch.testing.assert_close(ours[rest], exact[rest].float())


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_gradient_times_what_is_not_finite(scale: float, way: Way) -> None:
    """Zero times infinity is NaN, in all rows."""
    trio = Trio(way())
    trio.train(5)
    trio.give(trio.ids())
    for table in trio.tables:
        assert table.grad is not None
        table.grad.mul_(scale)
    for optimizer in trio.optimizers:
        optimizer.step()
    trio.step()
    for name in trio.names():
        ours, plain = (
            optimizer.state[table][name]
            for optimizer, table in zip(trio.optimizers[:2], trio.tables[:2], strict=True)
        )
        assert torch.equal(ours.isfinite(), plain.isfinite())
    ours, plain = trio.table.isnan(), trio.tables[1].isnan()
    assert torch.equal(ours, plain) and not bool(trio.table.isfinite().any())


# --- bit for bit ---------------------------------------------------------------------------------


def _trained(make: Make) -> list[Tensor]:
    draws = torch.Generator().manual_seed(3)
    table = Parameter(0.1 * torch.randn(5000, 37, generator=draws))
    optimizer = make([table])
    attach(optimizer)
    for _ in range(8):
        ids = torch.randint(0, 5000, (800,), generator=draws)
        rows = piece(ids, torch.randn(800, 37, generator=draws))
        table.grad = row_grad(table.shape, table.dtype, table.device, [rows])
        optimizer.step()
    kept = optimizer.state_dict()["state"][0]
    return [table.detach(), *(held for held in kept.values() if held.dim())]


@pytest.mark.parametrize("name", ["adamw", *WAYS])
def test_threads_and_instruction_sets_agree(name: str) -> None:
    make = WAYS[name]() if name in WAYS else lambda p: AdamW(p, lr=0.01, weight_decay=0.1)
    found = []
    for isa in filter(device.extension().has_isa, device.ISAS):
        for threads in (1, 3):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                with device.use(isa):
                    found.append(_trained(make))
            finally:
                torch.set_num_threads(before)
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], one, strict=True))


# --- what is said --------------------------------------------------------------------------------


def test_the_report_says_how_rows_move_dense() -> None:
    table = Parameter(torch.randn(4, 2))
    assert any(note.startswith("Adam: rows that a step") for note in notes(Adam([table])))
    assert any(note.startswith("AdamW: rows that a step") for note in notes(AdamW([table])))
    assert any(note.startswith("SGD: rows that a") for note in notes(SGD([table], momentum=0.9)))
    assert notes(SGD([table])) == []
    assert notes(RMSprop([table], momentum=0.9))[0].startswith("RMSprop: rows that a step does")
    assert "their square_avg fades when it is read" in notes(RMSprop([table]))[0]
    assert notes(RMSprop([table], centered=True)) == []
    assert "weight_decay moves every row" in notes(Adam([table], weight_decay=0.1))[0]
    assert notes(Adam([table], amsgrad=True))[0].startswith("dense gradients")


def test_numbers_on_a_device_are_not_read_dense(way: Way) -> None:
    table = Parameter(torch.randn(4, 2))
    optimizer = way()([table])
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")  # to read it raises
    assert "not waited for" in str(why_dense(optimizer, optimizer.param_groups[0], table))


def test_tables_below_float32_are_not_taken_dense(way: Way) -> None:
    table = Parameter(torch.randn(4, 2).half())
    optimizer = way()([table])
    assert "float32" in str(why_dense(optimizer, optimizer.param_groups[0], table))


def test_lazy_adam_is_another_one() -> None:
    pair = Pair(adam())
    pair.train()
    pair.check()
    assert type(pair.ours.state[pair.a]["exp_avg"]) is Tensor


def test_only_torchs_own_step_is_replaced_dense() -> None:
    class Mine(Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    trio = Trio(lambda p: Mine(p, lr=0.01))
    trio.train(5)
    trio.check()
    assert fused() == 0


@pytest.mark.parametrize("name", WHOLE)
def test_a_closure(name: str) -> None:
    pair = Pair(WHOLE[name])
    pair.train_by_closure(6)
    pair.check()
    assert fused() == 6


@pytest.mark.parametrize(
    "name", ["adam", "momentum-dampening", "momentum-nesterov-fused", "rmsprop-momentum"]
)
def test_a_loss_scale(name: str) -> None:
    pair = Pair(WHOLE[name])
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for turn in range(6):
        for (optimizer, loss), scaler in zip(pair.sides(), scalers, strict=True):
            optimizer.zero_grad()
            value = loss(batch(turn))
            scaler.scale(value * float("inf") if turn == 3 else value).backward()
            scaler.step(optimizer)
            scaler.update()
    pair.check()
    assert fused() == 5


# --- SGD -----------------------------------------------------------------------------------------


def test_momentum_that_is_switched_off_on_and_to_another_one() -> None:
    """Torch's buffer stays as it is while there is none."""
    trio = Trio(by_momentum())
    for momentum in (0.9, 0.0, 0.9, 0.8, 0.8):
        for optimizer in trio.optimizers:
            optimizer.param_groups[0]["momentum"] = momentum
        trio.train(10)
    trio.check()


def test_momentum_that_begins_late() -> None:
    trio = Trio(by_momentum(momentum=0.0))
    trio.train(5)
    for optimizer in trio.optimizers:
        optimizer.param_groups[0].update(momentum=0.9)
    trio.train(20)
    trio.check()
    assert densified() == 0


def test_foreach_with_nesterov_is_left_to_torch_dense() -> None:
    trio = Trio(by_nesterov(foreach=True))
    why = why_dense(trio.ours, trio.ours.param_groups[0], trio.table)
    assert "adds the momentum to the gradients" in str(why)
    assert trio.steps_to_come(5) == 5
    trio.check()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_infinite_moment_stays_infinite_however_old(bad: float) -> None:
    trio = Trio(by_momentum(momentum=0.5))
    trio.step(torch.tensor([70, 80]), by=bad)
    for _ in range(400):
        trio.step(torch.tensor([0]))
    ours, plain = (
        optimizer.state[table]["momentum_buffer"][70:81]
        for optimizer, table in zip(trio.optimizers[:2], trio.tables[:2], strict=True)
    )
    assert torch.equal(ours.nan_to_num(), plain.nan_to_num()) and not bool(ours[0].isfinite().any())


# --- RMSprop -------------------------------------------------------------------------------------


def test_rows_without_momentum_stay() -> None:
    trio = Trio(by_rmsprop())
    trio.train(5)
    before = trio.table[180:].clone()
    trio.train(20)
    assert torch.equal(trio.table[180:], before)  # see Trio.ids
    trio.step(torch.arange(190, 200))
    trio.check()


def test_square_avg_of_a_row_that_was_long_away() -> None:
    """For longer than powers are kept."""
    trio = Trio(by_rmsprop())
    trio.step(torch.arange(100, 110))
    for _ in range(400):
        trio.step(torch.tensor([0]))
    trio.step(torch.arange(100, 110))
    trio.check()


def test_momentum_that_comes_or_goes_dense() -> None:
    trio = Trio(by_rmsprop_momentum())
    for momentum in (0.9, 0.0, 0.9):
        for optimizer in trio.optimizers:
            optimizer.param_groups[0]["momentum"] = momentum
        trio.train(10)
    trio.check()
    assert densified() == 0
    other = Trio(by_rmsprop())
    other.train(2)
    for optimizer in other.optimizers:
        optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(KeyError, match="momentum_buffer"):  # torch's own
        other.step()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"centered": True}, "centered=True"), ({"alpha": 1.5}, "grows without"),
        ({"eps": 0.0}, "eps is 0"),
    ],
)  # fmt: skip
def test_rmsprop_that_is_left_to_torch_dense(how: dict[str, Any], why: str) -> None:
    trio = Trio(by_rmsprop(**how))
    assert why in str(why_dense(trio.ours, trio.ours.param_groups[0], trio.table))
    assert trio.steps_to_come(5) == 5
    if "alpha" not in how and "eps" not in how:  # with which torch's weights become NaN
        trio.check()
