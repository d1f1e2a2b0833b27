"""The id table against a dict that does the same slowly; its order, its evictions, its threads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from recast.runtime import device
from recast.runtime.dynamic.table import empty
from recast.runtime.ranks import initial_rows


def made(
    capacity: int, evict: str = "lru", admit: int = 1, ttl: int = 0, guests: int = 10**5
) -> Any:
    extension = device.extension()
    if extension is None:
        pytest.skip("no C++ kernels")
    return extension.IdTable(capacity, guests, evict, admit, ttl)


def insert(table: Any, ids: Tensor, scores: Tensor | None = None, threads: int = 1) -> Tensor:
    rows = empty(len(ids))
    assert table.find_or_insert(ids, scores, rows, threads) is None
    table.take_fresh(empty), table.take_gone(empty)
    return rows


def find(table: Any, ids: Tensor, threads: int = 1) -> Tensor:
    rows = empty(len(ids))
    table.find(ids, rows, threads)
    return rows


class Slow:
    """What the table should do, with dicts: ``rows[id] = [row, score, stamp]``."""

    def __init__(self, capacity: int, evict: str, admit: int, ttl: int) -> None:
        self.capacity, self.evict, self.admit, self.ttl = capacity, evict, admit, ttl
        self.rows: dict[int, list[Any]] = {}
        self.counts: dict[int, int] = {}
        self.step = 1

    def expired(self, id_: int) -> bool:
        return self.ttl > 0 and self.rows[id_][2] + self.ttl < self.step

    def find(self, id_: int) -> int:
        return self.rows[id_][0] if id_ in self.rows and not self.expired(id_) else -1

    def insert(self, ids: list[int], scores: list[int] | None, got: list[int]) -> None:
        missing = [k for k, i in enumerate(ids) if i not in self.rows or self.expired(i)]
        for k, i in enumerate(ids):
            if k not in missing:
                self.rows[i][2] = self.step
        for k in missing:
            self.counts[ids[k]] = self.counts.get(ids[k], 0) + 1
        for k in sorted(missing, key=lambda k: -scores[k]) if scores else missing:
            self.give(ids[k], scores[k] if scores else 0)
        for k, i in enumerate(ids):
            if i not in self.rows:
                assert got[k] > self.capacity
                continue
            row = self.rows[i]
            row[0] = row[0] or got[k]
            assert row[0] == got[k] <= self.capacity
            row[1:] = self.score(row[1], scores[k] if scores else 0), self.step

    def score(self, before: int, given: int) -> int:
        return {"lru": self.step, "given": given}.get(self.evict, before + 1)

    def give(self, id_: int, score: int) -> None:
        if id_ in self.rows:
            if not self.expired(id_):
                return
            del self.rows[id_]
        if self.counts[id_] < self.admit:
            return
        if len(self.rows) == self.capacity:
            for other in [i for i in self.rows if self.expired(i)]:
                del self.rows[other]
        if len(self.rows) == self.capacity:
            ranks = [(r[1], r[2], i) for i, r in self.rows.items() if r[2] != self.step]
            if not ranks or (self.evict == "given" and score < min(ranks)[0]):
                return
            del self.rows[min(ranks)[2]]
        self.rows[id_] = [0, score, self.step]
        self.counts.pop(id_)


@pytest.mark.parametrize("evict", ["lru", "epoch_lfu", "given"])
@pytest.mark.parametrize("admit", [1, 3])
@pytest.mark.parametrize("ttl", [0, 2])
def test_against_dicts(evict: str, admit: int, ttl: int) -> None:
    for seed in range(9):
        r = random.Random(seed)
        capacity = (3, 10, 25)[seed % 3]
        table, slow = made(capacity, evict, admit, ttl), Slow(capacity, evict, admit, ttl)
        ids_of = [r.randrange(-(2**63), 2**63) for _ in range(58)] + [0, -1]
        for _ in range(40):
            ids = [r.choice(ids_of) for _ in range(r.choice([0, 1, 5, 40]))]
            scores = [i % 101 - 50 for i in ids] if evict == "given" else None
            given = None if scores is None else torch.tensor(scores, dtype=torch.int64)
            rows = insert(table, torch.tensor(ids, dtype=torch.int64), given, 1 + seed % 2)
            slow.insert(ids, scores, rows.tolist())
            live = {i: r for i, r in slow.rows.items() if not slow.expired(i)}
            stored = [column.tolist() for column in table.stored(0, empty)]
            assert stored[1] == sorted(stored[1])
            got = {i: [r, c, s] for i, r, c, s in zip(*stored, strict=True)}
            assert got == live
            if r.random() < 0.5:
                table.advance()
                slow.step += 1
            here = [i for i in slow.rows if not slow.expired(i)]
            if r.random() < 0.1 and here:
                gone = r.choice(here)
                del slow.rows[gone]
                assert table.erase(torch.tensor([gone])) == 1
            ask = [r.choice(ids_of) for _ in range(20)]
            assert find(table, torch.tensor(ask)).tolist() == [slow.find(i) for i in ask]


@pytest.mark.parametrize("evict", ["lru", "lfu", "given", "never"])
def test_rows_do_not_depend_on_threads(evict: str) -> None:
    tables = [made(40_000 if evict != "never" else 10**6, evict) for _ in range(3)]
    for k in range(6):
        g = torch.Generator().manual_seed(k)
        ids = torch.randint(90_000, (50_000,), generator=g).pow(3)
        scores = ids.remainder(1013) if evict == "given" else None
        rows = [insert(t, ids, scores, n) for t, n in zip(tables, (1, 2, 7), strict=True)]
        assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
        for t in tables:
            t.advance()
    first = tables[0].stored(0, empty)
    for t in tables[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, t.stored(0, empty), strict=True))
    assert torch.equal(find(tables[0], ids, 1), find(tables[1], ids, 5))


def test_many_ids_come_and_go() -> None:
    """Growth, erasing, and a search that ends: half of the ids go, the others stay in place."""
    table = made(300_000, "never")
    ids = torch.arange(300_000) * 2**33 - 2**62
    rows = insert(table, ids)
    assert torch.equal(rows, torch.arange(1, 300_001))
    assert table.erase(ids[::2].contiguous()) == 150_000 == len(table)
    assert torch.equal(find(table, ids)[1::2], rows[1::2])
    assert (find(table, ids)[::2] == -1).all()
    more = ids[:150_000] + 1
    assert torch.equal(insert(table, more).sort().values, rows[::2])
    full = table.find_or_insert(torch.tensor([1, 2]), None, empty(2), 1)
    assert full == (1, False) and len(table) == 300_000
    assert torch.equal(find(table, ids)[1::2], rows[1::2])


def test_ids_that_wait_are_forgotten_before_they_fill_memory() -> None:
    table = made(1000, admit=2)
    for k in range(40):
        insert(table, torch.arange(k * 10_000, (k + 1) * 10_000))
        table.advance()
    assert len(table) == 0
    assert len(table.candidates(empty)[0]) <= 140_000
    insert(table, torch.arange(399_000, 399_500))  # seen in the last step
    assert len(table) == 500


# ---------------------------------------------------------------- what is kept


def test_the_best_ids_are_kept_at_full_load() -> None:
    """Twelve rounds of new ids at full load: at least 96.4 % of the best scored ever are stored.

    That is the bar of HierarchicalKV's own test; here rows are compared over the whole table, so
    all are.
    """
    capacity = 40_000
    table = made(capacity, "given")
    seen: list[Tensor] = []
    for k in range(12):
        g = torch.Generator().manual_seed(k)
        for part in torch.randint(-(2**62), 2**62, (capacity,), generator=g).split(4096):
            insert(table, part, part >> 3)
            table.advance()
            seen.append(part)
    best = torch.cat(seen).unique().sort(descending=True).values[:capacity]
    kept = (find(table, best) > 0).double().mean()
    assert len(table) == capacity
    assert kept >= 0.964, float(kept)


def zipf(g: torch.Generator, n: int, ids: int) -> Tensor:
    """Ranks from 0; the probability of k is proportional to 1 / (k + 1)."""
    return torch.exp(torch.rand(n, generator=g) * torch.log(torch.tensor(ids + 1.0))).long() - 1


def hit_rates(evict: str, drift: int) -> tuple[float, float]:
    """The table's, and that of a cache which always holds the most probable ids."""
    table, capacity, many = made(2000, evict), 2000, 50_000
    hits = ideal = asked = 0
    g = torch.Generator().manual_seed(0)
    for k in range(300):
        rank = zipf(g, 1000, many)
        ids = (rank + drift * k) * 7919
        if k >= 100:
            hits += int((find(table, ids) > 0).sum())
            ideal += int((rank < capacity).sum())
            asked += len(ids)
        insert(table, ids)
        table.advance()
        if evict == "epoch_lfu" and k % 20 == 19:
            table.epoch += 1
    return hits / asked, ideal / asked


