"""The bookkeeping of a dynamic table: counts, changed rows, dropped ids."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.dynamic.all_rows import AllRows, empty


class Bookkeeping(AllRows):
    """The part of a table that does the bookkeeping.

    Attributes:
        epoch: used by "epoch_lru" and "epoch_lfu"; set it, for example, to the number of the day.
    """

    part: int
    parts: int
    _fresh: list[Tensor]
    _log: list[Tensor] | None
    _since: int

    @property
    def epoch(self) -> int:
        return int(self.index.epoch)

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.index.epoch = number

    def mark(self) -> int:
        """Start to log ids that are dropped; returns the number of the next step."""
        with self._lock:
            if self._log is None:
                self._log, self._since = [], int(self.index.step)
            return int(self.index.step)

    def take_log(self, since: int) -> Tensor:
        """Ids dropped since the mark ``since``, or since the last call. Raises UsageError if there
        is no such mark.
        """
        with self._lock:
            if self._log is None or since < self._since:
                raise UsageError(
                    f"{self.name}: nothing is known of step {since}",
                    why="what goes is noted from the first mark on",
                    tries=("since = recast.dynamic.mark(module)",),
                )
            log, self._log = self._log, []
        return torch.unique(torch.cat(log)) if log else empty(0)

    def renew(self, rows: Tensor, gone: Tensor) -> None:
        """Note that ``rows`` have been written from outside and need new optimizer state, and that
        the ids ``gone`` were dropped.
        """
        with self._lock:
            self._fresh.append(rows)
            if self.tier is not None:
                self.tier.unstepped = rows
            if self._log is not None and len(gone):
                self._log.append(gone)

    def erase(self, ids: Tensor) -> int:
        """Forget these ids; returns how many were stored. Not between a lookup and its step."""
        flat = ids.long().reshape(-1).contiguous()
        with self._lock:
            below = 0 if self.tier is None else self.tier.erase(flat)
            erased = int(self.index.erase(flat)) + below
            self._keep_gone()
        return erased

    def _keep_gone(self) -> None:
        gone, rows = self.index.take_gone(empty)
        if self.tier is not None:
            own = gone
            gone = torch.cat([gone, *self.tier.gone])
            self.tier.gone.clear()
        if self._log is not None and len(gone):
            self._log.append(gone)
        if self.tier is not None:
            self.tier.forget(own, rows)

    def candidates(self) -> Tensor:
        """(3, m) int64: ids waiting for MinCount, their lookups, and the step of the last one."""
        return torch.stack(self.index.candidates(empty))

    def load_candidates(self, seen: Tensor) -> None:
        """Replace the waiting ids by those from :meth:`candidates`."""
        self.index.load_candidates(*(row.contiguous() for row in seen.cpu()))

    def counters(self) -> dict[str, int]:
        """inserted, evicted, expired and refused rows; hits and misses of lookups in training.

        With tiers also lookups ``in_memory``, ``on_disk`` (both are hits) and ``new``; rows
        ``demoted`` to disk and ``promoted`` from it, ``ahead`` of these prefetched; bytes ``read``
        and ``written``.
        """
        counted = dict(self.index.counters())
        return counted if self.tier is None else self.tier.add_to(counted)

    def told(self) -> list[str]:
        """The present state of the table, in sentences for the report."""
        c = self.counters()
        asked = c["hits"] + c["misses"]
        below = 0 if self.tier is None else self.tier.capacity
        rate = f"{100 * c['hits'] / asked:.1f} % of {asked} lookups hit" if asked else "no lookups"
        return [
            f"{self.name}{'' if self.parts == 1 else f' (part {self.part + 1} of {self.parts})'}:"
            f" {len(self)} of {self.capacity + below} rows, {rate}; {c['inserted']} inserted,"
            f" {c['evicted']} evicted, {c['expired']} expired, {c['refused']} refused",
            *([] if self.tier is None else self.tier.told()),
        ]
