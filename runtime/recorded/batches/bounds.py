"""How much room recorded work gives to tensors whose length differs from batch to batch."""

from __future__ import annotations

from collections.abc import Collection

from recast.runtime.recorded.batches.batch import Batch

_CHUNKS = 8  # a bound is rounded up to an eighth of its power of two


class Bounds:
    """How much room each ragged tensor of a batch is given.

    Args:
        most: the bound for all; None is the longest seen, rounded up.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._seen: dict[int, int] = {}

    def of(self, batch: Batch, ragged: Collection[int]) -> list[int | None] | None:
        """A bound for each tensor of ``batch``, None for those that are not ``ragged``. Returns
        None when one of them is longer than the declared bound.
        """
        found: list[int | None] = [None] * len(batch.tensors)
        for k in ragged:
            length = batch.tensors[k].shape[0]
            if self._most is not None:
                if length > self._most:
                    return None
                found[k] = self._most
            else:
                if length > self._seen.get(k, -1):
                    self._seen[k] = rounded(length)
                found[k] = self._seen[k]
        return found


def rounded(length: int) -> int:
    """``length`` rounded up, so that lengths that differ by chance get the same bound."""
    unit = max(64, (1 << max(length - 1, 1).bit_length()) // (2 * _CHUNKS) * 2)
    return -(-length // unit) * unit
