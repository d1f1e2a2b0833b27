"""What fails half way, or comes between two operations, neither loses nor duplicates a row."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import devicetiers
import emulated_gpu
import numpy as np
import pytest
import torch
from dynamickit import same_rows, train
from test_tier_files import some, store
from test_tiers import made, table
from torch import Tensor

import recast
from recast.errors import TierError
from recast.runtime.dynamic import cuda_tier
from recast.runtime.tiers import records
from recast.runtime.tiers.engine import Engine

pytest.importorskip("rocksdict")


def once(real: Any, error: BaseException) -> Any:
    """``real`` that fails the first time."""
    left = [error]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("which", ["gather", pytest.param("scatter", marks=pytest.mark.long)])
def test_memory_that_is_not_there_while_rows_change_places(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, opt, stream = made(tmp_path)
    plain, plain_opt, _ = made(None)
    batches = [stream.batch(60) for _ in range(16)]
    train(fast, opt, batches[:9]), train(plain, plain_opt, batches[:9])
    before = recast.dynamic.export(fast.user)
    assert table(fast).tier.below > 50
    monkeypatch.setattr(records, which, once(getattr(records, which), MemoryError("no room")))
    with pytest.raises(MemoryError):
        fast.user(stream.users[:120])
    after = recast.dynamic.export(fast.user)
    assert torch.equal(before.ids, after.ids) and torch.equal(before.rows, after.rows)
    got, want = train(fast, opt, batches[9:]), train(plain, plain_opt, batches[9:])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    same_rows(fast, plain)


def refused(*args: object) -> None:
    raise TierError("a disk that refuses to delete")


def test_a_disk_that_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that could not be erased are still there; once erased, they do not come back."""
    fast, opt, stream = made(tmp_path)
    train(fast, opt, [stream.batch(60) for _ in range(12)])
    before = recast.dynamic.export(fast.user)
    monkeypatch.setattr(Engine, "delete", refused)
    with pytest.raises(TierError, match="refuses to delete"):
        table(fast).erase(before.ids[::2])
    after = recast.dynamic.export(fast.user)
    assert torch.equal(before.ids, after.ids) and torch.equal(before.rows, after.rows)
    monkeypatch.undo()
    assert table(fast).erase(before.ids[::2]) == len(before.ids[::2])
    train(fast, opt, [stream.batch(1) for _ in range(3)])
    left = table(fast).ids()
    assert len(left) == len(table(fast)) and torch.isin(before.ids[1::2], left).all()
    assert torch.isin(before.ids[::2], left).sum() <= 3


@pytest.mark.long
def test_ids_that_expire_on_such_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, opt, stream = made(tmp_path, ttl=4)
    batches, failed = [stream.batch(60) for _ in range(24)], 0
    for k, batch in enumerate(batches):
        monkeypatch.setattr(Engine, "delete", refused)
        if not 6 < k < 12:
            monkeypatch.undo()
        try:
            train(fast, opt, [batch])
        except TierError:
            failed += 1
            for name in ("user", "items"):
                with contextlib.suppress(TierError):
                    table(fast, name).advance(fast.get_submodule(name).weight)
    assert failed > 0
    for name in ("user", "items"):
        own = table(fast, name)
        ids, rows, *_ = own.stored()  # reads all files, and counts them
        weight = own.take("weight", fast.get_submodule(name).weight.detach(), rows)
        assert len(ids.unique()) == len(ids) > 60 and weight.abs().sum(1).min() > 0


def test_a_read_ahead_that_failed_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = store(tmp_path)
    ids, block = some(range(300))
    one.write(ids, block)
    monkeypatch.setattr(Engine, "begin", once(Engine.begin, TierError("not now")))
    one.ahead(ids)
    for _ in range(2):
        found, got = one.read(ids)
        assert found.all() and np.array_equal(got, block)
    one.close()


