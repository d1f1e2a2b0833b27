"""Sorting ids by row, summing gradients and updating rows on the emulator, against plain torch.

Sums and updates are judged by float64, sorting and the exact cases bit by bit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_rows import (
    BF16,
    CLASSES,
    F16,
    F32,
    Class,
    Given,
    Step,
    example,
    expected,
    integers,
    merged,
    radix_sort,
    scan,
    sort,
    states,
    u32,
    unsigned,
    update,
)
from torch import Tensor

from recast.runtime.rows.pieces import Piece
from recast.runtime.tolerances import excess


@pytest.mark.parametrize("name", CLASSES)
def test_a_step(name: str) -> None:
    of = CLASSES[name]
    given = example(of, 3)
    given.gap = 2**33 if of.wide else 0
    before = states(of, given)
    step = Step(scale=0.5, grad_scale=4.0)
    plain = expected(of, given, before, step, F32)
    truth = expected(of, given, before, step, torch.float64)
    ours = [state.clone() for state in before]
    assert update(of, given, ours, step).errors == [0, 0, 0, 0]
    for k, table in enumerate(given.tables):
        grads = merged(given.of(k), table.shape, torch.float64)[1].abs().max()
        scale = float(table.abs().max() + grads)
        assert excess(table, plain[k][0].to(of.table), truth[k][0], scale=scale) <= 1
        if of.action:
            scale = float(scale + grads**2)
            assert excess(ours[k], plain[k][1].to(of.state), truth[k][1], scale=scale) <= 1


def test_exactly_the_numbers_of_torch() -> None:
    """Gradients of small integers add up exactly, so every bit of the state is torch's.

    Tables are those of the formula in IEEE arithmetic, which is numpy's: torch's own square root
    may be off by one bit.
    """
    of = CLASSES["adagrad"]
    given = example(of, 5)
    for k, (number, piece) in enumerate(given.pieces):
        weights = None if piece.weights is None else piece.weights.mul(2).round()
        rows = piece.rows.mul(3).round()
        given.pieces[k] = number, replace(piece, rows=rows, weights=weights, mean=False)
    before = [table.clone() for table in given.tables]
    whole = [torch.nn.Parameter(table.clone()) for table in given.tables]
    optimizer = torch.optim.Adagrad(whole, lr=0.5, eps=1e-3, initial_accumulator_value=0.25)
    for number, parameter in enumerate(whole):
        ids, rows = merged(given.of(number), parameter.shape, F32)
        parameter.grad = torch.zeros_like(parameter).index_add_(0, ids, rows)
    optimizer.step()
    ours = [torch.full_like(p, 0.25).detach() for p in whole]
    update(of, given, ours, Step(lr=0.5, eps=1e-3))
    for parameter, old, table, state in zip(whole, before, given.tables, ours, strict=True):
        assert parameter.grad is not None
        assert torch.equal(optimizer.state[parameter]["sum"], state)
        assert torch.allclose(parameter, table, rtol=3e-7, atol=3e-7)
        down = parameter.grad.numpy() * np.float32(-0.5)
        by = down / (np.sqrt(state.numpy()) + np.float32(1e-3))
        assert torch.equal(table, torch.from_numpy(old.numpy() + by))


@pytest.mark.parametrize("name", ["adagrad", "row-wise by one"])
def test_results_do_not_depend_on_order_or_grid(name: str) -> None:
    of = CLASSES[name]
    found = []
    for seed, workers, grid in ((0, 1, 1), (1, 2, 3), (2, 1, 40)):
        given = example(of, 6)
        totals = states(of, given)
        update(of, given, totals, Step(), grid=grid, seed=seed, workers=workers)
        found.append([*given.tables, *totals])
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))


@pytest.mark.parametrize("tile", [64, 256])
def test_rows_of_many_tiles(tile: int) -> None:
    of = replace(CLASSES["adagrad"], tile=tile)
    given = example(of, 7)
    truth = expected(of, given, states(of, given), Step(), torch.float64)
    update(of, given, states(of, given), Step())
    for table, (weight, _) in zip(given.tables, truth, strict=True):
        assert torch.allclose(table.double(), weight, rtol=1e-5, atol=1e-6)


LENGTHS = {  # of the runs of equal ids in each table, with tiles of 32 entries
    "one row": [[6000]],
    "ends at ends of parts": [[16, 32, 320, 16, 48, 1024, 272, 16], [16], [5000]],
    "just not there": [[5, 27, 1, 31, 16, 33, 17, 15, 300, 289, 30, 47, 2, 14, 16, 31, 600]],
    "many tables": [[k, 33, 1] for k in range(1, 40)],
}


@pytest.mark.parametrize(("name", "tile"), [("sgd", 32), ("sgd", 256), ("row-wise by one", 32)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_long_rows(lengths: list[list[int]], name: str, tile: int) -> None:
    """Sums of small integers are exact: every entry counts once, wherever tiles end."""
    of, dim = replace(CLASSES[name], tile=tile), 8
    g = torch.Generator().manual_seed(len(lengths))
    given = Given([], [])
    for number, runs in enumerate(lengths):
        ids = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))
        ids = ids[torch.randperm(len(ids), generator=g)]
        rows = torch.randint(-3, 4, (len(ids), dim), generator=g).float()
        given.tables.append(torch.zeros(len(runs), dim))
        given.pieces.append((number, Piece(ids, rows, None, 1, None, False, None, None)))
    held = [torch.zeros(len(table), 1) for table in given.tables]
    update(of, given, held, Step(lr=-1.0, eps=0.0), grid=3)
    for table, state, (_, piece) in zip(given.tables, held, given.pieces, strict=True):
        sums = torch.zeros_like(table).index_add_(0, piece.ids, piece.rows)
        squares = (sums * sums).mean(1, keepdim=True)
        if of.action == 2:
            assert torch.equal(state, squares)
            sums = torch.where(squares > 0, sums / squares.sqrt(), table)
        torch.testing.assert_close(table, sums, rtol=3e-7 if of.action else 0, atol=0)


def test_an_infinite_gradient_touches_nothing() -> None:
    of = CLASSES["adagrad"]
    given = example(of, 8)
    before, totals = [t.clone() for t in given.tables], states(of, given)
    update(of, given, totals, Step(found_inf=1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, given.tables, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(totals, states(of, given), strict=True))
    update(of, given, totals, Step(found_inf=0.0))
    assert not any(torch.equal(a, b) for a, b in zip(before, given.tables, strict=True))


def rounded(of: Class, value: float, seed: int) -> Tensor:
    """1 - ``value`` in the dtype of the table, 4096 times."""
    table = torch.ones(64, 64, dtype=of.table)
    rows = torch.full((64, 64), value)
    piece = Piece(torch.arange(64), rows, None, 1, None, False, None, None)
    update(of, Given([table], [(0, piece)]), [table], Step(lr=1.0, seed=seed))
    return table


@pytest.mark.parametrize(("dtype", "bits", "vec"), [(BF16, 8, 1), (BF16, 8, 4), (F16, 11, 4)])
def test_rounding_at_random_has_no_bias(dtype: torch.dtype, bits: int, vec: int) -> None:
    of = Class(action=0, table=dtype, stochastic=True, vec=vec)
    unit = 2.0**-bits  # between 1 and the number below
    for share in (0.25, 0.8125):
        found = rounded(of, share * unit, 11)
        up = (found == 1).double().mean()
        assert ((found == 1) | (found == 1 - unit)).all()
        sigma = math.sqrt(share * (1 - share) / found.numel())
        assert abs(float(up) - (1 - share)) < 5 * sigma
        same, other = rounded(of, share * unit, 11), rounded(of, share * unit, 12)
        assert torch.equal(found, same) and not torch.equal(found, other)
    assert (rounded(of, 3 * unit, 11) == 1 - 3 * unit).all()
    assert torch.equal(rounded(of, -float("inf"), 11), torch.full_like(found, float("inf")))


def test_rounding_at_random_does_not_depend_on_the_class() -> None:
    by_one = Class(action=0, table=BF16, stochastic=True, vec=1)
    by_four = Class(action=0, table=BF16, stochastic=True, vec=4)
    assert torch.equal(rounded(by_one, 0.001, 5), rounded(by_four, 0.001, 5))


def test_tiny_halves_are_rounded_without_bias() -> None:
    of = Class(action=0, table=F16, stochastic=True)
    table = torch.zeros(64, 64, dtype=F16)
    unit = 2.0**-24  # the least half above 0
    piece = Piece(
        torch.arange(64), torch.full((64, 64), unit / 4), None, 1, None, False, None, None
    )
    update(of, Given([table], [(0, piece)]), [table], Step(lr=1.0, seed=3))
    away = (table == -unit).double().mean()
    assert ((table == 0) | (table == -unit)).all() and abs(float(away) - 0.25) < 0.035


# ---------------------------------------------------------------- sorting


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("n", "bits"), [(1, 1), (31, 3), (4097, 20), (9000, 9), (70001, 8)])
def test_the_sort_is_stable(n: int, bits: int, wide: bool) -> None:
    g = torch.Generator().manual_seed(n)
    bits += 30 if wide and n < 5000 else 0
    of = Class(wide=wide)
    keys = torch.randint(0, 2**bits, (n,), generator=g).to(of.key())
    keys[n // 2 :] = keys[: n - n // 2].clone()
    places = torch.arange(n, dtype=torch.int32).view(torch.uint32)
    found, order = radix_sort(of, keys, places, bits, seed=1)
    truth = keys.sort(stable=True)
    assert torch.equal(found, truth.values)
    assert torch.equal(order.view(torch.int32).long(), truth.indices)


@pytest.mark.parametrize("wide", [False, True])
def test_each_table_is_sorted_by_itself(wide: bool) -> None:
    """Of one to three passes, of several tiles; ids that get no gradient are a table's last."""
    of, g = Class(wide=wide), torch.Generator().manual_seed(1)
    rows, given = (1, 4096, 1023, 3, 2**21, 1024), Given([], [])
    for number, count in enumerate(rows):
        given.tables.append(torch.empty(1).expand(count, 4))
        for n in (5000, 1, 77):
            ids = torch.randint(-1, count, (n,), generator=g)
            ids[::3] = count - 1
            piece = Piece(ids, torch.empty(n, 4), None, 1, None, False, number % 2, None)
            given.pieces.append((number, piece))
    done, counted = sort(of, given), 0
    firsts = given.first_keys()
    for number, count in enumerate(rows):
        ids = torch.cat([piece.ids for piece in given.of(number)])
        bad = (ids < 0) | (ids == number % 2)
        keys = firsts[number] + torch.where(bad, count, ids)
        truth = keys.sort(stable=True)
        place = counted + torch.arange(len(ids))
        assert torch.equal(done.keys[place].long(), truth.values)
        places = torch.cat([torch.arange(len(piece.ids)) for piece in given.of(number)])
        pieces = torch.tensor([0] * 5000 + [1] + [2] * 77) + 3 * number
        values = pieces << done.bag_bits | torch.where(bad, 0, places)
        assert torch.equal(done.values.view(torch.int32)[place].long(), values[truth.indices])
        assert done.table_starts.view(torch.int32)[number] == counted
        counted += len(ids)
    assert done.errors[0] > 0 and done.table_starts.view(torch.int32)[-1] == counted


