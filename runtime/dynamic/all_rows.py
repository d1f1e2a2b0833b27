"""All rows that a dynamic table stores, in memory and on disk: to save, load and export them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from recast.errors import CheckpointError
from recast.runtime.tiers import whole
from recast.runtime.tiers.tier import Tier


def empty(n: int) -> Tensor:
    return torch.empty(n, dtype=torch.int64)


def as_loaded(
    found: tuple[Tensor, Tensor, Tensor, Tensor], order: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``found``, whose first tensor are the ids, sorted like the ids in ``order`` if these are the
    same ids.
    """
    ids = found[0]
    if order is None or len(order) != len(ids):
        return found
    at, to = torch.argsort(ids), torch.argsort(order)
    if not torch.equal(ids[at], order[to]):
        return found
    place = torch.empty_like(at)
    place[to] = at
    return found[0][place], found[1][place], found[2][place], found[3][place]


class AllRows:
    """The part of a table that reads and writes all its rows."""

    name: str
    capacity: int
    slab_rows: int
    index: Any
    tier: Tier | None
    _lock: threading.Lock

    def take_fresh(self) -> Tensor:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def stored(self, since: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids, rows, scores and stamps, (n,) int64 each, of what was looked up at step ``since`` or
        later.

        Rows from ``slab_rows`` on are on disk; ``take`` reads them. Right after a load, the order
        is that in which rows were loaded.
        """
        if self.tier is None:
            found: tuple[Tensor, Tensor, Tensor, Tensor] = self.index.stored(since, empty)
            return found
        with self._lock:
            return as_loaded(whole.stored(self.tier, since, self.slab_rows), self.tier.order)

    def take(self, name: str, slab: Tensor, rows: Tensor) -> Tensor:
        """``slab[rows]``; ``name``: "weight", or the name of an optimizer state."""
        if self.tier is None:
            return slab[rows]
        with self._lock:
            return whole.take(self.tier, name, slab, rows, self.slab_rows)

    def put(self, name: str, slab: Tensor, values: Tensor) -> None:
        """Write ``values`` (n, ...) of all rows, in the order in which they were loaded, or else in
        that of ``stored``.
        """
        if self.tier is None:
            slab[self.index.stored(0, empty)[1]] = values.detach().to(slab)
            return
        ids = self.stored()[0] if self.tier.order is None else self.tier.order
        with self._lock:
            whole.put(self.tier, name, slab, values, ids)

    def load(
        self, slab: Tensor, ids: Tensor, scores: Tensor, stamps: Tensor, weight: Tensor
    ) -> Tensor:
        """Replace all that is stored by ``ids`` with ``weight`` (n, D). Returns their slab rows.

        Raises:
            CheckpointError: more ids than rows, or an id twice.
        """
        n = len(ids)
        if len(torch.unique(ids)) != n or len(scores) != n or len(stamps) != n:
            raise CheckpointError(f"{self.name}: an id is there twice, or has no score or stamp")
        known = (x.detach().cpu().long().contiguous() for x in (ids, scores, stamps))
        ids, scores, stamps = known
        if self.tier is not None:
            with self._lock:
                rows = whole.load(self.tier, slab, ids, scores, stamps, weight)
            self.take_fresh()
            return rows
        if n > self.capacity:
            raise CheckpointError(
                f"{self.name}: {n} ids for a table of {self.capacity} rows",
                tries=("a larger max_rows",),
            )
        rows = torch.arange(1, n + 1)
        self.index.load(ids, rows, scores, stamps)
        self.take_fresh()
        slab[1 : 1 + n] = weight.detach().to(slab)
        return rows
