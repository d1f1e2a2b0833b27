"""Tables with rows on a GPU, in memory and on disk give the numbers of tables all on the GPU.

On the emulator, with few rows on the GPU, so that most move between the tiers again and again.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from devicetiers import in_one_place, made, table, tiers
from dynamickit import KINDS, Model, Stream, example, same_rows, train, train_ahead, waiting
from torch import Tensor

import recast
from recast.errors import CheckpointError, NotBuiltError, RecastWarning, UsageError
from recast.runtime.recorded import recording
from recast.runtime.recorded.training_step import TrainingStep

sys.path.append(str(Path(__file__).parent.parent / "gpu"))
from tape import TapeRecorder

pytest.importorskip("rocksdict")


@pytest.fixture(autouse=True)
def gpu() -> Any:
    with emulated_gpu.serve() as emulated:
        yield emulated


def batches_of(stream: Stream, steps: int, size: int) -> list[tuple[Tensor, ...]]:
    return [stream.batch(1 if k == 1 else size) for k in range(steps)]


def compare(
    kind: str, steps: int, runs: list[tuple[Any, Path | None]], *, rows: int = 90,
    size: int = 30, **how: Any,
) -> None:  # fmt: skip
    many, host = 2 * rows, rows // 8
    fast, opt, stream = made(None, kind, plain=True, many=many, **how)
    batches = batches_of(stream, steps, size)
    want = train(fast, opt, batches)
    for way, path in runs:
        tiered, tiered_opt, _ = made(
            path, kind, many=many, rows=rows, host=many if path is None else host, **how
        )
        got = way(tiered, tiered_opt, batches)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        same_rows(tiered, fast)
        on_gpu, memory, disk = in_one_place(table(tiered))
        c = table(tiered).counters()
        assert len(on_gpu) == rows and memory and bool(disk) == (path is not None)
        assert c["promoted"] > 3 and (c["ahead"] > 3) == (way is train_ahead)
        assert c["demoted"] - c["promoted"] == len(memory) + len(disk)
        asked = sum(len(b[0]) for b in batches)
        assert c["on_device"] + c["in_memory"] + c["on_disk"] + c["new"] == asked
        assert (c["hits"] + c["misses"], c["misses"]) == (asked, c["new"])
        assert c["inserted"] == len(table(tiered)) and c["evicted"] == c["refused"] == 0
        fast.eval(), tiered.eval()  # a mere read sees all tiers, and moves nothing
        batch = Stream(1, many=many).batch(2 * rows)
        with torch.no_grad():
            assert torch.equal(tiered(*batch), fast(*batch))
        now = table(tiered).counters()
        assert {**now, "read": 0} == {**c, "read": 0}
        fast.train()


def test_steps_are_those_without_tiers(tmp_path: Path) -> None:
    compare("adagrad", 12, [(train_ahead, tmp_path)], rows=30, size=10)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_are_those_without_tiers(kind: str, tmp_path: Path) -> None:
    compare(kind, 50, [(train_ahead, tmp_path), (train, None)], rows=60, size=20)


@pytest.mark.long
@pytest.mark.parametrize("evict", ["lru", "lfu", "epoch_lru", "epoch_lfu", lambda ids: ids >> 8])
def test_every_policy_has_the_numbers(evict: Any, tmp_path: Path) -> None:
    compare("adagrad", 15, [(train_ahead, tmp_path)], rows=30, size=10, evict=evict)


@pytest.mark.long
def test_min_count_and_ttl_have_the_numbers(tmp_path: Path) -> None:
    for how in ({"admit": recast.MinCount(2), "many": 80}, {"ttl": 8, "many": 100}):
        fast, opt, stream = made(None, plain=True, **how)
        batches = batches_of(stream, 20, 10)
        want = train(fast, opt, batches)
        tiered, tiered_opt, _ = made(tmp_path / next(iter(how)), rows=30, host=10, **how)
        got = train_ahead(tiered, tiered_opt, batches)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        same_rows(tiered, fast)
        assert table(tiered).counters()["promoted"] > 5
        if "admit" in how:
            in_one_place(table(tiered))
            assert waiting(table(tiered)) == waiting(recast.dynamic.tables(fast)["user"]) != {}


def test_the_graph_and_the_report_tell_of_the_traffic(tmp_path: Path) -> None:
    fast, opt, stream = made(tmp_path, graph=True, rows=40, host=5)
    dump = str(fast)
    assert dump.index("fetch_rows") < dump.index("find_rows")
    train(fast, opt, [stream.batch(10) for _ in range(6)])
    c, said = table(fast).counters(), str(fast.report)
    assert c["down"] == c["demoted"] * table(fast).tier.kind.size > 0
    assert c["written"] > 0 and f"{c['demoted']} rows went down" in said
    assert "% on the GPU" in said and "rows went to disk" in said
    asked = c["on_device"] + c["in_memory"] + c["on_disk"] + c["new"]
    assert f"{100 * c['new'] / asked:.1f} % new" in said


@pytest.mark.long
def test_the_hot_rows_stay_on_the_gpu(tmp_path: Path) -> None:
    """Under "lfu", rows looked up once do not push down rows looked up often."""
    fast, opt, _ = made(tmp_path, evict="lfu")
    hot = torch.arange(40)
    for k in range(6):
        opt.zero_grad()
        cold = torch.arange(40) + 1000 * (k + 1)
        fast.user(torch.cat([hot, cold])).square().sum().backward()
        opt.step()
    on_gpu, memory, disk = in_one_place(table(fast))
    assert set(range(40)) <= on_gpu and table(fast).tier.memory == table(fast).tier.disk == 0
    assert len(memory) == 60 and len(disk) == 240 + 40 - 90 - 60


@pytest.mark.long
def test_counts_are_halved_below_too() -> None:
    """Under "lfu", a row has the count it would have had on the GPU all the time."""
    runs = []
    for plain in (True, False):
        fast, opt, _ = made(None, rows=20, host=300, plain=plain, evict="lfu")
        own = recast.dynamic.tables(fast)["user"]
        for k in range(5):
            opt.zero_grad()
            ids = torch.cat([torch.full((12,), 10 * k), torch.arange(6) + 10 * k])
            fast.user(ids).sum().backward()
            if k == 2:
                own.index.looked_up = 10**9
            opt.step()
        ids, _, scores, _ = own.stored()
        runs.append(dict(zip(ids.tolist(), scores.tolist(), strict=True)))
    assert runs[0] == runs[1] and len(runs[0]) == 30
    assert runs[0][0] == 13 // 2 and runs[0][40] == 13 and table(fast).tier.store.halved == 1


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "kind", ["row-wise-adagrad", *(pytest.param(k, marks=pytest.mark.long) for k in KINDS)]
)
def test_checkpoints_hold_all_tiers(kind: str, tmp_path: Path) -> None:
    """From tiers to tiers, to the GPU alone, and back; training goes on to the same bits."""
    few = {"rows": 50, "host": 10, "evict": "lru", "many": 150}
    fast, opt, stream = made(tmp_path / "a", kind, **few)
    train(fast, opt, [stream.batch(20) for _ in range(6)])
    assert all(in_one_place(table(fast)))
    recast.checkpoint.save(tmp_path / "saved", fast, opt)
    model, state = saved(fast.state_dict()), saved(opt.state_dict())
    assert len(model["user.ids"]) == len(table(fast)) > 60
    alone, alone_opt, _ = made(None, kind, plain=True, evict="lru", seed=4)
    alone.load_state_dict(model), alone_opt.load_state_dict(state)
    tiered, tiered_opt, _ = made(tmp_path / "b", kind, seed=4, **few)
    train(tiered, tiered_opt, [Stream(7, many=300).batch(20) for _ in range(2)])  # is gone then
    recast.checkpoint.load(tmp_path / "saved", tiered, tiered_opt)
    back, back_opt, _ = made(None, kind, host=500, evict="lru", seed=4)
    back.load_state_dict(saved(alone.state_dict()))
    back_opt.load_state_dict(saved(alone_opt.state_dict()))
    batches = [stream.batch(20) for _ in range(3)]
    want = train(fast, opt, batches)
    for one, its_opt in ((alone, alone_opt), (tiered, tiered_opt), (back, back_opt)):
        got = train(one, its_opt, batches)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        same_rows(one, fast, placed=batches)
    for one in (tiered, back):
        in_one_place(table(one))


def test_a_checkpoint_of_more_rows_than_fit() -> None:
    fast, opt, stream = made(None, plain=True)
    train(fast, opt, [stream.batch(40) for _ in range(2)])
    small, _, _ = made(None, rows=40, host=20)
    with pytest.raises((CheckpointError, RuntimeError), match="ids for a table of 40 rows"):
        small.load_state_dict(fast.state_dict())


@pytest.mark.long
def test_export_import_erase_and_what_changed(tmp_path: Path) -> None:
    fast, opt, stream = made(tmp_path / "a")
    train(fast, opt, [stream.batch(30) for _ in range(7)])
    out = recast.dynamic.export(fast.user)
    other, other_opt, _ = made(tmp_path / "b")
    recast.dynamic.import_(other.user, out.ids, out.rows)
    back = recast.dynamic.export(other.user)
    assert torch.equal(back.ids, out.ids) and torch.equal(back.rows, out.rows)
    train(other, other_opt, [stream.batch(30)])
    since = recast.dynamic.mark(fast.user)
    touched = [stream.batch(30) for _ in range(5)]
    train(fast, opt, touched)
    first = table(fast).ids()[::3]
    assert table(fast).erase(first) == len(first) and table(fast).erase(first) == 0
    in_one_place(table(fast))
    changes = recast.dynamic.changed(fast.user, since)
    ids = torch.unique(torch.cat([b[0] for b in touched]))
    ids = ids[~torch.isin(ids, first)]
    assert torch.equal(changes.rows.ids, ids)
    assert set(changes.gone.tolist()) == set(first.tolist()) & set(out.ids.tolist()) != set()
    now = recast.dynamic.export(fast.user)
    assert torch.equal(changes.rows.rows, now.rows[torch.searchsorted(now.ids, ids)])


@pytest.mark.long
def test_state_begins_anew_with_an_import(tmp_path: Path) -> None:
    """Also for rows that go down before the next step."""
    runs = []
    for plain in (True, False):
        fast, opt, _ = made(tmp_path, rows=20, host=10, plain=plain)
        for k in range(4):
            step(fast, opt, 10 * k + torch.arange(10))
        out = recast.dynamic.export(fast.user)
        recast.dynamic.import_(fast.user, out.ids, out.rows)
        for k in range(6):
            step(fast, opt, 10 * (k % 4) + torch.arange(10))
        runs.append(recast.dynamic.export(fast.user))
    assert torch.equal(runs[0].ids, runs[1].ids) and torch.equal(runs[0].rows, runs[1].rows)


@pytest.mark.long
def test_what_is_read_ahead_may_be_wrong(tmp_path: Path) -> None:
    """Rows that came up, were trained and went down again differ from those that were read."""
    runs = []
    for ahead in (False, True):
        fast, opt, _ = made(tmp_path / str(ahead), rows=20, host=15)
        outs = []
        for k in range(18):
            if ahead and k % 2:
                table(fast).prefetch(torch.arange(80).view(8, 10))
            ids = torch.arange(12) + 7 * (k % 9)
            opt.zero_grad()
            outs.append(fast.user(ids))
            outs[-1].pow(2).sum().backward()
            opt.step()
        runs.append((fast, outs))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert table(runs[1][0]).counters()["ahead"] > 20
    in_one_place(table(runs[1][0]))


def full(path: Path | None, evict: str | None) -> tuple[Any, Any]:
    fast, opt, _ = made(path, rows=20, host=30, evict=evict, disk=1 << 18 | 1 << 12)
    return fast, opt


def step(fast: Any, opt: Any, ids: Tensor) -> None:
    opt.zero_grad()
    fast.user(ids).pow(2).sum().backward()
    opt.step()


@pytest.mark.long
@pytest.mark.parametrize("on_disk", [True, False])
def test_full_tiers_drop_the_lowest(on_disk: bool, tmp_path: Path) -> None:
    fast, opt = full(tmp_path if on_disk else None, "lru")
    room = 20 + table(fast).tier.capacity
    since = recast.dynamic.mark(fast.user)
    kept = torch.arange(6)
    for k in range(20):
        step(fast, opt, torch.cat([kept, 10 * (k + 1) + torch.arange(10)]))
    found = set.union(*in_one_place(table(fast)))
    c = table(fast).counters()
    assert c["evicted"] > 20 and len(found) == c["inserted"] - c["evicted"] <= room
    assert set(range(6)) <= found and set(range(191, 211)) >= found - set(range(191))
    gone = recast.dynamic.changed(fast.user, since).gone
    assert len(gone) == 0  # who came and went since is nobody's news
    assert {*range(200, 210)} <= found


@pytest.mark.parametrize("on_disk", [True, pytest.param(False, marks=pytest.mark.long)])
def test_without_eviction_full_tiers_say_so_and_lose_nothing(on_disk: bool, tmp_path: Path) -> None:
    fast, opt = full(tmp_path if on_disk else None, None)
    before: Any = None
    with pytest.raises(UsageError, match=r"rows have to go down, and of \d+ there \d+ are taken"):
        for k in range(20):
            before = recast.dynamic.export(fast.user)
            step(fast, opt, 15 * k + torch.arange(15))
    after = recast.dynamic.export(fast.user)
    assert len(before.ids) >= table(fast).tier.capacity
    assert torch.equal(before.ids, after.ids) and torch.equal(before.rows, after.rows)
    in_one_place(table(fast))
    opt.zero_grad(), opt.step()
    step(fast, opt, torch.arange(15))  # what is stored is trained on


def test_more_rows_at_once_than_the_gpu_has(tmp_path: Path) -> None:
    """Rows below stay there, intact; so do those that were on the GPU."""
    fast, opt, _ = made(tmp_path, rows=20, host=15)
    for k in range(4):
        step(fast, opt, 10 * k + torch.arange(10))
    before = recast.dynamic.export(fast.user)
    with pytest.raises(UsageError, match="20 rows found no place on the GPU: their buckets"):
        fast.user(torch.arange(40))
    after = recast.dynamic.export(fast.user)
    assert torch.equal(before.ids, after.ids) and torch.equal(before.rows, after.rows)
    opt.zero_grad(), opt.step()
    step(fast, opt, torch.arange(20))
    in_one_place(table(fast))


@pytest.mark.long
def test_more_new_ids_than_a_bucket_has_rows() -> None:
    fast, opt, _ = made(None, rows=200, host=500)
    ids = torch.arange(4000)
    ids = ids[torch.tensor([bucket_of(int(i), 2) for i in ids]) == 1][:110]
    for k in range(3):
        step(fast, opt, 10**6 + 150 * k + torch.arange(150))
    before = in_one_place(table(fast))
    assert len(before[0]) == 200 and before[1]
    with pytest.raises(UsageError, match="10 rows found no place on the GPU: their buckets"):
        fast.user(ids)
    after = in_one_place(table(fast))
    assert set.union(*before) | set(ids[:100].tolist()) == set.union(*after)
    with torch.no_grad():  # those that are stored begin as they should, the others are answered
        assert torch.equal(fast.user(ids), table(fast).initial_rows(ids))


def bucket_of(id_: int, buckets: int) -> int:
    mask = 2**64 - 1
    product = (id_ ^ 0x2D358DCCAA6C78A5) * 0x9E3779B97F4A7C15
    return ((product ^ product >> 64) & mask) // 2**32 * buckets // 2**32


@pytest.mark.long
def test_gradients_in_eval_mode_bring_rows_up(tmp_path: Path) -> None:
    """Stored rows are trained, wherever they are; other ids are not stored."""
    runs = []
    for plain in (True, False):
        fast, opt, _ = made(tmp_path, rows=20, host=15, plain=plain)
        for k in range(4):
            step(fast, opt, 10 * k + torch.arange(10))
        fast.eval()
        for k in range(4):
            step(fast, opt, torch.tensor([1, 11, 11, 21, 31, 99, 9 + k]))
        runs.append(fast)
    same_user = [recast.dynamic.export(fast.user) for fast in runs]
    assert torch.equal(same_user[0].ids, same_user[1].ids) and len(same_user[0].ids) == 40
    assert torch.equal(same_user[0].rows, same_user[1].rows)
    in_one_place(table(runs[1]))


def test_padding_is_in_no_tier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 8, mode="sum", padding_idx=3))
    opt = torch.optim.Adagrad(net.parameters(), lr=0.1)
    how = recast.Dynamic(tiers=tiers(tmp_path, 16, 10, 10))
    ids = torch.arange(24).view(8, 3)
    fast, opt = recast.optimize(net, opt, example=[ids, ids[:2]], tables={"0": how})
    for k in range(8):
        opt.zero_grad()
        fast(torch.cat([ids[k : k + 1], ids[1:2]])).square().sum().backward()
        opt.step()
    own = table(fast, "0")
    assert set.union(*in_one_place(own)) == set(range(24)) - {3}
    c = own.counters()
    assert c["on_device"] + c["in_memory"] + c["on_disk"] + c["new"] == 16 * 3 - 9
    assert c["hits"] + c["misses"] == 16 * 3 - 9
    with torch.no_grad():
        assert torch.equal(fast(torch.full((1, 3), 3)), torch.zeros(1, 8))


# ---------------------------------------------------------------- what is refused


def test_a_recorded_step_is_refused(tmp_path: Path) -> None:
    fast, _, stream = made(tmp_path, graph=True)
    with recording.recording():
        with pytest.raises(NotBuiltError, match="has tiers: a step or a forward with it cannot"):
            fast(*stream.batch(5))
        with pytest.raises(NotBuiltError, match="cannot be recorded"):
            table(fast).prefetch(torch.arange(3))


@pytest.mark.long
def test_a_training_step_says_so_and_runs_as_it_is() -> None:
    fast, opt, _ = made(None, rows=20, host=40)
    other, other_opt, _ = made(None, rows=20, host=40)
    loss = lambda out: out.square().sum()  # noqa: E731
    whole = TrainingStep(fast.user, loss, opt, recorder=TapeRecorder(opt), warmup=1)
    with pytest.warns(RecastWarning, match="not being recorded|without being recorded.*has tiers"):
        for k in range(5):
            whole(torch.arange(8) + 5 * k)
    for k in range(5):
        step(other, other_opt, torch.arange(8) + 5 * k)
    mine, theirs = (recast.dynamic.export(x.user) for x in (fast, other))
    assert torch.equal(mine.ids, theirs.ids) and torch.equal(mine.rows, theirs.rows)
    in_one_place(table(fast))


def test_what_is_not_built(tmp_path: Path) -> None:
    fast, _, stream = made(None)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(NotBuiltError, match="rows below the GPU: it cannot be copied"):
            copied(fast)
    below = recast.Dynamic(tiers=[recast.Host("1MiB"), recast.Disk(tmp_path, "9MiB")])
    with pytest.raises(NotBuiltError, match="user with tiers but none of the GPU itself"):
        recast.optimize(Model(), example=example(stream), tables={"user": below})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([recast.Device("1MiB")], "memory, and disk under it"),
        ([recast.Device("1MiB"), recast.Disk("x", "1GiB")], "memory, and disk under it"),
        ([recast.Host("1MiB"), recast.Device("1MiB")], "memory, and disk under it"),
        ([recast.Device("-1"), recast.Host("1MiB")], "no number of bytes"),
        ([recast.Device("0.1KiB"), recast.Host("1MiB")], "less than three rows"),
        ([recast.Device("1MiB"), recast.Host(50)], "leave no room for a row"),
        ([recast.Device("1MiB"), recast.Host(50), recast.Disk("x", 9)], "leave no room for a row"),
    ],
)
def test_wrong_settings(given: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        tables = {"user": recast.Dynamic(tiers=given)}
        recast.optimize(Model(), example=example(Stream(1)), tables=tables)
    assert not Path("x").exists()