@pytest.mark.parametrize("n", [1, 255, 4096, 4097, 13000])
def test_scans(n: int) -> None:
    counts = integers(n, 50).int()
    sums = counts.cumsum(0) - counts
    scan(Class().sort(), counts, seed=1)
    assert torch.equal(counts.long(), sums)


def test_runs() -> None:
    keys = integers(4500, 900).int().sort().values
    keys[4300:] = 5000
    firsts = torch.tensor([0, 0, 17, 400, 2000, 3000, 5000, 6000])
    kernels, totals, starts, table_runs = Class().sort(), u32(2), u32(4501), u32(len(firsts))
    told = (unsigned(keys), 4500, totals)
    kernels.launch("run_totals", 2, 256, 0, *told)
    kernels.launch("run_starts", 2, 256, 0, *told, firsts, len(firsts), starts, table_runs)
    rows = [list(row) for _, row in itertools.groupby(range(4500), lambda i: int(keys[i]))]
    heads = [row[0] for row in rows]
    found = starts.view(torch.int32)
    assert found[: len(heads) + 1].tolist() == [*heads, 4500]
    runs = [sum(int(keys[head]) < int(first) for head in heads) for first in firsts]
    assert table_runs.view(torch.int32).tolist() == runs


# ---------------------------------------------------------------- bad input