@pytest.mark.parametrize(
    ("evict", "drift", "share"),
    [("lfu", 0, 0.91), ("lfu", 2, 0.89), ("lru", 2, 0.83), ("epoch_lfu", 2, 0.87)],
)
def test_the_hot_ids_are_kept_under_drifting_skew(evict: str, drift: int, share: float) -> None:
    """``share``: of the hit rate of an ideal cache."""
    got, ideal = hit_rates(evict, drift)
    assert got >= share * ideal, (got, ideal)


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_the_kernel_of_initial_rows(kind: Any) -> None:
    """Bit for bit what plain torch gives, for a slab whose rows are not contiguous."""
    extension = device.extension()
    if extension is None:
        pytest.skip("no C++ kernels")
    ids = torch.randint(-(2**62), 2**62, (3000,), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([ids, torch.tensor([0, -1, 2**63 - 1, -(2**63)])])
    rows = torch.randperm(len(ids)) + 3
    for dim in (1, 3, 4, 17):
        want = initial_rows.rows(ids, dim, seed=3, name="a.b", kind=kind, a=-0.3, b=0.7)
        slab = torch.full((len(ids) + 5, dim + 2), 9.0)
        key = initial_rows._key(3, "a.b")
        extension.initial_rows(ids, rows, slab[:, :dim], *key, kind == "uniform", -0.3, 0.7, 2)
        assert torch.equal(slab[rows, :dim], want)
        assert (slab[:3] == 9).all() and (slab[:, dim:] == 9).all()


def test_steps_beyond_32_bits_keep_their_order() -> None:
    """Stamps have 32 bits, and count from a step that moves up with time."""
    table = made(4, "lru", ttl=2**31 - 3)
    for step, id_ in ((1, 10), (2**31, 11), (2**32 + 5, 12), (2**33, 13)):
        table.step = step
        insert(table, torch.tensor([id_]))
    ids, _, _, stamps = table.stored(0, empty)
    assert ids.tolist() == [13]  # the others' time to live is over
    assert stamps.tolist() == [2**33]
    lasting = made(4, "lru")
    lasting.step = 2**33
    old = torch.tensor([2**33 - 3, 2**33 - 1, 7, 2**33 - 2])
    ids = torch.tensor([1, 2, 3, 4])
    lasting.load(ids, ids, old, old)
    lasting.step = 2**33
    assert lasting.stored(0, empty)[3].tolist() == [
        2**33 - 3, 2**33 - 1, 2**33 - 2**31 + 1, 2**33 - 2,
    ]  # fmt: skip
    for new, gone in ((5, 3), (6, 1), (7, 4), (8, 2)):
        insert(lasting, torch.tensor([new]))
        assert find(lasting, torch.tensor([gone])).tolist() == [-1]
        assert (find(lasting, torch.tensor([new])) > 0).all()


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_instruction_set_finds_the_same(isa: str) -> None:
    """Full buckets, ids past their bucket, and ids that were there and are gone, 0 among them."""
    extension = device.extension()
    if extension is None or not extension.has_isa(isa):
        pytest.skip(f"no {isa}")
    before = extension.isa()
    rng = random.Random(3)
    known = [0, -1, -(2**63), 2**63 - 1] + [rng.getrandbits(64) - 2**63 for _ in range(5000)]
    try:
        extension.set_isa(isa)
        table, there = made(len(known)), dict[int, int]()
        for _ in range(12):
            chosen = torch.tensor(rng.sample(known, 1500))
            there.update(zip(chosen.tolist(), insert(table, chosen).tolist(), strict=True))
            gone = rng.sample(sorted(there), 400)
            table.erase(torch.tensor(gone)), table.take_gone(empty)
            for id_ in gone:
                del there[id_]
            asked = torch.tensor(known)
            assert find(table, asked).tolist() == [there.get(x, -1) for x in known]
    finally:
        extension.set_isa(before)
