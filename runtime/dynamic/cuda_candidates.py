"""Ids waiting for MinCount, in GPU memory: an id table whose scores are lookup counts.

    only = waiting.admit(table, ids)             # (n,) which ids may be stored
    batch = table.find_or_insert(ids, scores, only)
    waiting.drop(table, batch)                   # ids that are stored now wait no more

A full bucket forgets the id with the fewest lookups, and among equals the one looked up longest
ago, but never one of this step: if an id finds no slot, it counts as looked up for the first time.
Nothing waits for the GPU, and shapes depend on the batch size only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recast.runtime.dynamic.cuda import IdTable
from recast.runtime.dynamic.cuda_batch import Batch
from recast.runtime.gpu.gpu import Gpu

EACH = 2  # waiting ids per row of the table
_LEAST = 1 << 14


class Candidates:
    """The ids that wait for one table.

    Args:
        gpu: runs the kernels. capacity, guests: rows of the table that they wait for.
        least: an id is stored from this many lookups in training on, the current one included.
        padding: the id that is never stored.
    """

    def __init__(
        self, gpu: Gpu, capacity: int, guests: int, least: int, padding: int | None
    ) -> None:
        rows = max(_LEAST, EACH * capacity)
        self.least = least
        self.index = IdTable(gpu, rows, "lfu", guests, padding=padding, ages=False)
        self._rows: Tensor | None = None  # rows here of the last batch's ids; -1: not waiting

    def admit(self, table: IdTable, ids: Tensor) -> Tensor:
        """Count lookups of ids that are not in ``table``; returns (n,) bool: which may be stored.

        All lookups of the batch are counted before the first of them is stored, as on the host.
        """
        absent = table.rows_of(ids) < 0
        rows = self.index.find_or_insert(ids, only=absent).rows
        waits = absent & (rows > 0) & (rows <= self.index.capacity)
        self._rows = torch.where(waits, rows, -1)
        seen = self.index.scores.view(-1)[self.index.place_of(self._rows)]
        return ~absent | (torch.where(waits, seen, 1) >= self.least)

    def drop(self, table: IdTable, batch: Batch) -> None:
        """Forget the ids of ``batch``, the last one admitted, that now have a row in ``table``."""
        assert self._rows is not None
        self.index.erase_rows(torch.where(batch.rows <= table.capacity, self._rows, -1))
        self._rows = None

    def advance(self) -> None:
        """Begin the next step."""
        self.index.advance()

    def stored(self) -> Tensor:
        """(3, m) int64: the ids, their lookups, and the step of the last one. Waits for the GPU."""
        ids, _, counts, stamps = self.index.stored()
        return torch.stack([ids, counts, stamps])

    def load(self, seen: Tensor) -> None:
        """Replace the waiting ids by those from :meth:`stored`; if not all fit, by the most recent
        ones.
        """
        seen = seen.to(self.index.gpu.device)
        ids, counts, stamps = seen[:, seen[2].argsort(descending=True, stable=True)]
        self.index.load(ids.contiguous(), counts, stamps, strict=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rows": None}
