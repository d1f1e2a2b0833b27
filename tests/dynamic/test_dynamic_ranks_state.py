"""Checkpoints and exports of dynamic tables over ranks: from any number of them to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dynamicranks import ADAGRAD, HOW, Make, joined, made, steps, steps_of
from harness import run
from torch import Tensor

import recast
from recast.errors import CheckpointError, UsageError
from recast.runtime.ranks import shards_state

BEFORE, AFTER = 6, 5
STEPS = steps_of(4, BEFORE + AFTER)
KINDS: dict[str, Make] = {
    "adagrad": ADAGRAD,
    "row-wise": lambda p: recast.optim.RowWiseAdagrad(p, lr=0.1),
}


def parts_for(world: int, batches: Any) -> Any:
    """The same global batches for another number of ranks: samples as they stand, in order."""
    if world == 4:
        return batches
    if world == 1:
        return [[joined(parts)] for parts in batches]
    return [[joined(parts[:2]), joined(parts[2:])] for parts in batches]


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def saving(rank: int, world: int, path: Path, kind: str) -> Any:
    fast, opt = made(KINDS[kind])
    batches = parts_for(world, STEPS)
    steps(fast, opt, batches[:BEFORE], rank)
    recast.checkpoint.save(path, fast, opt, step=BEFORE)
    return torch.cat(steps(fast, opt, batches[BEFORE:], rank)) if world == 1 else None


def loading(rank: int, world: int, path: Path, kind: str) -> Any:
    fast, opt = made(KINDS[kind], seed=9)  # other weights; what it learns is dropped too
    batches = parts_for(world, STEPS)
    steps(fast, opt, batches[:2], rank)
    assert recast.checkpoint.load(path, fast, opt).step == BEFORE
    outs = steps(fast, opt, batches[BEFORE:], rank)
    return outs, {n: len(t) for n, t in recast.dynamic.tables(fast).items()}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (1, 2, "adagrad"),
        pytest.param(2, 4, "adagrad", marks=pytest.mark.long),
        pytest.param(4, 1, "row-wise", marks=pytest.mark.long),
        pytest.param(4, 2, "row-wise", marks=pytest.mark.long),
        pytest.param(2, 2, "adagrad", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_for_other_ranks(
    before: int, after: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on as it would have on one process; read a few rows at a time."""
    monkeypatch.setattr(shards_state, "BLOCK", 7 * 8 * 8)
    wanted = saving(0, 1, tmp_path / "one", kind)
    run(before, saving, before, tmp_path / "many", kind)
    results = run(after, loading, after, tmp_path / "many", kind)
    got = [torch.cat([r[0][k] for r in results]) for k in range(AFTER)]
    same(torch.cat(got), wanted)
    fast, opt = made(KINDS[kind], seed=8)
    recast.checkpoint.load(tmp_path / "many", fast, opt)
    for name, table in recast.dynamic.tables(fast).items():
        assert len(table) <= sum(r[1][name] for r in results)
    one, many = (_manifest(tmp_path / name) for name in ("one", "many"))
    assert one == many, "names and shapes say nothing of the ranks"


def _manifest(path: Path) -> Any:
    import json

    found = json.loads((path / "manifest.json").read_text())
    return found["model"], found["optimizer"]


def gathering(rank: int, world: int) -> Any:
    fast, opt = made()
    batches = parts_for(world, STEPS)
    steps(fast, opt, batches[:2], rank)
    module = fast.items
    since = recast.dynamic.mark(module)
    before = recast.dynamic.export(module, ranks="all")
    recast.dynamic.tables(fast)["items"].erase(before.ids[:3])
    steps(fast, opt, batches[2:4], rank)
    own = recast.dynamic.export(module)
    at_first = recast.dynamic.export(module, ranks=0)
    news = recast.dynamic.changed(module, since, ranks="all")
    state = fast.full_state_dict(ranks="all")
    other, _ = made(seed=4)
    recast.dynamic.import_(other.items, at_first.ids, at_first.rows) if world == 1 else None
    return own, at_first, before, news, state


