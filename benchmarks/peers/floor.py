"""The least that a step can cost: its bytes and flops at the best rates measured on this machine.

Rows are read and written at the rate of the fastest lookup of random rows in these tables;
products, also those of the interaction, run at the rate of torch's fastest GEMM. Nothing is counted
for Python, activations, losses or the dense optimizer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peers.cells import TABLES, Cell
from peers.model import DENSE, HIDDEN, Batch, Tables, batch
from recast.runtime.mlp import gemm

LOOKUPS = 1 << 20  # of all tables, to measure a rate
SIDE = 1024  # of the square matrices


class Floor(NamedTuple):
    """Milliseconds; and the rates they come from, GB/s and Gflop/s."""

    forward: float
    step: float
    row_wise_step: float
    rows_rate: float
    flops_rate: float


Clock = Callable[[], float]


def floor(cell: Cell, tables: Tables, b: Batch, clock: Clock) -> Floor:
    """The floor of ``cell``, for batches like ``b``, by a ``clock`` of seconds."""
    key = (cell.data, cell.threads)
    if key not in tables.rates:
        tables.rates[key] = _rows_rate(cell, tables, clock)
    rows_rate, flops_rate = tables.rates[key], _flops_rate(cell.threads, clock)
    pooled = cell.batch * TABLES
    touched = sum(len(i.unique()) for i in b.ids)
    read = 4 * cell.dim * (pooled * cell.ids + pooled)
    # The gradient is read once; weights and states are read and written.
    update = 4 * (cell.dim * pooled + touched * 4 * cell.dim)
    row_wise = 4 * (cell.dim * pooled + touched * (2 * cell.dim + 2))
    flops = _flops(cell)
    products = flops / flops_rate

    def total(moved: int, times: int) -> float:
        return 1e-6 * (moved / rows_rate + times * products)

    return Floor(
        total(read, 1), total(read + update, 3), total(read + row_wise, 3), rows_rate, flops_rate
    )


def _flops(cell: Cell) -> float:
    """Of a forward: both MLPs and the pairs."""
    pairs = TABLES * (TABLES + 1) // 2
    bottom = (DENSE, HIDDEN, HIDDEN // 2, cell.dim)
    top = (cell.dim + pairs, HIDDEN, HIDDEN // 2, 1)
    widths = [*pairwise(bottom), *pairwise(top)]
    return 2.0 * cell.batch * (sum(a * b for a, b in widths) + pairs * cell.dim)


def _rows_rate(cell: Cell, tables: Tables, clock: Clock) -> float:
    """GB/s of summing random rows, 32 per bag, by the faster of torch and ours."""
    ids = 32
    size = max(LOOKUPS // (ids * TABLES), 1)
    like = Cell(size, cell.dim, ids, cell.data, cell.threads)
    drawn = [batch(like, tables.rows, seed=10 + k).ids for k in range(3)]
    several = range(TABLES)
    none: list[Any] = [None] * TABLES

    def by_torch(i: list[Tensor]) -> None:
        for given, weight in zip(i, tables.weights, strict=True):
            F.embedding_bag(given, weight, mode="sum")

    def by_ours(i: list[Tensor]) -> None:
        torch.ops.recast.embedding_bags(
            list(tables.weights), i, none, none, list(several), ["sum"] * TABLES, none,
            [False] * TABLES, [False] * TABLES,
        )  # fmt: skip

    def drawn_by(lookup: Callable[[list[Tensor]], object]) -> Callable[[int], object]:
        return lambda k: lookup(drawn[k])

    best = min(_median(drawn_by(f), 3, clock) for f in (by_torch, by_ours))
    return 4e-9 * size * TABLES * (ids + 1) * cell.dim / best


@cache
def _flops_rate(threads: int, clock: Clock) -> float:
    """Gflop/s of a square product, and of a linear layer of that size."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    ways: list[Callable[[int], object]] = [
        lambda _: torch.mm(a, b),
        lambda _: gemm.linear(a, b, None),
    ]
    return 2e-9 * SIDE**3 / min(_median(way, 7, clock) for way in ways)


def _median(work: Callable[[int], object], rounds: int, clock: Clock) -> float:
    """Seconds, without gradients; ``work`` is given the number of the round."""
    times = []
    with torch.no_grad():
        work(0)
        for k in range(rounds):
            started = clock()
            work(k)
            times.append(clock() - started)
    return statistics.median(times)
