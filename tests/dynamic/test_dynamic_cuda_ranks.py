"""Dynamic tables of GPUs over ranks, on the emulator: the numbers of one process, and back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import torch
from dynamicranks import ADAGRAD, Make, joined, made, steps, steps_of, twin
from harness import run
from torch import Tensor

import recast
from recast.errors import UsageError
from recast.runtime import tolerances
from recast.runtime.dynamic.cuda_batch import SLOTS, slots_for
from recast.runtime.dynamic.cuda_table import CudaTable
from recast.runtime.plan import Plan, Table, explicit

HOW = {
    "user": recast.Dynamic(max_rows=100, seed=5),
    "items": recast.Dynamic(max_rows=160, evict="lru", seed=5),
}


@pytest.fixture(autouse=True)
def gpu() -> Any:
    with emulated_gpu.serve() as emulated:
        yield emulated


def plan(world: int, how: Any = HOW) -> Plan:
    """As many rows as the tables have in buckets of equal size."""
    rows = {}
    for name, one in how.items():
        room = slots_for(one.max_rows) if one.evict is None else one.max_rows
        buckets = -(-room // SLOTS)
        rows[name] = buckets * (room // buckets)
    tables = [Table(f"{n}.weight", rows[n], 8, "float32", True) for n in how]
    return explicit([*tables, Table("day.weight", 7, 8)], world)


def spread(world: int, make: Make = ADAGRAD, how: Any = HOW, seed: int = 3) -> tuple[Any, Any]:
    options: dict[str, Any] = {} if world == 1 else {"plan": plan(world, how)}
    fast, opt = made(make, how, torch.float32, seed, **options)
    assert all(isinstance(t, CudaTable) for t in recast.dynamic.tables(fast).values())
    return fast, opt


def close(got: Tensor, plain: Tensor, judge: Tensor) -> None:
    assert tolerances.excess(got.detach(), plain.detach(), judge.detach()) <= tolerances.CHAIN


def one_rank(rank: int, world: int, make: Make, count: int) -> Any:
    fast, opt = spread(world, make)
    outs = steps(fast, opt, steps_of(world, count), rank)
    rows = {name: recast.dynamic.export(fast.get_submodule(name)) for name in HOW}
    return outs, rows, str(fast)


def twins(make: Make, batches: list[Any]) -> Any:
    """The plain model over ids numbered beforehand, in float32 and as the judge; their outputs."""
    plain, opt = twin(make, torch.float32)
    judge = copy.deepcopy(plain).double()
    outs = steps(plain, opt, batches), steps(judge, make(judge.parameters()), batches)
    return (plain, judge), list(zip(*outs, strict=True))


@pytest.mark.parametrize(
    ("kind", "world", "count"),
    [
        ("adagrad", 2, 2),
        pytest.param("adagrad", 4, 20, marks=pytest.mark.long),
        pytest.param("row-wise", 2, 20, marks=pytest.mark.long),
        pytest.param("sgd", 4, 20, marks=pytest.mark.long),
    ],
)
def test_steps_are_those_of_the_plain_model(kind: str, world: int, count: int, gpu: Any) -> None:
    make: Make = {
        "adagrad": ADAGRAD,
        "row-wise": lambda p: recast.optim.RowWiseAdagrad(p, lr=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    }[kind]
    (plain, judge), outs = twins(make, steps_of(world, count))
    gpu.launched.clear()
    results = run(world, one_rank, world, make, count)
    assert {"id_probe", "id_insert", "id_advance"} <= set(gpu.launched)
    for k in range(count):
        close(torch.cat([r[0][k] for r in results]), *outs[k])
    for name in HOW:
        ids = torch.cat([r[1][name].ids for r in results])
        assert len(ids.unique()) == len(ids) > 8, "every id is at one rank"
        for _, rows, text in results:
            own = rows[name]
            assert 0 < len(own.ids) < len(ids) and "find_rows" in text and "wait_rows" in text
            close(own.rows, plain.rows(name, own.ids), judge.rows(name, own.ids))


BEFORE, AFTER = 3, 2
STEPS = steps_of(4, BEFORE + AFTER)


def parts_for(world: int, batches: Any) -> Any:
    """The same global batches for another number of ranks."""
    if world == 4:
        return batches
    if world == 1:
        return [[joined(parts)] for parts in batches]
    return [[joined(parts[:2]), joined(parts[2:])] for parts in batches]


def saving(rank: int, world: int, path: Path) -> Any:
    fast, opt = spread(world)
    steps(fast, opt, parts_for(world, STEPS[:BEFORE]), rank)
    recast.checkpoint.save(path, fast, opt, step=BEFORE)
    everything = recast.dynamic.export(fast.items, ranks="all")
    state = fast.full_state_dict(ranks="all")
    assert sorted(state["items.ids"].tolist()) == everything.ids.tolist()
    return everything


def loading(rank: int, world: int, path: Path) -> Any:
    fast, opt = spread(world, seed=9)  # other weights; what it learns is dropped too
    steps(fast, opt, parts_for(world, STEPS[:1]), rank)
    assert recast.checkpoint.load(path, fast, opt).step == BEFORE
    loaded = recast.dynamic.export(fast.items, ranks="all")
    return steps(fast, opt, parts_for(world, STEPS[BEFORE:]), rank), loaded


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(2, 4, marks=pytest.mark.long),
        pytest.param(4, 2, marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_for_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    """Training goes on as it would have on one process."""
    _, outs = twins(ADAGRAD, parts_for(1, STEPS))
    saved = run(before, saving, before, tmp_path / "rows")
    results = run(after, loading, after, tmp_path / "rows")
    for k in range(AFTER):
        close(torch.cat([r[0][k] for r in results]), *outs[BEFORE + k])
    for rows in (*saved, *(r[1] for r in results)):
        assert torch.equal(rows.ids, saved[0].ids) and torch.equal(rows.rows, saved[0].rows)
    with emulated_gpu.nobody():  # and the tables of the host
        host, opt = made(ADAGRAD, HOW, torch.float32, seed=9)
        recast.checkpoint.load(tmp_path / "rows", host, opt)
        assert torch.equal(recast.dynamic.export(host.items).rows, saved[0].rows)
        close(steps(host, opt, parts_for(1, STEPS[BEFORE:]))[0], *outs[BEFORE])


def counting(rank: int, world: int) -> Any:
    """Every new id comes twice before it is stored, and many find no room."""
    how = {
        "user": recast.Dynamic(max_rows=100, evict="lfu", seed=5, admit=recast.MinCount(2)),
        "items": recast.Dynamic(max_rows=8, evict="lru", seed=5),
    }
    fast, opt = spread(world, how=how)
    steps(fast, opt, parts_for(world, STEPS[:3]), rank)
    tables = recast.dynamic.tables(fast)
    ids, counts, _ = tables["user"].candidates()
    seen = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    return seen, tables["user"].ids().tolist(), tables["items"].counters(), len(tables["items"])


def test_counts_and_eviction_are_those_of_the_owner() -> None:
    one, *_ = run(1, counting, 1)
    many = run(2, counting, 2)
    assert one[0] == many[0][0] | many[1][0] != {}
    assert sorted(one[1]) == sorted(many[0][1] + many[1][1]) != []
    for _, _, counters, rows in many:
        assert counters["evicted"] > 0 and rows <= 4


def test_a_full_part_is_told_to_all_ranks() -> None:
    how = {"user": recast.Dynamic(max_rows=1, seed=5), "items": HOW["items"]}

    def one_rank(rank: int) -> Any:
        fast, opt = spread(2, how=how)
        room = recast.dynamic.tables(fast)["user"].capacity
        stuck = torch.arange(4 * room) if rank == 0 else torch.arange(8)
        batch = stuck, torch.zeros(1).long(), torch.zeros(len(stuck)).long(), stuck % 7
        with pytest.raises(UsageError, match=r"found no row|could not look up"):
            for _ in range(3):
                steps(fast, opt, [[batch, batch]], rank)

    run(2, one_rank)
