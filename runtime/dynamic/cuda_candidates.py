"""Ids that wait for MinCount, in the memory of a GPU: an id table whose scores are their counts.

    only = waiting.admit(table, ids)             # (n,) which ids may be stored
    batch = table.find_or_insert(ids, scores, only)
    waiting.drop(batch)                          # those that were stored wait no more

A bucket that is full forgets the id with the fewest lookups, of those the one that came longest
ago, and never one of this step: an id that finds no place is one that comes for the first time.
Nothing waits for the GPU, and shapes depend on the size of the batch only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recast.runtime.dynamic.cuda import IdTable
from recast.runtime.dynamic.cuda_batch import Batch
from recast.runtime.gpu.gpu import Gpu

EACH = 2  # ids that may wait, for each row
_LEAST = 1 << 14


class Candidates:
    """The ids that wait for one table.

    Args:
        gpu: what runs the kernels. capacity: rows of the table they wait for. guests: as it has.
        least: lookups in training of an id, this one too, from which on it is stored.
        padding: the id that never is.
    """

    def __init__(
        self, gpu: Gpu, capacity: int, guests: int, least: int, padding: int | None
    ) -> None:
        rows = max(_LEAST, EACH * capacity)
        self.least = least
        self.index = IdTable(gpu, rows, "lfu", guests, padding=padding, ages=False)
        self._rows: Tensor | None = None  # of the batch that was counted last, where it waits

    def admit(self, table: IdTable, ids: Tensor) -> Tensor:
        """(n,) bool: whether an id may be stored; those that are not in ``table`` are counted.

        All lookups of the batch count before the first of them is stored, as on the host.
        """
        absent = table.rows_of(ids) < 0
        rows = self.index.find_or_insert(ids, only=absent).rows
        waits = absent & (rows > 0) & (rows <= self.index.capacity)
        self._rows = torch.where(waits, rows, -1)
        seen = self.index.scores.view(-1)[self.index.place_of(self._rows)]
        return ~absent | (torch.where(waits, seen, 1) >= self.least)

    def drop(self, table: IdTable, batch: Batch) -> None:
        """Forget the ids of ``batch``, which was just admitted, that have a row of ``table``."""
        assert self._rows is not None
        self.index.erase_rows(torch.where(batch.rows <= table.capacity, self._rows, -1))
        self._rows = None

    def advance(self) -> None:
        """The next step begins."""
        self.index.advance()

    def stored(self) -> Tensor:
        """(3, m) int64: the ids, how often each was looked up, and when last; waits for the GPU."""
        ids, _, counts, stamps = self.index.stored()
        return torch.stack([ids, counts, stamps])

    def load(self, seen: Tensor) -> None:
        """Take what :meth:`stored` gave, in place of what is here; where there is no room for all,
        the ids that came last.
        """
        seen = seen.to(self.index.gpu.device)
        ids, counts, stamps = seen[:, seen[2].argsort(descending=True, stable=True)]
        self.index.load(ids.contiguous(), counts, stamps, strict=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rows": None}
