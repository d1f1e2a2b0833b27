"""Merging: unique rows of every form of lookup, by the kernel and in torch."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from recast.errors import IdError
from recast.runtime import device
from recast.runtime.rows.pieces import Piece, merge, sparse_coo

CPU = torch.device("cpu")


def by_hand(pieces: list[Piece], rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The definition in float64, the sum of the terms' magnitudes, and the number of terms."""
    total = torch.zeros(rows, width, dtype=torch.float64)
    size = torch.zeros(rows, width, dtype=torch.float64)
    terms = torch.zeros(rows)
    for p in pieces:
        bags = len(p.rows)
        if p.offsets is None:
            bounds = [p.fixed * b for b in range(bags + 1)]
        else:
            bounds = p.offsets.tolist()
            bounds += [len(p.ids)] if len(bounds) == bags else []
        for bag in range(bags):
            inside = range(bounds[bag], bounds[bag + 1])
            inside = [i for i in inside if int(p.ids[i]) != p.padding_idx]
            for i in inside:
                factor = 1.0 if p.weights is None else float(p.weights[i])
                factor /= len(inside) if p.mean else 1
                factor *= 1.0 if p.scale is None else float(p.scale)
                total[p.ids[i]] += factor * p.rows[bag].double()
                size[p.ids[i]] += (factor * p.rows[bag].double()).abs()
                terms[p.ids[i]] += 1
    return total, size, terms


def random_piece(rng: random.Random, rows: int, width: int) -> Piece:
    form = rng.choice(["none", "fixed", "ragged", "ends"])
    bags, fixed, offsets = rng.choice([1, 3, 40]), 1, None
    if form == "none":
        n = bags
    elif form == "fixed":
        fixed = rng.choice([1, 2, 5])
        n = bags * fixed
    else:
        n = rng.choice([1, 7, 120])
        offsets = torch.randint(0, n + 1, (bags + (form == "ends"),)).sort().values
        offsets[0] = 0
        offsets = offsets.to(rng.choice([torch.int32, torch.int64]))
    few = max(1, rows // rng.choice([1, 20]))
    wide = torch.randn(bags, width + 3)
    return Piece(
        ids=torch.randint(0, few, (n,)).to(rng.choice([torch.int32, torch.int64])),
        rows=rng.choice([wide[:, 2 : 2 + width], wide[:, :width].clone()]),
        offsets=offsets,
        fixed=fixed,
        weights=torch.rand(n) if rng.random() < 0.3 else None,
        mean=rng.random() < 0.4,
        padding_idx=rng.choice([None, 0, rows - 1]),
        scale=rng.choice([None, 0.3, torch.tensor(2.5)]),
    )


@pytest.mark.sampled(80)
@pytest.mark.parametrize("seed", range(80))
def test_merge_equals_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows, width = rng.choice([1, 2, 10, 300]), rng.choice([1, 3, 4, 10, 16, 33, 64, 100])
    pieces = [random_piece(rng, rows, width) for _ in range(rng.choice([1, 1, 2, 4]))]
    want, size, terms = by_hand(pieces, rows, width)
    # The bound of a sum one by one: a rounding per term, and a few for the factors.
    limit = torch.finfo(torch.float32).eps * (terms.unsqueeze(1) + 4) * size
    ids, got = merge(pieces, (rows, width), torch.float32, CPU)
    assert ids.tolist() == terms.nonzero().flatten().tolist()
    assert ((got.double() - want[ids]).abs() <= limit[ids]).all()
    coo = sparse_coo((rows, width), torch.float32, CPU, pieces)
    assert coo.is_sparse and coo.is_coalesced()
    assert ((coo.to_dense().double() - want).abs() <= limit).all()


def test_nothing_to_merge() -> None:
    none = torch.empty(0, dtype=torch.int64)
    padded = Piece(torch.tensor([3, 3]), torch.randn(2, 4), None, 1, None, True, 3, None)
    empty = Piece(none, torch.randn(2, 4), torch.tensor([0, 0]), 1, None, False, None, None)
    for pieces in ([], [padded], [empty], [empty, padded]):
        ids, rows = merge(pieces, (5, 4), torch.float32, CPU)
        assert ids.shape == (0,) and ids.dtype == torch.int64
        assert rows.shape == (0, 4) and rows.dtype == torch.float32


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_ids_outside_the_table(bad: int) -> None:
    good = Piece(torch.tensor([1]), torch.randn(1, 4), None, 1, None, False, None, None)
    piece = dataclasses.replace(good, ids=torch.tensor([bad]))
    with pytest.raises(IdError, match=f"row {bad} of a table of 5 rows"):
        merge([good, piece], (5, 4), torch.float32, CPU)


def many(n: int, rows: int, width: int, skewed: bool) -> list[Piece]:
    generator = torch.Generator().manual_seed(n)
    ids = torch.rand(n, generator=generator)
    ids = (ids**8 if skewed else ids).mul(rows).long().clamp(max=rows - 1)
    upstream = torch.randn(n // 4, width, generator=generator)
    return [Piece(ids, upstream, None, 4, None, False, 7, None)]


@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("rows", [3, 1000, 10_000_000])
def test_one_result_for_any_threads_and_instructions(rows: int, skewed: bool, kernel: str) -> None:
    if kernel == "torch":
        pytest.skip("one result by construction")
    pieces = many(200_000, rows, 20, skewed)  # enough for the sort that threads share
    results = []
    before = torch.get_num_threads()
    try:
        for isa in device.ISAS:
            if device.why_not(isa)() is not None:
                continue
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                with device.use(isa):
                    results.append(merge(pieces, (rows, 20), torch.float32, CPU))
    finally:
        torch.set_num_threads(before)
    for ids, summed in results[1:]:
        assert torch.equal(ids, results[0][0])
        assert torch.equal(summed, results[0][1])
    with device.use("torch"):
        ids, summed = merge(pieces, (rows, 20), torch.float32, CPU)
    assert torch.equal(ids, results[0][0])
    # fp32 sums of up to n terms, in the same order but for torch's own blocking
    torch.testing.assert_close(results[0][1], summed, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)
def test_offsets_that_overrun_their_ids() -> None:
    ids, upstream = torch.arange(4), torch.randn(2, 4)
    piece = Piece(ids, upstream, torch.tensor([0, 9]), 1, None, False, None, None)
    with pytest.raises(ValueError, match="offsets"):
        merge([piece], (5, 4), torch.float32, CPU)
