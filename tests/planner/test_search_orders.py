"""What is placed first, and which prices are tried, when memory is short."""

from __future__ import annotations

import numpy as np
import pytest

from recast.runtime.planner.bound import lower_bound
from recast.runtime.planner.problem import Options, Problem, Where
from recast.runtime.planner.search import Order, _construct, _guides, _Prices, search
from recast.runtime.planner.state import State

Row = tuple[int, Where, int, float, float]  # table, where, count, cost and memory of a shard


def problem(rows: list[Row], ranks: int, capacity: float) -> Problem:
    table, where, count, cost, device = map(np.array, zip(*rows, strict=True))
    none = np.zeros(len(rows))
    options = Options(
        table, where.astype(np.int64), count, cost[None], device, none,
        (cost * count)[None], device * count, none,
    )  # fmt: skip
    return Problem(
        int(table.max()) + 1, options, ranks, ranks, ranks, capacity, 1.0,
        np.zeros((1, ranks)), np.zeros(ranks), np.zeros(1),
    )  # fmt: skip


def test_a_table_on_all_ranks_finds_room_only_if_it_is_first() -> None:
    """Together they need 1.5 of 2, so no sum over ranks sees that one rank overflows."""
    p = problem(
        [(0, Where.ALL, 2, 0.1, 0.4), (0, Where.ANY, 1, 9.0, 0.4),
         (1, Where.ANY, 1, 1.0, 0.7), (1, Where.ANY, 1, 2.0, 0.5)],
        ranks=2, capacity=1.0,
    )  # fmt: skip
    prices = _Prices(p.options.total[0], p.options.total[0], 0.0)
    state = State(p)
    assert _construct(state, 10.0, prices, Order.FULL)
    assert state.score.max() >= 9
    state.reset()
    assert _construct(state, 10.0, prices, Order.WIDE)
    assert state.score.max() == pytest.approx(2.1)


def test_memory_is_kept_for_tables_to_come() -> None:
    """On both ranks table 0, placed first, keeps to the target, and table 1 finds no room."""
    p = problem(
        [(0, Where.ANY, 1, 1.2, 0.1), (0, Where.ALL, 2, 0.9, 0.45), (1, Where.ANY, 1, 0.1, 0.7)],
        ranks=2, capacity=0.75,
    )  # fmt: skip
    bound = lower_bound(p)
    assert bound is not None
    state = State(p)
    assert _construct(state, 1.0, _Prices.of(p, bound), Order.SLOW)
    assert state.score.max() == pytest.approx(1.2)


def test_a_shard_that_fills_the_time_of_a_rank_is_priced_with_and_without() -> None:
    """The relaxation likes it, for its memory; the rank that has it can use little of its own."""
    r = np.random.default_rng(0)
    rows: list[Row] = [(0, Where.ALL, 4, 0.5, 1.5), (0, Where.ANY, 1, 12.0, 2.5)]
    for t in range(1, 40):
        size = float(r.uniform(0.2, 1.0))
        rows += [(t, Where.ANY, 1, float(r.uniform(0.5, 2)), size)]
        rows += [(t, Where.ANY, 1, float(r.uniform(3, 9)), 0.15 * size)]
    p = problem(rows, ranks=4, capacity=5.0)
    bound = lower_bound(p)
    assert bound is not None and bound.price > 0
    chosen = {int(prices.relaxed[:2].argmin()) for _, prices in _guides(p, bound)}
    assert chosen == {0, 1}
    found = search(p, bound)
    assert found is not None and found.score <= 1.05 * bound.value
