"""The published step times as this cost model computes them for the original implementation.

distributed-embeddings (TensorFlow, sources at 4cb42d4) deals whole tables out by size alone, looks
them up one by one, writes a gradient row for every id, and sums and applies these in further
passes. With G samples on W ranks, a table of d columns with lookups of n ids, u of them distinct,
and the fraction E of peak memory bandwidth, the slowest rank takes

    step = fixed + each tables + bytes / (E bandwidth) + exchange + dense part

    bytes   n (8 + 4 d) + 4 d G       ids and rows read, sums written (embedding_lookup_ops.py)
            8 n d                     v0.2, several ids: rows written as a whole and read again
            4 d G + 4 n d             upstream read, IndexedSlices written
            2 n (4 d + 8)             of inputs that share a table, their slices joined
            n (8 d + 8) + 24 u d      sort and segment sum of repeats; sparse Adagrad

with the exchange, links and dense part of :mod:`.cost`. ``fixed``, ``each`` and E are fitted once
per release, on Tiny and Small; the values for Medium, Large and Jumbo are predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .cost import MS, Setting, dense, wire_seconds
from .load import Dense
from .models import Model

SLICE = 1280 * 2**20  # elements: larger tables are cut by columns (--column_slice_threshold)


@dataclass(frozen=True, slots=True)
class Release:
    """``fixed`` and ``each``: ms per step and per table; ``memory``: fraction of peak bandwidth.

    ``whole``: whether bags are looked up as rows and then summed.
    """

    name: str
    fixed: float
    each: float
    memory: float
    whole: bool


RELEASES = {
    "readme": Release("v0.1", 2.06, 0.334, 0.354, False),
    "blog": Release("v0.2", 0.71, 0.273, 0.542, True),
}


def step(
    model: Model,
    part: Dense,
    setting: Setting,
    release: Release,
    distinct: Callable[[int, int, float], float],
) -> float:
    """ms of their step: ``part`` is the dense part, ``distinct(rows, ids, alpha)`` E[distinct]."""
    t, samples = setting.topology, setting.samples
    rate = t.memory_bandwidth * release.memory / MS
    slowest = 0.0
    for tables in dealt(model, t.ranks):
        size = sum(_bytes(model, table, samples, release.whole, distinct) for table in tables)
        slowest = max(slowest, release.each * len(tables) + size / rate)
    width = sum(count * dim * len(ids) for count, _, dim, ids in model.groups)
    exchange = 2 * wire_seconds(setting, 4.0 * setting.batch * width) * MS
    rest = dense(part, setting)
    return release.fixed + slowest + exchange + rest.compute + rest.communication


Held = tuple[int, int, tuple[int, ...]]  # rows, columns, ids of each input


def dealt(model: Model, ranks: int) -> list[list[Held]]:
    """The tables of each rank, by ``memory_balanced``: sorted by size and dealt back and forth."""
    tables = [(rows, dim, ids) for n, rows, dim, ids in model.groups for _ in range(n)]
    slices: list[tuple[int, int, int]] = []  # elements, table, columns
    for k, (rows, dim, _) in enumerate(tables):
        cut = 1
        while rows * dim > cut * SLICE:
            cut *= 2
        cut = min(cut, ranks, dim)
        slices += [(rows * (dim // cut), k, dim // cut)] * cut
    slices.sort(reverse=True)
    found = []
    for r in range(ranks):
        columns: dict[int, int] = {}  # slices of one table on one rank are merged again
        for _, k, dim in slices[r :: 2 * ranks] + slices[2 * ranks - 1 - r :: 2 * ranks]:
            columns[k] = columns.get(k, 0) + dim
        found.append([(tables[k][0], dim, tables[k][2]) for k, dim in columns.items()])
    return found


def _bytes(
    model: Model, table: Held, samples: int, whole: bool, distinct: Callable[..., float]
) -> float:
    """Bytes to and from memory in one step."""
    rows, dim, inputs = table
    moved = 0.0
    for each in inputs:
        n = each * samples
        moved += n * (8 + 4 * dim) + 4 * dim * samples
        moved += 8 * n * dim if whole and each > 1 else 0
        moved += 4 * dim * samples + 4 * n * dim
    n = sum(inputs) * samples
    moved += 2 * n * (4 * dim + 8) if len(inputs) > 1 else 0
    return moved + n * (8 * dim + 8) + 24 * distinct(rows, n, model.alpha) * dim