def decode(word: int) -> tuple[int, int]:
    """Piece and place of the first error."""
    return ~word >> 40, ~word & ((1 << 40) - 1)


@pytest.mark.parametrize("bad", [-1, 7, 2**31, -(2**63)])
def test_ids_outside_the_table_are_left_out_counted_and_found(bad: int) -> None:
    of = Class(action=0)

    def one(ids: Tensor) -> Given:
        g = torch.Generator().manual_seed(2)
        rows = torch.randn(30, 8, generator=g)
        piece = Piece(ids, rows, None, 2, None, True, None, None)
        return Given([torch.zeros(7, 8), torch.zeros(2, 8)], [(1, example(of, 1).pieces[0][1]),
                                                              (0, piece)])  # fmt: skip

    ids = integers(60, 7)
    ids[:2] = 3
    broken = ids.clone()
    broken[1] = broken[9] = bad
    ids[1] = ids[9] = 0
    given, padded = one(broken), one(ids)
    given.pieces = [(0, given.pieces[1][1])]
    padded.pieces = [(0, replace(padded.pieces[1][1], padding_idx=0))]
    keep = broken.clone()
    keep[ids == 0] = 0
    keep[1] = keep[9] = bad
    given.pieces = [(0, replace(given.pieces[0][1], padding_idx=0))]
    done = update(of, given, given.tables, Step())
    update(of, padded, padded.tables, Step())
    assert done.errors[0] == 2 and decode(done.errors[1]) == (0, 1) and done.errors[2:] == [0, 0]
    assert torch.equal(given.tables[0], padded.tables[0])


def test_offsets_outside_the_ids_are_counted_and_no_wild_read() -> None:
    of = CLASSES["adagrad"]
    for starts in ([2, 3, 4], [0, 99, 4], [0, 7, 3], [-5, 2, 60]):
        piece = Piece(integers(10, 7), torch.ones(3, 8), torch.tensor(starts), 0, None,
                      True, None, None)  # fmt: skip
        given = Given([torch.zeros(7, 8)], [(0, piece)])
        done = update(of, given, [torch.ones(7, 8)], Step())
        assert given.tables[0].isfinite().all()
        assert done.errors[2] == (2 if starts[0] == 2 else 0)
