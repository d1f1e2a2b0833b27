"""Records in memory and on disk, against a dict: none is lost, duplicated or out of date."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recast.errors import TierError, UsageError
from recast.runtime import device
from recast.runtime.tiers import records as form
from recast.runtime.tiers.host import DISK, MEMORY, HostRows, slabs
from recast.runtime.tiers.store import Store, rows_in
from recast.runtime.tiers.tier import Tier

pytest.importorskip("rocksdict")

SIZE = form.HEADER + 12  # not a multiple of eight bytes
BUDGET = 1 << 18 | 1 << 13


def made(path: Path | None, rows: int = 24, policy: str = "lru", evicts: bool = True) -> HostRows:
    index = device.extension().IdTable(rows, 1, policy, 1, 0)
    disk = None
    if path is not None:
        kind = form.layout({"record": torch.zeros(1, SIZE, dtype=torch.uint8)})
        make = partial(Store, path / "t", "t", kind.size, BUDGET, 1 << 16)
        below = rows_in(BUDGET, kind.size)
        drops = policy if evicts else "never"
        disk = Tier("t", index, rows, kind, slabs, below, drops, 0, False, make)
    return HostRows("t", index, rows, SIZE, disk, policy, evicts)


def records(scores: list[int], halved: int = 0) -> Any:
    n = len(scores)
    block = np.random.default_rng(n).integers(0, 256, (n, SIZE)).astype(np.uint8)
    form.write_known(block, np.array([scores, range(n), [halved] * n], np.int64))
    return block


def batch(rng: random.Random, of: set[int], n: int) -> Any:
    return np.array(sorted(rng.sample(sorted(of), min(n, len(of)))), np.int64)


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_against_a_dict(seed: int, on_disk: bool, tmp_path: Path) -> None:
    store = made(tmp_path if on_disk else None)
    rng, held = random.Random(seed), dict[int, bytes]()
    everyone = {rng.randrange(-(2**62), 2**62) for _ in range(40 if on_disk else 20)}
    if on_disk:
        assert store.capacity > 40
    early = 0
    for k in range(120):
        below = set(held)
        match rng.randrange(6):
            case 0 | 1:  # some come down
                ids = batch(rng, everyone - below, rng.randrange(1, 9))
                block = records([rng.randrange(99) for _ in ids])
                store.reserve(len(ids), ids[:0])
                store.add(ids, block)
                held |= {int(i): r.tobytes() for i, r in zip(ids, block, strict=True)}
            case 2:  # some go up
                ids = batch(rng, below, rng.randrange(9))
                store.remove(ids)
                for i in ids:
                    del held[int(i)]
            case 3:
                ids = batch(rng, everyone, rng.randrange(9))
                store.ahead(lambda ids=ids: ids)  # type: ignore[misc]
            case 4:  # in place
                ids = batch(rng, below, 3)
                block = records([k] * len(ids))
                rng.shuffle(order := list(range(len(ids))))
                store.write(ids[order], block[order])
                held |= {int(i): r.tobytes() for i, r in zip(ids, block, strict=True)}
            case 5:
                ids = batch(rng, everyone, 12)
                where, got = store.fetch(ids)
                assert [int(i) in held for i in ids] == (where > 0).tolist()
                for i, r in zip(ids[where > 0], got, strict=True):
                    assert held[int(i)] == r.tobytes()
        assert len(store) == len(held) and store.dropped == 0
        early = max(early, store.early)
    every = {
        int(i): r.tobytes() for ids, got in store.scan() for i, r in zip(ids, got, strict=True)
    }
    assert every == held and early > 5
    assert not on_disk or (store.disk is not None and store.disk.demoted > 5)
    store.clear()
    assert len(store) == 0 and not store.fetch(np.array(sorted(held)))[0].any()
    store.close()


def test_those_with_the_lowest_score_go_to_disk_and_then_for_good(tmp_path: Path) -> None:
    store = made(tmp_path, rows=10, policy="lfu")
    room = store.capacity
    for k in range(0, room, 5):  # the first have the highest counts
        ids = np.arange(k, min(k + 5, room))
        store.reserve(len(ids), ids[:0])
        store.add(ids, records([10_000 - int(i) for i in ids]))
    where, _ = store.fetch(np.arange(room))
    assert (where[:5] == MEMORY).all() and (where > 0).all() and (where == DISK).sum() == room - 10
    kept = np.arange(room - 4, room)  # they are about to go up
    store.reserve(6, kept)
    assert store.dropped >= 6 and len(store) == room - store.dropped
    assert (store.fetch(kept)[0] > 0).all() and (store.fetch(np.arange(5))[0] > 0).all()
    store.close()


def test_counts_are_halved(tmp_path: Path) -> None:
    store = made(None, rows=10, policy="lfu")
    store.add(np.arange(4), records([9, 8, 4, 2]))
    store.age()
    store.add(np.arange(4, 6), records([3, 3], halved=1))
    known = form.known(store.fetch(np.arange(6))[1])
    assert store.scores(known).tolist() == [4, 4, 2, 1, 3, 3]
    assert store.index.stored(0, lambda n: torch.empty(n, dtype=torch.int64))[2].tolist() == [
        4, 4, 2, 1, 3, 3
    ]  # fmt: skip
    store.close()


@pytest.mark.parametrize("evicts", [False, True])
def test_more_than_there_is_room_for(evicts: bool, tmp_path: Path) -> None:
    store = made(None, rows=10, evicts=evicts)
    store.add(np.arange(8), records([1] * 8))
    with pytest.raises(UsageError, match=r"rows have to go down, and of 10 there 8 are taken"):
        store.reserve(11 if evicts else 3, np.arange(0))
    assert len(store) == 8 and (store.fetch(np.arange(8))[0] == MEMORY).all()
    store.close()


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads is told, nothing moves, and all is there when there is room again."""
    store, real = made(tmp_path, rows=4), os.statvfs
    block = records(list(range(12)))
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096) + (0,) * 8))
    for k in range(0, 12, 4):
        store.add(np.arange(k, k + 4), block[k : k + 4])
    store.ahead(lambda: np.arange(12))
    for _ in range(2):
        with pytest.raises(TierError, match=r"less than .* bytes are free"):
            store.fetch(np.arange(12))
        with pytest.raises(TierError, match=r"less than .* bytes are free"):
            store.remove(np.arange(2, 10))
    monkeypatch.setattr(os, "statvfs", real)
    where, got = store.fetch(np.arange(12))
    assert (where[:8] == DISK).all() and (where[8:] == MEMORY).all() and len(store) == 12
    assert np.array_equal(got, block)
    store.remove(np.arange(2, 10))
    assert len(store) == 4
    store.close()