def test_exports_of_all_ranks() -> None:
    whole = gathering(0, 1)[0]
    results = run(2, gathering, 2)
    own, at_first, before, news, state = (list(column) for column in zip(*results, strict=True))
    assert sorted(torch.cat([o.ids for o in own]).tolist()) == whole.ids.tolist()
    assert torch.equal(at_first[0].ids, whole.ids) and not any(len(a.ids) for a in at_first[1:])
    same(at_first[0].rows, whole.rows)
    held = dict(zip(before[0].ids.tolist(), before[0].rows, strict=True))
    for change in news:  # a copy that takes the changes over has the table
        mine = {k: v for k, v in held.items() if k not in change.gone.tolist()}
        mine.update(zip(change.rows.ids.tolist(), change.rows.rows, strict=True))
        assert sorted(mine) == whole.ids.tolist()
        same(torch.stack([mine[k] for k in sorted(mine)]), whole.rows)
    one, _ = made(seed=7)
    one.load_state_dict(state[1])
    back = recast.dynamic.export(one.items)
    assert torch.equal(back.ids, whole.ids)
    same(back.rows, whole.rows)


def test_the_rows_of_all_ranks_need_all_ranks() -> None:
    """Not this rank's own in place of them, once the process group is gone."""

    def one_rank(rank: int) -> Any:
        fast, opt = made()
        steps(fast, opt, parts_for(2, STEPS)[:2], rank)
        return fast.items, recast.dynamic.mark(fast.items)

    items, since = run(2, one_rank)[0]
    assert len(recast.dynamic.export(items).ids)
    for to in (0, "all"):
        with pytest.raises(UsageError, match="spread over 2 ranks, and there is no process group"):
            recast.dynamic.export(items, ranks=to)
        with pytest.raises(UsageError, match="spread over 2 ranks, and there is no process group"):
            recast.dynamic.changed(items, since, ranks=to)


def importing(rank: int, ids: Tensor, rows: Tensor, state: Any) -> Any:
    fast, opt = made(seed=rank)
    recast.dynamic.import_(fast.items, ids, rows)
    imported = recast.dynamic.export(fast.items)
    fast.load_state_dict(state[0])
    opt.load_state_dict(state[1])
    return imported, recast.dynamic.export(fast.items), opt.state[fast.items.weight]["sum"][1:20]


def test_whole_state_and_plain_tables_come_in_by_parts() -> None:
    one, opt = made()
    steps(one, opt, parts_for(1, STEPS)[:3], 0)
    whole = recast.dynamic.export(one.items)
    state = one.state_dict(), opt.state_dict()
    results = run(2, importing, whole.ids, whole.rows, state)
    sums = opt.state[one.items.weight]["sum"]
    place = dict(zip(state[0]["items.ids"].tolist(), range(1, 1 + len(whole.ids)), strict=True))
    for k in (0, 1):
        ids = torch.cat([r[k].ids for r in results])
        assert sorted(ids.tolist()) == whole.ids.tolist()
        rows = torch.cat([r[k].rows for r in results])
        assert torch.equal(rows[ids.argsort()], whole.rows)
    for _, own, slab in results:
        rows = [place[i] for i in state[0]["items.ids"].tolist() if i in own.ids.tolist()]
        n = min(len(rows), 19)
        assert torch.equal(slab[:n], sums[rows[:n]])


def test_a_part_is_no_whole() -> None:
    """State of the optimizer for more rows than the model was given is an error on each rank."""

    def one_rank(rank: int) -> None:
        fast, opt = made()
        steps(fast, opt, parts_for(2, STEPS)[:2], rank)
        saved = opt.state_dict()
        _, other = made()
        with pytest.raises(CheckpointError, match=r"has .* rows, and 0 are stored"):
            other.load_state_dict(saved)

    run(2, one_rank)
    assert HOW
