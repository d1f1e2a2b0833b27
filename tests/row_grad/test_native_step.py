"""The step without Python per table: the bits of the one with it, and when it is left to that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from row_lookup import piece
from row_optimizers import Make
from row_trio import STATELESS, WAYS
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adagrad, AdamW, Optimizer

from recast.errors import IdError
from recast.runtime import device
from recast.runtime.rows import native_step, whole
from recast.runtime.rows.grad import counters, row_grad
from recast.runtime.rows.optimizer import attach

pytestmark = pytest.mark.parametrize("kernel", ["kernel"], indirect=True)

# Rows and columns. Those of fewer than 50 rows are small here.
SHAPES = ((1, 3), (7, 8), (40, 5), (60, 5), (64, 16), (300, 4), (1000, 9))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "SMALL", 50 * 16 * 5)


def natively() -> int:
    return counters().get("native-step", 0)


class Twins:
    """Tables under two optimizers, with the same gradients; the second steps them one by one."""

    def __init__(self, make: Make, seed: int, shapes: tuple[tuple[int, int], ...] = SHAPES) -> None:
        self.draws = torch.Generator().manual_seed(seed)
        start = [0.1 * torch.randn(shape, generator=self.draws) for shape in shapes]
        self.tables = [[Parameter(t.clone()) for t in start] for _ in range(2)]
        self.optimizers = [make(tables) for tables in self.tables]
        for optimizer in self.optimizers:
            attach(optimizer)

    def draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.draws))

    def give(self, missing: bool = False) -> None:
        """Gradients of up to 12 ids, some of them in two pieces; None to some tables if asked."""
        for pair in zip(*self.tables, strict=True):
            rows, width = pair[0].shape
            found = []
            for _ in range(1 + self.draw(2)):
                ids = torch.randint(rows, (self.draw(13),), generator=self.draws)
                found.append(piece(ids, torch.randn(len(ids), width, generator=self.draws)))
            none = missing and self.draw(3) == 0
            for table in pair:
                grad = row_grad(table.shape, table.dtype, table.device, found)
                table.grad = None if none else grad

    def step(self) -> bool:
        """Returns whether the first was stepped natively; the second never is."""
        before = natively()
        self.optimizers[0].step()
        done = natively() > before
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(native_step, "step", lambda *_: None)
            self.optimizers[1].step()
        assert natively() == before + done
        return done

    def train(self, steps: int) -> list[bool]:
        found = []
        for _ in range(steps):
            self.give()
            found.append(self.step())
        return found

    def check(self) -> None:
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        assert states[0].keys() == states[1].keys()
        for k, tables in enumerate(zip(*self.tables, strict=True)):
            assert torch.equal(*tables)
            ours, others = states[0].get(k, {}), states[1].get(k, {})
            assert ours.keys() == others.keys()
            for name in ours:
                assert type(ours[name]) is type(others[name])
                assert torch.equal(ours[name], others[name]), (k, name)


# --- the same bits -------------------------------------------------------------------------------


def _scale(twins: Twins) -> None:
    for tables in twins.tables:
        for table in tables[::2]:
            if table.grad is not None:
                table.grad.mul_(0.37)


def _write_weights(twins: Twins) -> None:
    with torch.no_grad():
        for tables in twins.tables:
            for table in tables[::2]:
                table[: len(table) // 2] *= 1e-3


def _set(name: str, value: Any) -> Callable[[Twins], None]:
    """Groups without momentum stay so: RMSprop makes no buffer later."""

    def do(twins: Twins) -> None:
        for optimizer in twins.optimizers:
            for group in optimizer.param_groups:
                if name in group and (name != "momentum" or group[name]):
                    group[name] = value

    return do


def _reload(twins: Twins) -> None:
    for optimizer in twins.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


def _count_anew(twins: Twins) -> None:
    for optimizer, tables in zip(twins.optimizers, twins.tables, strict=True):
        for table in tables[::2]:
            if "step" in optimizer.state.get(table, {}):
                optimizer.state[table]["step"].fill_(2.0)


def _dense(twins: Twins) -> None:
    for tables in twins.tables:
        for table in tables[1::3]:
            if table.grad is not None:
                table.grad = table.grad.dense()  # type: ignore[attr-defined]


def _nothing(twins: Twins) -> None:
    pass


EVENTS: list[Callable[[Twins], None]] = [
    *[_nothing] * 20, _scale, _write_weights, _set("lr", 1e-3), _set("lr", 3e-2), _reload,
    _count_anew, _dense, _set("weight_decay", 0.0), _set("weight_decay", 0.02),
    _set("maximize", True), _set("maximize", False), _set("betas", (0.8, 0.95)),
    _set("momentum", 0.5), _set("dampening", 0.0),
]  # fmt: skip
MAKES: dict[str, Make] = {
    **{name: way() for name, way in {**WAYS, **STATELESS}.items()},
    "adamw": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam-fused": WAYS["adam"](fused=True),
    "adam-tensor-lr": WAYS["adam"](lr=torch.tensor(1e-2), foreach=False),
    "adagrad": lambda p: Adagrad(p, lr=1e-1, lr_decay=0.1),
    "groups": lambda p: WAYS["momentum"]()([{"params": p[:3], "momentum": 0.0}, {"params": p[3:]}]),  # type: ignore[list-item]
}


@pytest.fixture(params=[(isa, threads) for isa in device.ISAS for threads in (1, 3)], ids=str)
def _machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    isa, threads = request.param
    if not device.extension().has_isa(isa):
        pytest.skip(f"no {isa}")
    monkeypatch.setattr(device, "threads", lambda: threads)
    with device.use(isa):
        yield


@pytest.mark.sampled(30)
@pytest.mark.usefixtures("_machine")
@pytest.mark.parametrize("name", MAKES)
def test_random_schedules(name: str) -> None:
    twins = Twins(MAKES[name], seed=len(name))
    found = []
    for _ in range(120):
        twins.give(missing=True)
        EVENTS[twins.draw(len(EVENTS))](twins)
        found.append(twins.step())
    twins.check()
    assert sum(found) > 60


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", MAKES)
def test_larger_tables(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "SMALL", 1 << 21)
    monkeypatch.setattr(device, "threads", lambda: threads)
    twins = Twins(MAKES[name], 1, ((8000, 16), (9000, 16), (30_000, 3), (2, 5000)))
    assert all(twins.train(6)[1:])
    twins.check()


# --- when it is taken ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKES)
def test_from_the_second_step_on(name: str) -> None:
    """The first makes the state, if there is one that is not made with the optimizer."""
    twins = Twins(MAKES[name], 2)
    started = name in ("adagrad", "adagrad-decay", *STATELESS)
    assert twins.train(30) == [started, *[True] * 29]
    _set("lr", 0.1)(twins)
    assert twins.train(1) == [True]
    _write_weights(twins)
    assert twins.train(1) == [True]
    twins.check()


def test_betas_that_change_at_every_step_of_small_tables() -> None:
    twins = Twins(WAYS["adam"](), 3, SHAPES[:3])
    twins.train(2)
    for step in range(5):
        _set("betas", (0.9 - 0.1 * step, 0.99))(twins)
        assert twins.train(1) == [True]
    twins.check()


Spoil = Callable[[Optimizer, Parameter], None]


def _read(optimizer: Optimizer, table: Parameter) -> None:
    for held in optimizer.state[table].values():
        held.sum()


def _settle(optimizer: Optimizer, table: Parameter) -> None:
    optimizer.state_dict()


def _forget(optimizer: Optimizer, table: Parameter) -> None:
    del optimizer.state[table]


def _begin_anew(optimizer: Optimizer, table: Parameter) -> None:
    state = optimizer.state[table]
    state[list(state)[-1]] = torch.zeros_like(table)


def _count(step: float, dtype: torch.dtype) -> Spoil:
    def do(optimizer: Optimizer, table: Parameter) -> None:
        optimizer.state[table]["step"] = torch.tensor(step, dtype=dtype)

    return do


def _move(optimizer: Optimizer, table: Parameter) -> None:
    table.data = table.data.clone()


def _infinite(optimizer: Optimizer, table: Parameter) -> None:
    assert table.grad is not None
    table.grad.mul_(float("inf"))


def _not_found(optimizer: Optimizer, table: Parameter) -> None:
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]


def _group(**how: Any) -> Spoil:
    def do(optimizer: Optimizer, table: Parameter) -> None:
        optimizer.param_groups[0].update(how)

    return do


def _twice(optimizer: Optimizer, table: Parameter) -> None:
    optimizer.param_groups[0]["params"].append(table)


ALWAYS: dict[str, Spoil] = {
    "no state": _forget,
    "infinite": _infinite,
    "scaled": _not_found,
    "betas": _group(betas=(0.5, 0.9)),
    "endless": _group(betas=(0.99999, 0.999)),
    "amsgrad": _group(amsgrad=True),
    "float16": _count(5, torch.float16),
    "twice": _twice,
}
WITH_AGES: dict[str, Spoil] = {
    "read": _read,
    "settled": _settle,
    "begun anew": _begin_anew,
    "other count": _count(1, torch.float32),
    "moved": _move,
    "decaying": _group(weight_decay=0.1),
}


SPOILS = ALWAYS | WITH_AGES


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_what_is_left_to_python(spoil: Spoil) -> None:
    """Once: then it is as it should be again."""
    twins = Twins(WAYS["adam"](), 4)
    twins.train(5)
    twins.give()
    for optimizer, tables in zip(twins.optimizers, twins.tables, strict=True):
        spoil(optimizer, tables[-1])
        if spoil is ALWAYS["amsgrad"]:
            for table in tables:
                optimizer.state[table]["max_exp_avg_sq"] = torch.zeros_like(table)
    assert not twins.step()
    if spoil is not _infinite:  # after which all is NaN
        twins.check()


@pytest.mark.parametrize("spoil", WITH_AGES.values(), ids=WITH_AGES)
def test_small_tables_need_no_ages(spoil: Spoil) -> None:
    twins = Twins(WAYS["adam"](), 5, SHAPES[:3])
    twins.train(5)
    twins.give()
    for optimizer, tables in zip(twins.optimizers, twins.tables, strict=True):
        spoil(optimizer, tables[-1])
    assert twins.step()
    twins.check()


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:3]])
@pytest.mark.parametrize("name", [name for name in MAKES if name != "groups"])
def test_a_wrong_id_changes_nothing(name: str, shapes: tuple[tuple[int, int], ...]) -> None:
    twins = Twins(MAKES[name], 6, shapes)
    twins.train(5)
    twins.give()
    for tables in twins.tables:
        rows, width = tables[-1].shape
        outside = piece(torch.tensor([0, rows]), torch.ones(2, width))
        like = tables[-1]
        like.grad = row_grad(like.shape, like.dtype, like.device, [outside])
    before = [table.detach().clone() for table in twins.tables[0]]
    for optimizer in twins.optimizers:
        with pytest.raises(IdError):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, twins.tables[0], strict=True))
    twins.train(5)
    twins.check()


def test_a_step_is_a_write_that_autograd_sees() -> None:
    for shape in (SHAPES[0], SHAPES[-1]):
        twins = Twins(WAYS["adam"](), 7, (shape,))
        twins.train(3)
        table = twins.tables[0][0]
        versions = [t._version for t in _tensors(twins.optimizers[0], table)]
        later = (table * table).sum()
        assert twins.train(1) == [True]
        now = [t._version for t in _tensors(twins.optimizers[0], table)]
        assert all(a < b for a, b in zip(versions, now, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.backward()


def _tensors(optimizer: Optimizer, table: Parameter) -> list[Tensor]:
    return [table, *optimizer.state[table].values()]