# ---------------------------------------------------------------- checkpoints


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "kind",
    [
        "tiers",
        *(pytest.param(k, marks=pytest.mark.long) for k in ("memory", "gpu", "gpu and tiers")),
    ],
)
def test_what_comes_between_the_model_and_its_optimizer(kind: str, tmp_path: Path) -> None:
    """State moves with its rows, and back, whatever looks up rows in between."""
    on_gpu = kind.startswith("gpu")
    with emulated_gpu.serve() if on_gpu else emulated_gpu.nobody():
        if on_gpu:
            small: dict[str, Any] = {"rows": 50, "host": 10, "many": 150, "evict": "lru"}
            small |= {"plain": True} if kind == "gpu" else {}
            make: Any = lambda n: devicetiers.made(tmp_path / n, **small)  # noqa: E731
        else:
            make = lambda n: made(tmp_path / n if kind == "tiers" else None, evict="lru")  # noqa: E731
        fast, opt, stream = make("a")
        train(fast, opt, [stream.batch(20) for _ in range(8)])
        model, state = saved(fast.state_dict()), saved(opt.state_dict())
        batches = [stream.batch(20) for _ in range(2)]
        other, other_opt, _ = make("b")
        other.load_state_dict(model)
        with torch.no_grad():
            other.eval()(*batches[0])
        other_opt.load_state_dict(state)
        other_opt.load_state_dict(saved(other_opt.state_dict()))
        want, got = train(fast, opt, batches), train(other.train(), other_opt, batches)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        same_rows(other, fast)


# ---------------------------------------------------------------- the device tier


@pytest.fixture
def gpu() -> Any:
    with emulated_gpu.serve() as emulated:
        yield emulated


def step(fast: Any, opt: Any, ids: Tensor) -> None:
    opt.zero_grad()
    fast.user(ids).pow(2).sum().backward()
    opt.step()


@pytest.mark.parametrize("which", ["_gather", pytest.param("_scatter", marks=pytest.mark.long)])
def test_rows_lost_on_their_way_are_told_of(
    which: str, gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU runs out of memory while rows move: no step is done with the rest, until a load."""
    fast, opt, _ = devicetiers.made(tmp_path / "a", rows=20, host=15)
    for k in range(4):
        step(fast, opt, 10 * k + torch.arange(10))
    state = saved(fast.state_dict()), saved(opt.state_dict())
    monkeypatch.setattr(
        cuda_tier, which, once(getattr(cuda_tier, which), torch.OutOfMemoryError("no room"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        fast.user(torch.arange(10))
    for again in (lambda: fast.user(torch.arange(10)), fast.state_dict):
        with pytest.raises(TierError, match="rows were lost on their way") as caught:
            again()
        assert "no room" in str(caught.value) and "recast.checkpoint.load" in str(caught.value)
    opt.zero_grad(), opt.step()
    fast.load_state_dict(state[0]), opt.load_state_dict(state[1])
    step(fast, opt, torch.arange(10))
    assert len(set.union(*devicetiers.in_one_place(devicetiers.table(fast)))) == 40


def test_reading_while_rows_are_fetched_ahead(gpu: Any, tmp_path: Path) -> None:
    """Lookups of any ids, of none, and an evaluation between a prefetch and its lookup."""
    runs = []
    odd = torch.tensor([-1, -(2**63), 2**63 - 1, 0])
    for plain in (True, False):
        fast, opt, _ = devicetiers.made(tmp_path, rows=20, host=15, plain=plain)
        own = recast.dynamic.tables(fast)["user"]
        reads = []
        for k in range(6):
            ids = torch.cat([odd, 7 * k + torch.arange(8), odd]) if k % 2 else torch.arange(10)
            own.prefetch(ids)
            own.prefetch(ids[:0])
            with torch.no_grad():
                reads.append(fast.eval().user(torch.cat([ids, torch.arange(45)])))
                reads.append(fast.user(ids[:0]))
            step(fast.train(), opt, ids)
            step(fast, opt, ids[:0])
        runs.append((fast, reads))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    mine, theirs = (recast.dynamic.export(fast.user) for fast, _ in runs)
    assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.rows, theirs.rows)
    assert {-1, -(2**63)} <= set(mine.ids.tolist())
    devicetiers.in_one_place(devicetiers.table(runs[1][0]))


@pytest.mark.long
def test_a_prefetch_many_times_over(gpu: Any, tmp_path: Path) -> None:
    """More prefetches than are kept, then rows move: no stale one is used."""
    fast, opt, stream = devicetiers.made(tmp_path, rows=36, host=15, many=80)
    plain, plain_opt, _ = devicetiers.made(None, plain=True, many=80)
    batches = [stream.batch(12) for _ in range(10)]
    batches = [
        (stream.users[(14 * k + torch.arange(12)) % 80], *b[1:]) for k, b in enumerate(batches)
    ]
    for k, batch in enumerate(batches):
        for later in batches[k:] + batches[:k]:
            devicetiers.table(fast).prefetch(later[0])
        both = [train(m, o, [batch]) for m, o in ((fast, opt), (plain, plain_opt))]
        assert torch.equal(both[0][0], both[1][0])
    same_rows(fast, plain)
    assert devicetiers.table(fast).tier.promoted > 5
