"""Grouped lookups on the emulator against plain torch, with float64 as the judge."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import simt_build
import torch
from torch import Tensor

from recast.runtime.embedding.call import MODES
from recast.runtime.embedding.embedding_bags import embedding_bags
from recast.runtime.tolerances import excess

SOURCE = simt_build.CUDA / "embedding_forward.cu"
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WIDE_IDS, WIDE_OFFSETS, ALIGNED_OUT = 1, 2, 4
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Class:
    """What the macros of embedding_forward.cu say."""

    table: torch.dtype = F32
    out: torch.dtype = F32
    vec: int = 4
    lanes: int = 4
    chunks: int = 1
    bags: int = 1
    long: int = 12
    block: int = 64
    rounds: int = 1

    def kernels(self, pools_max: bool = False) -> simt_build.Kernels:
        defines = {
            "RECAST_TABLE": CODES[self.table],
            "RECAST_OUT": CODES[self.out],
            "RECAST_VEC": self.vec,
            "RECAST_LANES": self.lanes,
            "RECAST_CHUNKS": self.chunks,
            "RECAST_BAGS": self.bags,
            "RECAST_LONG": self.long,
            "RECAST_BLOCK": self.block,
            "RECAST_MAX": int(pools_max),
        }
        return simt_build.kernels(SOURCE, defines=defines)


CLASSES = {
    "fp32": Class(),
    "fp32 by one": Class(vec=1, lanes=8, chunks=2, long=0),
    "fp16": Class(table=F16, vec=8, lanes=1, bags=4),
    "bf16 by warps": Class(table=BF16, out=BF16, vec=2, lanes=32, bags=4, block=128),
    "fp32 to bf16": Class(out=BF16, lanes=2, chunks=4, long=5),
    "fp32 of two bags": Class(chunks=2, bags=2, long=0),
    "fp32 in rounds": Class(lanes=32, bags=4, rounds=8),
    "fp16 in rounds": Class(table=F16, out=BF16, vec=8, lanes=8, bags=2, rounds=4, block=128),
}


@dataclass
class Lookup:
    """One lookup as the user has it."""

    table: Tensor
    ids: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    mode: str = "sum"
    padding: int | None = None
    last: bool = False
    odd_out: bool = False  # the output lies where a vector store cannot write
    out: Tensor = field(init=False)
    winner: Tensor = field(init=False)

    def bags(self) -> int:
        if self.mode == "none":
            return self.ids.numel()
        return self.ids.shape[0] if self.offsets is None else len(self.offsets) - self.last

    def allocate(self, dtype: torch.dtype) -> None:
        """Outputs inside something wider, so that rows are apart; what is around must stay."""
        wide = torch.full((self.bags(), self.table.shape[1] + 16), -7.0, dtype=dtype)
        first = 3 if self.odd_out else 8
        self.around = wide
        self.out = wide[:, first : first + self.table.shape[1]]
        self.winner = torch.full((self.bags(), self.table.shape[1]), -5)

    def fields(self, first_block: int, number: int) -> list[int]:
        offsets, weights, pooled = self.offsets, self.weights, self.mode != "none"
        flags = WIDE_IDS * (self.ids.dtype == torch.int64) + ALIGNED_OUT * (not self.odd_out)
        if offsets is not None:
            flags += WIDE_OFFSETS * (offsets.dtype == torch.int64)
        padding = self.padding if pooled and self.padding is not None else -1
        return [
            self.table.data_ptr(), *self.table.shape, self.table.stride(0),
            self.ids.data_ptr(), self.ids.numel(),
            0 if offsets is None else offsets.data_ptr(), 0 if offsets is None else len(offsets),
            self.ids.shape[1] if pooled and offsets is None else 1,
            0 if weights is None else weights.data_ptr(),
            self.bags(), MODES[self.mode], padding, flags,
            self.out.data_ptr(), self.out.stride(0), self.winner.data_ptr(), first_block,
            number,
        ]  # fmt: skip

    def reference(self, dtype: torch.dtype) -> Tensor:
        weights = None if self.weights is None else self.weights.to(dtype)
        (found,) = embedding_bags.reference(
            [self.table.to(dtype)], [self.ids], [self.offsets], [weights], [0], [self.mode],
            [self.padding], [self.last], [False],
        )  # fmt: skip
        return found.reshape(self.bags(), self.table.shape[1])


def run(of: Class, lookups: list[Lookup], seed: int = 0, workers: int = 1) -> list[int]:
    """One launch of all lookups; what was wrong with their ids and offsets."""
    groups, rows, blocks = of.block // of.lanes * of.bags * of.rounds, [], 0
    for lookup in lookups:
        lookup.allocate(of.out)
        rows.append(lookup.fields(blocks, len(rows)))
        blocks += max(1, -(-lookup.bags() // groups))
    errors = torch.zeros(4, dtype=torch.int64)
    of.kernels(lookups[0].mode == "max").launch(
        "embedding_forward", blocks, of.block, 0, torch.tensor(rows), len(rows), errors, of.rounds,
        seed=seed, workers=workers,
    )  # fmt: skip
    for lookup in lookups:
        width = lookup.table.shape[1]
        first = lookup.out.storage_offset()
        assert (lookup.around[:, :first] == -7).all()
        assert (lookup.around[:, first + width :] == -7).all()
    return errors.tolist()


def lookups(of: Class, modes: tuple[str, ...], seed: int) -> list[Lookup]:
    """Mixed dims, widths of ids, strides, empty and long bags, one row, padding, weights."""
    g = torch.Generator().manual_seed(seed)

    def table(rows: int, dim: int, spare: int = 0) -> Tensor:
        whole = torch.randn(rows, (dim + spare) * of.vec, generator=g).to(of.table)
        return whole[:, spare * of.vec :]

    def ids(rows: int, *shape: int, wide: bool = True) -> Tensor:
        dtype = torch.int64 if wide else torch.int32
        return torch.randint(0, rows, shape, generator=g).to(dtype)

    starts = torch.tensor([0, 0, 1, 3, 3, 8, 40])
    ends = torch.tensor([0, 0, 2, 17, 17, 50], dtype=torch.int32)
    found = []
    for mode in modes:
        if mode == "none":
            found += [
                Lookup(table(11, 3), ids(11, 7, 3, wide=False), mode=mode),
                Lookup(table(5, 5), ids(5, 37), mode=mode, padding=2, odd_out=True),
                Lookup(table(5, 2), ids(5, 0), mode=mode),
            ]
            continue
        found += [
            Lookup(table(13, 1), ids(13, 50), starts, mode=mode),
            Lookup(table(3, 5), ids(3, 50, wide=False), ends, mode=mode, padding=1, last=True),
            Lookup(table(1, 2), ids(1, 4, 3), mode=mode, odd_out=True),
            Lookup(table(40, 9, 1), ids(40, 33, 4, wide=False), mode=mode),
            Lookup(table(7, 3), ids(7, 3, 1), mode=mode, padding=0),
            Lookup(table(2, 4), ids(2, 5, 60), mode=mode),
            Lookup(table(2, 4), ids(2, 0), starts[:3] * 0, mode=mode),
        ]
    if "sum" in modes:
        factors = torch.randn(50, generator=g).to(of.table)
        found += [
            Lookup(table(13, 3), ids(13, 50), starts, weights=factors, padding=4),
            Lookup(table(9, 2), ids(9, 25, 2), weights=factors.reshape(25, 2)),
        ]
    return found


def singles(of: Class) -> list[Lookup]:
    """Bags of one id at most, wider and narrower than a walk, over the end of the last block."""
    g = torch.Generator().manual_seed(8)

    def table(rows: int, dim: int) -> Tensor:
        return torch.randn(rows, dim * of.vec, generator=g).to(of.table)

    def pick(rows: int, *shape: int) -> Tensor:
        return torch.randint(0, rows, shape, generator=g)

    some = torch.rand(77, generator=g) < 0.7
    starts = some.cumsum(0) - some.long()
    factors = torch.randn(150, generator=g).to(of.table)
    return [
        Lookup(table(13, 5), pick(13, 300, 1)),
        Lookup(table(7, 13), pick(7, 90, 1), mode="mean", padding=3),
        Lookup(table(9, 2), pick(9, int(some.sum())), starts, odd_out=True),
        Lookup(table(9, 4), pick(9, 150, 1).int(), weights=factors.reshape(150, 1)),
        Lookup(table(1, 3), pick(1, 41), mode="none"),
        Lookup(table(5, 3), pick(5, 1, 1)),
    ]


def check(of: Class, found: list[Lookup]) -> None:
    for lookup in found:
        plain = lookup.reference(of.table).to(of.out)
        truth = lookup.reference(torch.float64)
        scale = float(lookup.table.abs().max())
        assert excess(lookup.out, plain, truth, scale=scale) <= 1, lookup


@pytest.mark.parametrize("name", CLASSES)
def test_sums_means_and_gathers(name: str) -> None:
    of = CLASSES[name]
    found = lookups(of, ("none", "sum", "mean"), 3)
    assert run(of, found) == [0, 0, 0, 0]
    check(of, found)


@pytest.mark.parametrize(
    "name",
    ["fp32", "fp16", "bf16 by warps", "fp32 of two bags", "fp32 in rounds", "fp16 in rounds"],
)
def test_one_id_a_bag(name: str) -> None:
    """Bit for bit what a group of one bag gives, whose sums the test above judges."""
    of = CLASSES[name]
    found, alone = singles(of), singles(of)
    assert run(of, found) == run(replace(of, bags=1, rounds=1), alone) == [0, 0, 0, 0]
    check(of, found)
    assert all(torch.equal(a.out, b.out) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("name", ["fp32", "bf16 by warps"])
def test_maxima_and_where_they_are(name: str) -> None:
    of = CLASSES[name]
    found = lookups(of, ("max",), 4)
    assert run(of, found) == [0, 0, 0, 0]
    for lookup in found:
        assert torch.equal(lookup.out, lookup.reference(of.table).to(of.out))
        none = lookup.table.new_zeros(1, lookup.table.shape[1])
        rows = torch.cat([lookup.table[lookup.ids.reshape(-1).long()], none])
        assert torch.equal(rows.gather(0, lookup.winner).to(of.out), lookup.out)


def test_the_first_of_equal_rows_and_nan_only_when_first() -> None:
    nan = float("nan")
    table = torch.tensor([[1.0, nan, 2, 0], [1.0, 3, nan, 0], [0.0, 5, 1, -1.0]])
    lookup = Lookup(table, torch.tensor([[2, 1, 0, 1], [0, 1, 2, 2]]), mode="max")
    run(CLASSES["fp32"], [lookup])
    assert lookup.winner.tolist() == [[1, 0, 2, 1], [4, 4, 4, 4]]
    assert torch.equal(lookup.out.isnan(), torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]]).bool())


def test_gathers_are_exact() -> None:
    found = lookups(CLASSES["fp32"], ("none",), 5)
    run(CLASSES["fp32"], found)
    for lookup in found:
        assert torch.equal(lookup.out, lookup.reference(F32))


@pytest.mark.parametrize("count", [1, 2, 32, 33, 70, 1060])
def test_every_block_finds_its_lookup(count: int) -> None:
    """However many there are; some have no bags, some more than one block of them."""
    g = torch.Generator().manual_seed(count)
    tables = [torch.randn(5, 4, generator=g) for _ in range(7)]
    ids = [torch.randint(0, 5, (bags,), generator=g) for bags in (0, 3, 17, 50)]
    found = [Lookup(tables[k % 7], ids[k % 4], mode="none") for k in range(count)]
    run(CLASSES["fp32"], found)
    for lookup in found:
        assert torch.equal(lookup.out, lookup.table[lookup.ids])


@pytest.mark.parametrize("name", ["fp32", "fp32 by one"])
def test_results_do_not_depend_on_the_order_of_blocks(name: str) -> None:
    of = CLASSES[name]
    first = lookups(of, ("none", "sum", "mean"), 6)
    run(of, first)
    for seed in (1, 2):
        again = lookups(of, ("none", "sum", "mean"), 6)
        run(of, again, seed=seed, workers=2)
        assert all(torch.equal(a.out, b.out) for a, b in zip(first, again, strict=True))


def decode(word: int) -> tuple[int, int]:
    """Lookup and place of the first error."""
    return ~word >> 40, ~word & ((1 << 40) - 1)


@pytest.mark.parametrize("name", ["fp32 of two bags", "fp32 in rounds"])
@pytest.mark.parametrize("mixed", [False, True])
def test_ids_outside_the_table_where_bags_have_one(name: str, mixed: bool) -> None:
    """Each is reported once, even if a neighbouring bag has more ids."""
    g = torch.Generator().manual_seed(9)
    of = CLASSES[name]
    ids, starts = torch.randint(0, 9, (70 + mixed,), generator=g), torch.arange(70)
    starts[35:] += mixed  # bag 34 has two ids
    ids[33], ids[starts[61]] = 9, -1
    lookup = Lookup(torch.randn(9, 12, generator=g), ids, starts)
    errors = run(of, [lookup])
    assert errors[0] == 2 and decode(errors[1]) == (0, 33) and errors[2:] == [0, 0]
    assert (lookup.out[33] == 0).all() and (lookup.out[61] == 0).all()
    assert torch.equal(lookup.out[:33], lookup.table[ids[:33]])


@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1, 2**40, -(2**63)])
def test_ids_outside_the_table_are_left_out_counted_and_found(bad: int) -> None:
    g = torch.Generator().manual_seed(9)
    of, table = CLASSES["fp32"], torch.randn(9, 12, generator=g)
    ids = torch.randint(0, 9, (5, 4), generator=g)
    ids[3, 1] = ids[4, 2] = bad
    clean, pooled = Lookup(table, ids[:3]), Lookup(table, ids, mode="mean")
    gathered = Lookup(table, ids, mode="none")
    errors = run(of, [clean, pooled, gathered])
    assert errors[0] == 4 and decode(errors[1]) == (1, 13) and errors[2:] == [0, 0]
    good = [[j for j in row if j != bad] for row in ids.tolist()]
    expected = torch.stack([table[row].mean(0) for row in good])
    assert torch.allclose(pooled.out, expected, atol=1e-6)
    assert (gathered.out[13] == 0).all() and torch.equal(gathered.out[12], table[ids[3, 0]])


@pytest.mark.parametrize(
    "starts, count, first",
    [([0, 5, 3, 9], 1, 1), ([0, 5, 99, 7], 2, 1), ([-4, 0, 0, 1], 1, 0), ([2, 3, 4, 5], 1, 0)],
)
def test_offsets_outside_the_ids_are_cut_counted_and_found(
    starts: list[int], count: int, first: int
) -> None:
    g = torch.Generator().manual_seed(10)
    table, ids = torch.randn(9, 12, generator=g), torch.randint(0, 9, (10,), generator=g)
    lookup = Lookup(table, ids, torch.tensor(starts))
    errors = run(CLASSES["fp32"], [lookup])
    assert errors[:2] == [0, 0] and errors[2] == count and decode(errors[3]) == (0, first)
    assert lookup.out.isfinite().all()
