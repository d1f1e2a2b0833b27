"""A table with rows on disk gives the numbers of one that holds all of them in memory."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamickit import KINDS, Model, Stream, example, same_rows, train, train_ahead, train_one

import recast
from recast.errors import CheckpointError, NotBuiltError, UsageError
from recast.runtime.dynamic import convert
from recast.runtime.dynamic.tiers import _MEMORY_BESIDE
from recast.runtime.rows import optimizer as row_optimizer
from recast.runtime.tiers import records
from recast.runtime.tiers.engine import buffer_bytes, memory_of
from recast.runtime.tiers.store import rows_in

pytest.importorskip("rocksdict")

ROWS = 200  # in memory


def tiers(path: Path, disk: int = 1 << 22, rows: int = ROWS, numbers: int = 16) -> list[Any]:
    """Room for ``rows`` rows in memory, of ``numbers`` float64 numbers with their state."""
    record = 8 * numbers + records.HEADER
    engine = memory_of(buffer_bytes(1, 1), rows_in(disk, record))
    return [
        recast.Host(engine + rows * (8 * numbers + 64 + _MEMORY_BESIDE)), recast.Disk(path, disk)
    ]  # fmt: skip


def made(
    path: Path | None, kind: str = "adagrad", *, dtype: torch.dtype = torch.float64,
    graph: bool = False, seed: int = 3, **how: Any,
) -> tuple[Any, Any, Stream]:  # fmt: skip
    """A model, with tiers if there is a path, and three times as many ids as rows in memory.

    Without ``graph`` its modules only become dynamic, which is quick.
    """
    torch.manual_seed(seed)
    stream = Stream(1, many=600)
    model = Model().to(dtype)
    make, options, numbers = KINDS[kind]
    numbers = numbers if dtype is torch.float64 else numbers // 2
    room = {"max_rows": 5000} if path is None else {"tiers": tiers(path, numbers=numbers)}
    how = {"seed": 5, **room, **how}
    tables = {name: recast.Dynamic(**how) for name in ("user", "items")}
    opt = make(model.parameters(), lr=0.1)
    if not graph:
        with convert.made(model, tables, opt, lazy=bool(options)):
            row_optimizer.attach(opt, lazy=bool(options))
        return model, opt, stream
    fast, opt = recast.optimize(model, opt, example=example(stream), tables=tables, **options)
    return fast, opt, stream


def table(fast: Any, name: str = "user") -> Any:
    return recast.dynamic.tables(fast)[name]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_without_tiers(kind: str, tmp_path: Path) -> None:
    compare(kind, 20, [train, train_ahead] if kind == "adagrad" else [train_ahead], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_are_those_without_tiers(kind: str, tmp_path: Path) -> None:
    compare(kind, 50, [train, train_ahead], tmp_path)


def compare(kind: str, steps: int, ways: list[Any], tmp_path: Path) -> None:
    graph = kind == "adagrad"
    fast, opt, stream = made(None, kind, graph=graph)
    batches = [stream.batch(60 if k % 3 else 1) for k in range(steps)]
    want = train(fast, opt, batches)
    for way in ways:
        tiered, tiered_opt, _ = made(tmp_path / way.__name__, kind, graph=graph)
        got = way(tiered, tiered_opt, batches)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        same_rows(tiered, fast)
        tier = table(tiered).tier
        assert tier.below > 100 and tier.promoted > 2 * steps
        assert (tier.traffic.ahead > steps) == (way is train_ahead)
        fast.eval(), tiered.eval()  # a mere read sees the disk too, and moves nothing
        batch, moved = stream.batch(300), tier.promoted
        with torch.no_grad():
            assert torch.equal(tiered(*batch), fast(*batch))
        assert tier.promoted == moved
        fast.train()


def test_lookups_of_the_modules_themselves_and_float32(tmp_path: Path) -> None:
    """Without the graph; in float32; gradients in eval mode."""
    runs = []
    for path in (None, tmp_path):
        fast, opt, stream = made(path, dtype=torch.float32, evict="lfu")
        batches = [stream.batch(60) for _ in range(25)]
        outs = train(fast, opt, batches)
        fast.eval()
        outs += train(fast, opt, batches[:5])
        runs.append((fast, outs))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    same_rows(runs[0][0], runs[1][0])


def test_the_graph_and_the_report_tell_of_the_traffic(tmp_path: Path) -> None:
    fast, opt, stream = made(tmp_path, graph=True)
    dump = str(fast)
    assert dump.index("fetch_rows") < dump.index("find_rows")
    batches = [stream.batch(60) for _ in range(20)]
    asked = sum(len(b[0]) for b in batches)
    train(fast, opt, batches)
    c = table(fast).counters()
    assert c["in_memory"] + c["on_disk"] + c["new"] == asked == c["hits"] + c["misses"]
    assert c["new"] == c["misses"] >= c["inserted"] == len(table(fast))
    assert c["evicted"] == c["refused"] == 0
    assert c["demoted"] - c["promoted"] == table(fast).tier.below > 0
    assert c["written"] == c["demoted"] * table(fast).tier.kind.size
    said = str(fast.report)
    assert f"{c['demoted']} rows went to disk" in said and "% on disk" in said


def test_the_hot_rows_stay_in_memory(tmp_path: Path) -> None:
    """Under "lfu", rows looked up once do not push rows looked up often to disk."""
    fast, opt, _ = made(tmp_path, evict="lfu")
    hot = torch.arange(100)
    some, off = torch.zeros(0, dtype=torch.int64), torch.zeros(150, dtype=torch.int64)
    for k in range(12):
        cold = torch.arange(50) + 1000 * (k + 1)
        batch = (torch.cat([hot, cold]), some, off, torch.zeros(150, dtype=torch.int64))
        train_one(fast, opt, batch, k)
    tier = table(fast).tier
    assert tier.below > 300 and tier.disk == 0  # no hot row ever had to come back


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", ["adagrad", "row-wise-adagrad"])
def test_checkpoints_hold_memory_and_disk(kind: str, tmp_path: Path) -> None:
    """From tiers to tiers, to plain memory, and back; training goes on to the same bits."""
    fast, opt, stream = made(tmp_path / "a", kind, evict="lru")
    train(fast, opt, [stream.batch(60) for _ in range(20)])
    recast.checkpoint.save(tmp_path / "saved", fast, opt)
    model, state = saved(fast.state_dict()), saved(opt.state_dict())
    assert len(model["user.ids"]) == len(table(fast)) > table(fast).capacity
    memory, memory_opt, _ = made(None, kind, evict="lru", seed=4)
    memory.load_state_dict(model)
    memory_opt.load_state_dict(state)
    tiered, tiered_opt, _ = made(tmp_path / "b", kind, evict="lru", seed=4)
    train(tiered, tiered_opt, [Stream(7, many=600).batch(60) for _ in range(5)])  # is gone then
    recast.checkpoint.load(tmp_path / "saved", tiered, tiered_opt)
    back, back_opt, _ = made(tmp_path / "c", kind, evict="lru", seed=4)
    back.load_state_dict(saved(memory.state_dict()))
    back_opt.load_state_dict(saved(memory_opt.state_dict()))
    batches = [stream.batch(60) for _ in range(10)]
    want = train(fast, opt, batches)
    for one, its_opt in ((memory, memory_opt), (tiered, tiered_opt), (back, back_opt)):
        got = train(one, its_opt, batches)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        same_rows(one, fast)


def test_a_checkpoint_of_more_rows_than_fit(tmp_path: Path) -> None:
    fast, opt, stream = made(None)
    train(fast, opt, [stream.batch(100) for _ in range(20)])
    torch.manual_seed(3)
    model = Model().double()
    how = recast.Dynamic(tiers=tiers(tmp_path, (1 << 18) + (1 << 16)), seed=5)
    small, _ = recast.optimize(
        model, torch.optim.Adagrad(model.parameters()), example=example(stream),
        tables={"user": how, "items": how},
    )  # fmt: skip
    with pytest.raises((CheckpointError, RuntimeError), match=r"rows in memory and \d+ on disk"):
        small.load_state_dict(fast.state_dict())


def test_export_import_and_what_changed(tmp_path: Path) -> None:
    fast, opt, stream = made(tmp_path / "a")
    train(fast, opt, [stream.batch(60) for _ in range(10)])
    out = recast.dynamic.export(fast.user)
    other, other_opt, _ = made(tmp_path / "b")
    recast.dynamic.import_(other.user, out.ids, out.rows)
    back = recast.dynamic.export(other.user)
    assert torch.equal(back.ids, out.ids) and torch.equal(back.rows, out.rows)
    train(other, other_opt, [stream.batch(60)])
    since = recast.dynamic.mark(fast.user)
    touched = [stream.batch(60) for _ in range(6)]
    train(fast, opt, touched)
    changes = recast.dynamic.changed(fast.user, since)
    ids = torch.unique(torch.cat([b[0] for b in touched]))
    assert len(ids) > table(fast).capacity  # some of them are on disk again
    assert torch.equal(changes.rows.ids, ids) and len(changes.gone) == 0
    now = recast.dynamic.export(fast.user)
    rows = now.rows[torch.searchsorted(now.ids, ids)]
    assert torch.equal(changes.rows.rows, rows)


def test_state_begins_anew_with_an_import(tmp_path: Path) -> None:
    """Also for rows that go to disk before the next step."""
    runs = []
    for path in (None, tmp_path):
        fast, opt, stream = made(path)
        train(fast, opt, [stream.batch(60) for _ in range(10)])
        out = recast.dynamic.export(fast.user)
        recast.dynamic.import_(fast.user, out.ids, out.rows)
        outs = train(fast, opt, [stream.batch(60) for _ in range(10)])
        runs.append((fast, outs))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    same_rows(runs[0][0], runs[1][0])


def test_erase_and_ttl_reach_the_disk(tmp_path: Path) -> None:
    runs = []
    for path in (None, tmp_path):
        fast, opt, stream = made(path, ttl=6)
        outs = train(fast, opt, [stream.batch(60) for _ in range(12)])
        ids = table(fast).ids()
        first = torch.sort(ids).values[::3]
        assert table(fast).erase(first) == len(first) and table(fast).erase(first) == 0
        outs += train(fast, opt, [stream.batch(60) for _ in range(12)])
        runs.append((fast, outs))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    same_rows(runs[0][0], runs[1][0])
    assert table(runs[1][0]).tier.promoted > 20


def test_min_count_with_tiers(tmp_path: Path) -> None:
    runs = []
    for path in (None, tmp_path):
        fast, opt, stream = made(path, admit=recast.MinCount(2))
        runs.append((fast, train(fast, opt, [stream.batch(50) for _ in range(30)])))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    same_rows(runs[0][0], runs[1][0])


def full(path: Path, evict: str | None) -> tuple[Any, Any, Stream]:
    """Room for 200 rows in memory and 260 on disk, for 600 ids."""
    torch.manual_seed(3)
    stream, model = Stream(1, many=600), Model().double()
    how = recast.Dynamic(tiers=tiers(path, (1 << 18) + (1 << 16)), seed=5, evict=evict)
    opt = torch.optim.Adagrad(model.parameters())
    with convert.made(model, {"user": how}, opt, lazy=False):
        row_optimizer.attach(opt)
    return model, opt, stream


def test_a_full_disk_tier_drops_the_lowest(tmp_path: Path) -> None:
    """Rows never looked up again go; those looked up all the time are kept, wherever they are."""
    fast, opt, stream = full(tmp_path, "lru")
    tier, kept = table(fast).tier, torch.arange(60)
    since = recast.dynamic.mark(fast.user)
    for k in range(30):
        some = torch.cat([kept, 60 + (torch.arange(40) + 40 * k) % 540])
        opt.zero_grad()
        fast.user(stream.users[some]).square().sum().backward()
        opt.step()
    assert tier.dropped > 0 and tier.records <= tier.capacity
    ids = table(fast).ids()
    assert len(ids) == len(table(fast)) < 600 and torch.isin(stream.users[kept], ids).all()
    gone = recast.dynamic.changed(fast.user, since).gone
    assert len(gone) > 0 and not torch.isin(gone, ids).any()
    counted = table(fast).counters()
    assert counted["inserted"] - counted["evicted"] == len(ids)


def test_without_eviction_a_full_table_says_so_and_loses_nothing(tmp_path: Path) -> None:
    fast, opt, stream = full(tmp_path, None)
    stored: set[int] = set()
    with pytest.raises(UsageError, match=r"all .* in memory and all .* on disk are taken"):
        for k in range(12):
            opt.zero_grad()
            fast.user(stream.users[50 * k : 50 * k + 50]).square().sum().backward()
            opt.step()
            stored |= set(stream.users[50 * k : 50 * k + 50].tolist())
    assert stored == set(table(fast).ids().tolist()) and len(stored) > 300
    with torch.no_grad():
        rows = fast.eval().user(torch.tensor(sorted(stored)))
    assert torch.equal(rows, recast.dynamic.export(fast.user).rows)


def test_more_rows_at_once_than_memory_has(tmp_path: Path) -> None:
    fast, opt, stream = made(tmp_path)
    train(fast, opt, [stream.batch(60) for _ in range(6)])
    before = recast.dynamic.export(fast.user)
    with pytest.raises(UsageError, match="rows are wanted in memory, and"):
        fast.user(stream.users)
    after = recast.dynamic.export(fast.user)
    assert torch.equal(before.ids, after.ids) and torch.equal(before.rows, after.rows)
    opt.zero_grad(), opt.step()  # as the error says
    train(fast, opt, [stream.batch(60)])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tiers": "disk"}, "not a list of tiers"),
        ({"tiers": [recast.Host(10**6)]}, "memory, and disk under it"),
        ({"tiers": [recast.Disk("x", 9), recast.Host(9)]}, "memory, and disk under it"),
        ({"tiers": [recast.Host("2 parsec"), recast.Disk("x", "1GiB")]}, "no number of bytes"),
        ({"tiers": [recast.Host(True), recast.Disk("x", "1GiB")]}, "no number of bytes"),
        ({"tiers": [recast.Host("1GiB"), recast.Disk(3, "1GiB")]}, "the path is no path"),
        ({"tiers": [recast.Host("1KiB"), recast.Disk("x", "1GiB")]}, "leaves no room for a row"),
        ({"tiers": [recast.Host("1GiB"), recast.Disk("x", 9)]}, "less than one record"),
        ({"tiers": tiers(Path("x")), "max_rows": 9}, "one of max_rows, max_bytes and tiers"),
    ],
)
def test_wrong_settings(given: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=match):
        how = recast.Dynamic(**given)
        recast.optimize(Model(), example=example(Stream(1)), tables={"user": how})
    assert not Path("x").exists()


def test_what_is_not_built(tmp_path: Path) -> None:
    how = recast.Dynamic(tiers=[recast.Device("1GiB"), *tiers(tmp_path)])
    with pytest.raises(UsageError, match="has a tier on a device, and its module is not on a GPU"):
        recast.optimize(Model(), example=example(Stream(1)), tables={"user": how})
    fast, _, _ = made(tmp_path)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(NotBuiltError, match="rows on disk: it cannot be copied"):
            copied(fast)


def test_an_optimizer_that_the_records_do_not_know(tmp_path: Path) -> None:
    """There is no room for its state: refused, rather than silently reset."""
    how = recast.Dynamic(tiers=tiers(tmp_path), seed=5)
    stream = Stream(1)
    both = {"user": how, "items": how}
    fast = recast.optimize(Model().double(), example=example(stream), tables=both)
    opt = torch.optim.Adagrad(fast.parameters(), lr=0.1)
    row_optimizer.attach(opt)
    with pytest.raises(UsageError, match="there is no place for sum of the optimizer"):
        train(fast, opt, [stream.batch(5)])


def test_another_optimizer_of_the_same_kind(tmp_path: Path) -> None:
    """Its state would not go to disk with the rows."""
    model, opt, stream = made(tmp_path)
    train(model, opt, [stream.batch(5)])
    other = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="another Adagrad than optimize"):
        train(model, other, [stream.batch(5)])
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), [stream.batch(5)])  # it has none


def test_a_write_to_all_rows_misses_those_on_disk(tmp_path: Path) -> None:
    model, opt, stream = made(tmp_path)
    with torch.no_grad():
        model.user.weight.mul_(0.5)  # while all are in memory
    while not model.user.table.tier.below:
        train(model, opt, [stream.batch(64)])
    recast.dynamic.export(model.user)
    with torch.no_grad():
        model.user.weight.mul_(0.5)
    with pytest.raises(UsageError, match=r"written to as a whole, and \d+ of its rows are on disk"):
        recast.dynamic.export(model.user)
