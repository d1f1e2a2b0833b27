"""Dynamic tables over ranks with rows on disk: each rank has its own files, and together they give
the numbers of the plain model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dynamicranks import ADAGRAD, Make, made, steps, steps_of, twin
from harness import processes, run
from test_dynamic_ranks import OPTIMIZERS, STEPS, close
from torch import Tensor

import recast
from recast.errors import TierError, UsageError
from recast.runtime.dynamic.tiers import _MEMORY_BESIDE
from recast.runtime.tiers import records
from recast.runtime.tiers.engine import buffer_bytes, memory_of
from recast.runtime.tiers.store import rows_in

pytest.importorskip("rocksdict")

IN_MEMORY = 26  # rows of each rank
NUMBERS = {"sgd": 8, "adagrad": 16, "row-wise-adagrad": 9, "adam": 24}  # float64, of one row


def tiered(path: Path, world: int, numbers: int = 16, disk: int = 1 << 21) -> dict[str, Any]:
    """Tables with room for ``IN_MEMORY`` rows in the memory of each rank."""
    record = 8 * numbers + records.HEADER
    engine = memory_of(buffer_bytes(1, 1), rows_in(disk, record))
    host = engine + IN_MEMORY * (8 * numbers + 64 + _MEMORY_BESIDE)
    both = [recast.Host(world * host), recast.Disk(path, world * disk)]
    return {
        "user": recast.Dynamic(tiers=both, seed=5),
        "items": recast.Dynamic(tiers=both, evict="lfu", seed=5),
    }


def one_rank(rank: int, world: int, path: Path, make: Make, ahead: bool, options: Any) -> Any:
    options = dict(options)
    how, steps_ = tiered(path, world, options.pop("numbers")), options.pop("steps")
    fast, opt = made(make, how=how, rows=world * IN_MEMORY, **options)
    tables = recast.dynamic.tables(fast)
    outs = steps(fast, opt, steps_of(world, steps_, many=45 * world), rank, ahead)
    rows = {name: recast.dynamic.export(fast.get_submodule(name)) for name in tables}
    fast.eval()
    read = fast(*steps_of(world, 1, seed=2, many=45 * world)[0][rank])
    facts = {
        name: (t.capacity, t.tier.below, t.tier.promoted, t.tier.traffic.ahead, str(t.tier.path))
        for name, t in tables.items()
        if t.tier is not None
    }
    return outs, rows, facts, str(fast), read, str(fast.report)


def compare(
    world: int, path: Path, name: str, ahead: bool, ranks: Any = run, steps_: int = STEPS,
    **more: Any,
) -> None:  # fmt: skip
    make: Make = OPTIMIZERS[name] if name in OPTIMIZERS else more.pop("make")
    plain, opt = twin(make, many=45 * world, **more)
    wanted = steps(plain, opt, steps_of(world, steps_, many=45 * world))
    options = {**more, "numbers": NUMBERS[name], "steps": steps_}
    results = ranks(world, one_rank, world, path, make, ahead, options)
    for k, want in enumerate(wanted):
        close(torch.cat([r[0][k] for r in results]), want)
    for table in ("user", "items"):
        ids = torch.cat([r[1][table].ids for r in results])
        assert len(ids.unique()) == len(ids) > 30 * world
        for rank, (_, rows, facts, *_) in enumerate(results):
            close(rows[table].rows, plain.rows(table, rows[table].ids))
            capacity, below, _, _, folder = facts[table]
            assert capacity == IN_MEMORY and below > 4
            own = f"rank-{rank}/{table}" if world > 1 else table
            assert folder == str(path / own)
    for _, _, facts, dump, _, said in results:
        promoted, early = (sum(f[k] for f in facts.values()) for k in (2, 3))
        assert promoted > steps_ // 4 and (early > 2 if ahead else early == 0)
        assert dump.index("fetch_rows") < dump.index("find_rows")
        assert "rows went to disk" in said


def test_twenty_steps(tmp_path: Path) -> None:
    compare(2, tmp_path, "adagrad", True, steps_=20)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [False, True], ids=["when asked", "ahead"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_of(name: str, world: int, ahead: bool, tmp_path: Path) -> None:
    compare(world, tmp_path, name, ahead)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [False, True], ids=["when asked", "ahead"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("lazy", [True, False])
def test_fifty_steps_of_the_adams(lazy: bool, world: int, ahead: bool, tmp_path: Path) -> None:
    kind: Any = torch.optim.Adam if lazy else torch.optim.SparseAdam
    more: dict[str, Any] = {"apart": True, "sparse": not lazy}
    more |= {"sparse_semantics": "lazy"} if lazy else {}
    compare(world, tmp_path, "adam", ahead, make=lambda p: kind(p, lr=0.05), **more)


@pytest.mark.long
def test_processes_over_gloo(tmp_path: Path) -> None:
    compare(2, tmp_path, "adagrad", True, processes)


# ---------------------------------------------------------------- checkpoints

BEFORE, AFTER = 12, 6


def parts_for(world: int) -> Any:
    """The same global batches for any number of ranks."""
    batches = steps_of(2, BEFORE + AFTER, many=120)
    if world == 2:
        return batches
    none = tuple(x[:0] for x in batches[0][0])
    if world == 4:
        return [[parts[0], none, parts[1], none] for parts in batches]
    from dynamicranks import joined

    return [[joined(parts)] for parts in batches]


def saving(rank: int, world: int, path: Path) -> None:
    how = tiered(path / f"tiers of {world}", world)
    fast, opt = made(how=how, rows=world * IN_MEMORY)
    steps(fast, opt, parts_for(world)[:BEFORE], rank)
    below = sum(t.tier.below for t in recast.dynamic.tables(fast).values())
    assert below > 10 or world == 4  # the memory of four has room for all
    recast.checkpoint.save(path / "saved", fast, opt, step=BEFORE)


def loading(rank: int, world: int, path: Path) -> list[Tensor]:
    how = tiered(path / f"others of {world}", world)
    fast, opt = made(how=how, rows=world * IN_MEMORY, seed=9)
    steps(fast, opt, parts_for(world)[:2], rank)  # what it learns is dropped
    assert recast.checkpoint.load(path / "saved", fast, opt).step == BEFORE
    return steps(fast, opt, parts_for(world)[BEFORE:], rank)


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 4), *(pytest.param(*c, marks=pytest.mark.long) for c in ((1, 2), (4, 1), (4, 2)))],
)
def test_a_checkpoint_for_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    """Training goes on as in memory on one process."""
    fast, opt = made()  # 160 rows, all in memory
    wanted = steps(fast, opt, parts_for(1), 0)[BEFORE:]
    run(before, saving, before, tmp_path)
    results = run(after, loading, after, tmp_path)
    for k, want in enumerate(wanted):
        close(torch.cat([r[k] for r in results]), want)


# ---------------------------------------------------------------- what goes wrong


def test_one_rank_without_its_folder(tmp_path: Path) -> None:
    """All of them say so, and nobody waits."""
    (tmp_path / "rank-1" / "user").mkdir(parents=True)
    (tmp_path / "rank-1" / "user" / "mine").write_text("")

    def one(rank: int) -> str:
        with pytest.raises((UsageError, TierError)) as caught:
            made(how=tiered(tmp_path, 2), rows=2 * IN_MEMORY)
        return str(caught.value)

    said = run(2, one)
    assert "holds mine" in said[1] and said[0]


def test_a_disk_that_fills_up_at_one_rank(tmp_path: Path) -> None:
    """The error is the owner's by name, and the others' too: all compute one step together."""

    def one(rank: int) -> str:
        fast, opt = made(ADAGRAD, how=tiered(tmp_path, 2), rows=2 * IN_MEMORY)
        store = recast.dynamic.tables(fast)["user"].tier.store
        if rank == 1:
            store.budget, store._unchecked = 1, 1 << 30
        with pytest.raises((TierError, UsageError)) as caught:
            steps(fast, opt, steps_of(2, STEPS, many=120), rank)
        return str(caught.value)

    said = run(2, one)
    assert "of a budget of 1" in said[1] and "rank 1 could not look up what it was sent" in said[0]


def test_a_plan_for_more_ranks_than_run_makes_no_files(tmp_path: Path) -> None:
    fast, _ = made(how=tiered(tmp_path, 2), world_size=2)
    assert fast.plan.world_size == 2 and not any(tmp_path.iterdir())
    placement = fast.plan.placement("user.weight")
    assert [shard.size[0] for shard in placement.shards] == [IN_MEMORY, IN_MEMORY]
    with pytest.raises(UsageError, match="one of 4 shares, leaves no room for a row"):
        made(how=tiered(tmp_path, 1), world_size=4)
