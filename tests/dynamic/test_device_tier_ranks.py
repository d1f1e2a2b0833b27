"""Dynamic tables over ranks with rows on a GPU, in memory and on disk, on the emulator: each rank
has its share of every tier and its own files; together they give the numbers of the plain model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from devicetiers import in_one_place, table, tiers
from dynamicranks import ADAGRAD, Both, Make, joined, made, split, steps, steps_of, twin
from harness import processes, run
from torch import Tensor

import recast
from recast.errors import TierError, UsageError
from recast.runtime import tolerances
from recast.runtime.dynamic.cuda_table import BYTES_OF_AN_ID, rooms
from recast.runtime.tiers.store import rows_in

pytest.importorskip("rocksdict")

ROWS, HOST, DISK = 20, 3, 1 << 21  # of each rank: rows on the GPU, rows in memory, bytes
OPTIMIZERS: dict[str, tuple[Make, int]] = {  # float32 numbers of a row with its state
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.3), 8),
    "adagrad": (ADAGRAD, 16),
    "row-wise-adagrad": (lambda p: recast.optim.RowWiseAdagrad(p, lr=0.1), 9),
    "lazy-adam": (lambda p: torch.optim.Adam(p, lr=0.05), 24),
    "sparse-adam": (lambda p: torch.optim.SparseAdam(p, lr=0.05), 24),
}


@pytest.fixture(autouse=True)
def gpu() -> Any:
    with emulated_gpu.serve() as emulated:
        yield emulated


def tiered(path: Path | None, world: int, numbers: int = 16) -> dict[str, Any]:
    """Tables whose tiers have the same room on each of ``world`` ranks."""
    device, *below = tiers(path, numbers, ROWS, HOST if path else 300, DISK)
    shares = [recast.Device(world * device.budget), recast.Host(world * below[0].budget)]
    shares += [recast.Disk(path, world * DISK)] if path else []
    return {
        "user": recast.Dynamic(tiers=shares, seed=5),
        "items": recast.Dynamic(tiers=shares, evict="lfu", seed=5),
    }


def spread(world: int, path: Path | None, kind: str = "adagrad", **more: Any) -> tuple[Any, Any]:
    make, numbers = OPTIMIZERS[kind]
    how = tiered(path, world, numbers)
    return made(make, how, torch.float32, rows=world * ROWS, **options_of(kind), **more)


def options_of(kind: str) -> dict[str, Any]:
    more: dict[str, Any] = {"apart": "adam" in kind, "sparse": kind == "sparse-adam"}
    return {**more, "sparse_semantics": "lazy"} if kind == "lazy-adam" else more


def close(got: Tensor, plain: Tensor, judge: Tensor) -> None:
    assert tolerances.excess(got.detach(), plain.detach(), judge.detach()) <= tolerances.CHAIN


def twins(kind: str, batches: list[Any], many: int) -> Any:
    """The plain model over ids numbered beforehand, in float32 and as the judge; their outputs."""
    make, options = OPTIMIZERS[kind][0], options_of(kind)
    plain, opt = twin(make, torch.float32, many, **options)
    judge = copy.deepcopy(plain).double()
    its: Any = make(judge.parameters())
    if options["apart"]:
        own, rest = split(judge)
        its = Both(torch.optim.SparseAdam(own, lr=0.05), torch.optim.Adam(rest, lr=0.01))
    outs = steps(plain, opt, batches), steps(judge, its, batches)
    return (plain, judge), list(zip(*outs, strict=True))


# ---------------------------------------------------------------- the numbers


def one_rank(rank: int, world: int, path: Path | None, kind: str, ahead: bool, count: int) -> Any:
    *batches, last = steps_of(world, count + 1, many=45 * world)
    fast, opt = spread(world, path, kind)
    outs = steps(fast, opt, batches, rank, ahead)
    rows, facts = {}, {}
    for name in ("user", "items"):
        own = table(fast, name)
        rows[name] = recast.dynamic.export(fast.get_submodule(name))
        places = [len(ids) for ids in in_one_place(own)]
        facts[name] = (places, own.counters(), str(own.tier.path))
    said, dump = str(fast.report), str(fast)
    fast.eval()
    with torch.no_grad():
        outs.append(fast(*last[rank]))  # a mere read sees all tiers, and moves nothing
    now = [table(fast, name).counters()["promoted"] for name in facts]
    assert now == [counted["promoted"] for _, counted, _ in facts.values()]
    return outs, rows, facts, said, dump


def compare(
    kind: str, world: int, path: Path | None, ahead: bool, count: int, ranks: Any = run
) -> None:
    many = 45 * world
    *batches, last = steps_of(world, count + 1, many=many)
    (plain, judge), outs = twins(kind, batches, many)
    outs.append((plain(*joined(last)), judge(*joined(last))))
    results = ranks(world, one_rank, world, path, kind, ahead, count)
    for k, both in enumerate(outs):
        close(torch.cat([r[0][k] for r in results]), *both)
    for name in ("user", "items"):
        ids = torch.cat([r[1][name].ids for r in results])
        assert len(ids.unique()) == len(ids) > ROWS * world, "every id is at one rank"
        for rank, (_, rows, facts, *_) in enumerate(results):
            own = rows[name]
            close(own.rows, plain.rows(name, own.ids), judge.rows(name, own.ids))
            (on_gpu, memory, disk), counted, folder = facts[name]
            assert 0 < on_gpu <= ROWS and memory and (disk > 0) == (path is not None)
            assert counted["inserted"] == len(own.ids) and counted["evicted"] == 0
            if path is not None:
                assert folder == str(path / f"rank-{rank}" / name)
    for rank, (_, _, facts, said, dump) in enumerate(results):
        promoted, early = (sum(f[1][k] for f in facts.values()) for k in ("promoted", "ahead"))
        assert promoted > count // 5 and early == promoted * ahead, "at its owner, ahead"
        assert dump.index("fetch_rows") < dump.index("find_rows") < dump.index("wait_rows")
        assert f"user (part {rank + 1} of {world})" in said and "% on the GPU" in said
        assert ("rows went to disk" in said) == (path is not None)


@pytest.mark.parametrize(
    ("kind", "world", "ahead", "count"),
    [
        ("adagrad", 2, True, 9),
        *(
            pytest.param(kind, world, ahead, 20, marks=pytest.mark.long)
            for kind in OPTIMIZERS
            for world, ahead in ((2, False), (2, True), (4, False), (4, True))
        ),
    ],
)
def test_steps_are_those_of_the_plain_model(
    kind: str, world: int, ahead: bool, count: int, tmp_path: Path
) -> None:
    compare(kind, world, tmp_path, ahead, count)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [False, True], ids=["when asked", "ahead"])
def test_without_a_disk(ahead: bool) -> None:
    compare("adagrad", 2, None, ahead, 12)


@pytest.mark.long
def test_processes_over_gloo(tmp_path: Path) -> None:
    compare("row-wise-adagrad", 2, tmp_path, True, 12, processes)


@pytest.mark.long
def test_min_count_is_that_of_one_process(tmp_path: Path) -> None:
    """Ids wait at their owner, and are stored at the same lookup."""
    batches = steps_of(2, 20, many=120)

    def counting(rank: int, world: int) -> Any:
        path = tmp_path / str(world)
        device, host, _ = tiers(path, 16, 25, HOST, DISK, waiting=50)
        shares: list[Any] = [recast.Device(2 * device.budget)]
        shares += [recast.Host(2 * host.budget), recast.Disk(path, 2 * DISK)]
        one = recast.Dynamic(tiers=shares, seed=5, admit=recast.MinCount(2))
        how = {"user": one, "items": one}
        fast, opt = made(ADAGRAD, how, torch.float32, rows=50)
        steps(fast, opt, batches if world == 2 else [[joined(b)] for b in batches], rank)
        ids, counts, _ = table(fast, "items").candidates().tolist()
        found = in_one_place(table(fast, "items"))
        return dict(zip(ids, counts, strict=True)), set.union(*found), len(found[1])

    (seen, stored, _), two = run(1, counting, 1)[0], run(2, counting, 2)
    assert seen == two[0][0] | two[1][0] != {} and stored == two[0][1] | two[1][1]
    assert all(below == HOST for *_, below in two)


# ---------------------------------------------------------------- checkpoints

BEFORE, AFTER, MANY = 4, 2, 120
STEPS = steps_of(4, BEFORE + AFTER, many=MANY)


def parts_for(world: int, batches: Any) -> Any:
    """The same global batches for another number of ranks."""
    if world == 4:
        return batches
    if world == 1:
        return [[joined(parts)] for parts in batches]
    return [[joined(parts[:2]), joined(parts[2:])] for parts in batches]


def roomy(path: Path, world: int) -> dict[str, Any]:
    """Tables whose tiers have the same room on all ranks together."""
    device, host, _ = tiers(path, 16, 72, 4, DISK)
    room = tiers(path, 16, 1, 0, DISK)[1].budget * (world - 1)  # of the engine, on each rank
    shares = [device, recast.Host(host.budget + room), recast.Disk(path, world * DISK)]
    return {name: recast.Dynamic(tiers=shares, seed=5) for name in ("user", "items")}


def begun(path: Path, world: int, seed: int = 3) -> tuple[Any, Any]:
    how = roomy(path, world)
    rows = world * rooms("user", how["user"], 16 * 4, world)[0]
    return made(ADAGRAD, how, torch.float32, seed, rows=rows)


def saving(rank: int, world: int, path: Path) -> Any:
    fast, opt = begun(path / f"tiers of {world}", world)
    steps(fast, opt, parts_for(world, STEPS[:BEFORE]), rank)
    sizes = torch.tensor([len(ids) for ids in in_one_place(table(fast, "items"))])
    recast.checkpoint.save(path / "saved", fast, opt, step=BEFORE)
    everything = recast.dynamic.export(fast.items, ranks="all")
    state = fast.full_state_dict(ranks="all")
    assert sorted(state["items.ids"].tolist()) == everything.ids.tolist()
    return everything, sizes


def loading(rank: int, world: int, path: Path) -> Any:
    fast, opt = begun(path / f"others of {world}", world, seed=9)
    steps(fast, opt, parts_for(world, STEPS[:1]), rank)  # what it learns is dropped
    assert recast.checkpoint.load(path / "saved", fast, opt).step == BEFORE
    loaded = recast.dynamic.export(fast.items, ranks="all")
    outs = steps(fast, opt, parts_for(world, STEPS[BEFORE:]), rank)
    in_one_place(table(fast)), in_one_place(table(fast, "items"))
    return outs, loaded


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 1),
        *(pytest.param(*c, marks=pytest.mark.long) for c in ((1, 2), (2, 4), (4, 2), (4, 1))),
    ],
)
def test_a_checkpoint_for_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    """Training goes on as it would have on one process, with tiers, on the GPU or on the CPU."""
    _, outs = twins("adagrad", parts_for(1, STEPS), MANY)
    saved, sizes = zip(*run(before, saving, before, tmp_path), strict=True)
    assert all(torch.stack(sizes).sum(0) > 1), "some are in each tier"
    results = run(after, loading, after, tmp_path)
    for k in range(AFTER):
        close(torch.cat([r[0][k] for r in results]), *outs[BEFORE + k])
    for rows in (*saved, *(r[1] for r in results)):
        assert torch.equal(rows.ids, saved[0].ids) and torch.equal(rows.rows, saved[0].rows)
    with emulated_gpu.nobody():  # and the tables of the host
        host, opt = made(ADAGRAD, dtype=torch.float32, seed=9)
        recast.checkpoint.load(tmp_path / "saved", host, opt)
        assert torch.equal(recast.dynamic.export(host.items).rows, saved[0].rows)
        close(steps(host, opt, parts_for(1, STEPS[BEFORE:]))[0], *outs[BEFORE])


# ---------------------------------------------------------------- budgets, and what goes wrong


def test_every_rank_has_its_share(tmp_path: Path) -> None:
    """Even while a plan is made: no GPU holds more than its share, and there are no files yet."""
    how = tiered(tmp_path, 4)
    fast, _ = made(ADAGRAD, how, torch.float32, world_size=4)
    assert not any(tmp_path.iterdir())
    own, (device, host, disk) = table(fast), how["user"].tiers
    shards = fast.plan.placement("user.weight").shards
    assert [shard.size[0] for shard in shards] == [ROWS] * 4 and own.capacity == 4 * ROWS
    assert own.slab_rows * (16 * 4 + BYTES_OF_AN_ID) <= device.budget // 4
    below = own.tier.store
    assert below.rows == HOST and below.disk.capacity == rows_in(DISK, below.disk.kind.size)
    assert host.budget > 4 * below.records.numel() and disk.budget == 4 * DISK
    one = recast.Dynamic(max_bytes=9000)
    alone, _ = made(ADAGRAD, {"user": one, "items": one}, torch.float32, world_size=4)
    its = recast.dynamic.tables(alone)["user"]  # a budget of bytes without tiers is one of all too
    assert its.capacity == 4 * its.index.capacity > 40
    assert its.slab_rows * (16 * 4 + BYTES_OF_AN_ID) <= 9000 // 4
    with pytest.raises(UsageError, match="one of 4 shares, leave no room for a row"):
        made(ADAGRAD, tiered(tmp_path, 1), torch.float32, world_size=4)
    few = [recast.Device(500), host]
    with pytest.raises(UsageError, match="500 bytes, one of 4 shares, are less than three rows"):
        made(ADAGRAD, {"user": recast.Dynamic(tiers=few)}, torch.float32, world_size=4)


@pytest.mark.long
def test_a_budget_of_bytes_without_tiers_is_shared_too() -> None:
    batches = steps_of(2, 4)
    one = recast.Dynamic(max_bytes=2 * 121 * (16 * 4 + BYTES_OF_AN_ID), seed=5)

    def one_rank(rank: int) -> Any:
        fast, opt = made(ADAGRAD, {"user": one, "items": one}, torch.float32, rows=2 * 60)
        found = recast.dynamic.tables(fast)["user"]
        assert (found.capacity, found.slab_rows) == (60, 121)
        return steps(fast, opt, batches, rank)

    outs, results = twins("adagrad", batches, 30)[1], run(2, one_rank)
    for k, both in enumerate(outs):
        close(torch.cat([r[k] for r in results]), *both)


def test_one_rank_without_its_folder(tmp_path: Path) -> None:
    """All ranks say so, and none waits."""
    (tmp_path / "rank-1" / "user").mkdir(parents=True)
    (tmp_path / "rank-1" / "user" / "mine").write_text("")

    def one(rank: int) -> str:
        with pytest.raises((UsageError, TierError)) as caught:
            spread(2, tmp_path)
        return str(caught.value)

    said = run(2, one)
    assert "holds mine" in said[1] and "rank 1 could not make its disk tier" in said[0]


@pytest.mark.long
def test_a_disk_that_fills_up_at_one_rank(tmp_path: Path) -> None:
    """All ranks raise, naming the owner: they compute one step together."""

    def one(rank: int) -> str:
        fast, opt = spread(2, tmp_path)
        store = table(fast).tier.store.disk.store
        if rank == 1:
            store.budget, store._unchecked = 1, 1 << 30
        with pytest.raises((TierError, UsageError)) as caught:
            steps(fast, opt, steps_of(2, 20, many=120), rank)
        return str(caught.value)

    said = run(2, one)
    assert "of a budget of 1" in said[1] and "rank 1 could not look up what it was sent" in said[0]


@pytest.mark.long
def test_a_batch_that_is_too_large_for_one_rank(tmp_path: Path) -> None:
    def one(rank: int) -> str:
        fast, opt = spread(2, tmp_path)
        many = torch.arange(8 * ROWS) if rank == 0 else torch.arange(2)
        batch = many, many[:1], torch.zeros_like(many), many % 7
        with pytest.raises(UsageError) as caught:
            steps(fast, opt, [[batch, batch]], rank)
        return str(caught.value)

    assert all("found no place" in s or "rows for" in s for s in run(2, one))
