"""What a dynamic table tells of itself: counts, the rows that changed, the ids that went."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.dynamic.all_rows import AllRows, empty


class Account(AllRows):
    """The part of a table that keeps its books.

    Attributes:
        epoch: of "epoch_lru" and "epoch_lfu"; assign the number of the day, say.
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
        """Begin to log ids that go; the number of the step that comes."""
        with self._lock:
            if self._log is None:
                self._log, self._since = [], int(self.index.step)
            return int(self.index.step)

    def take_log(self, since: int) -> Tensor:
        """Ids that went since a mark, or since this was last asked. Raises UsageError."""
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
        """These rows were written by somebody else, and have no optimizer state."""
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
        """(3, m) int64: ids that wait for MinCount, how often each was looked up, and when last."""
        return torch.stack(self.index.candidates(empty))

    def load_candidates(self, seen: Tensor) -> None:
        """Take what :meth:`candidates` gave, in place of what is here."""
        self.index.load_candidates(*(row.contiguous() for row in seen.cpu()))

    def counters(self) -> dict[str, int]:
        """inserted, evicted, expired and refused rows; hits and misses of lookups in training.

        With tiers also ``in_memory``, ``on_disk`` and ``new``, of which a hit is one of the first
        two; rows ``demoted`` to disk and ``promoted`` from it, ``ahead`` those read before they
        were asked for; bytes ``read`` and ``written``.
        """
        counted = dict(self.index.counters())
        return counted if self.tier is None else self.tier.add_to(counted)

    def told(self) -> list[str]:
        """The table as it is, in a sentence for the report."""
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
