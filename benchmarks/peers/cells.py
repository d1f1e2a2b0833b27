"""What is measured: a grid of cells, those with a bar to meet first, each with a short name.

``b2048-d64-i20-zipf-t1``: batch 2048, 64 columns, 20 ids per bag, zipf ids, one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from typing import Literal

TABLES = 26
ROWS = 100_000  # of each table, but for "kaggle"
# The id fields of the Criteo Kaggle data set.
KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip

BATCHES, DIMS, IDS, THREADS = (1, 128, 2048, 16384), (16, 64, 128), (1, 20), (1, 2)
Data = Literal["uniform", "zipf", "kaggle"]
DATA: tuple[Data, ...] = ("uniform", "zipf", "kaggle")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: the forward without gradients and, from batch 2 on, the training step."""

    batch: int
    dim: int
    ids: int  # in every bag
    data: Data  # uniform or zipf ids in equal tables; uniform ids in tables of Kaggle's sizes
    threads: int

    @property
    def name(self) -> str:
        return f"b{self.batch}-d{self.dim}-i{self.ids}-{self.data}-t{self.threads}"

    @property
    def tables(self) -> tuple[bool, int, bool]:
        """Cells for which this is equal share a process: tables, and largest batch or not."""
        return self.data == "kaggle", self.dim, self.batch == BATCHES[-1]

    @property
    def trains(self) -> bool:
        return self.batch > 1


@dataclass(frozen=True, slots=True)
class Bar:
    """The most that our time over a peer's may be, in a cell and for one kind of work."""

    cell: Cell
    what: Literal["step", "row-wise step", "forward"]
    peer: str | None  # None: the fastest of all peers
    most: float


def bars() -> list[Bar]:
    """The limits of the judged cells, for both numbers of threads."""
    found = []
    for threads in THREADS:
        one, many = (Cell(2048, 64, ids, "uniform", threads) for ids in IDS)
        small, single = (Cell(batch, 64, 1, "uniform", threads) for batch in (128, 1))
        found += [
            Bar(one, "step", "FBGEMM exact", 0.70),
            Bar(many, "step", "FBGEMM exact", 0.45 if threads == 1 else 0.40),
            Bar(small, "step", "FBGEMM exact", 0.75),
            Bar(one, "row-wise step", "FBGEMM row-wise", 0.85),
            Bar(many, "row-wise step", "FBGEMM row-wise", 0.85),
            Bar(single, "forward", None, 0.75),
            Bar(small, "forward", None, 0.75),
        ]
    return found


def judged() -> list[Cell]:
    """The cells of :func:`bars`, each once."""
    return list(dict.fromkeys(bar.cell for bar in bars()))


def grid() -> list[Cell]:
    """All cells; the largest batch last, those with a bar first.

    Cells with the same tables are neighbours: they share a process, its tables and compiled code.
    """
    dims = sorted(DIMS, key=lambda dim: dim != 64)  # those of the bars first
    rest = [
        Cell(batch, dim, ids, data, threads)
        for batches in (BATCHES[:-1], BATCHES[-1:])
        for together in (DATA[:2], DATA[2:])
        for dim in dims
        for data, ids, batch, threads in product(together, IDS, batches, THREADS)
    ]
    return list(dict.fromkeys([*judged(), *rest]))


def chosen(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Those whose name is like one of ``patterns`` (``b2048-*-t1``); all without a pattern."""
    return [c for c in cells if not patterns or any(fnmatch(c.name, p) for p in patterns)]


def table_rows(data: Data, dim: int, gib: float) -> list[int]:
    """Rows of the tables. Kaggle's are cut, the largest most, until all and one optimizer state of
    the same size fit in ``gib``."""
    if data != "kaggle":
        return [ROWS] * TABLES
    most = int(gib * 2**30 / (2 * 4 * dim))
    limit = max(KAGGLE)
    while sum(min(r, limit) for r in KAGGLE) > most:
        limit = int(limit * 0.95)
    return [min(r, limit) for r in KAGGLE]
