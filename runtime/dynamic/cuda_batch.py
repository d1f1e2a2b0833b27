"""What a batch of ids was given by the id table of a GPU, and how large such a table has to be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = 128  # of a bucket, at most
FRESH, TOOK = 1, 2
_SURE = 6.0  # deviations that a bucket is from being full


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch of ids was given: (n,) each.

    ids, rows: int64. what: int32, bit 0 where the row is new to its id, bit 1 where it was
    another's, whose id is in ``gone`` then, and nothing elsewhere. facts: (n, 2) int64, the score
    and the last step of who is in ``gone``, of a table that demotes.
    """

    ids: Tensor
    rows: Tensor
    what: Tensor
    gone: Tensor | None = None
    facts: Tensor | None = None

    def fresh(self, spare: int) -> Tensor:
        """(n,) the rows that are new to their ids, and row ``spare`` in the place of others.

        An ``index_put`` of constants needs no count of them, and so no wait for the GPU.
        """
        return torch.where((self.what & FRESH) != 0, self.rows, spare)

    def gone_ids(self) -> Tensor:
        """(m,) ids that lost their rows, in the order of the batch; waits for the GPU."""
        if self.gone is None:
            return self.ids[:0]
        return self.gone[(self.what & TOOK) != 0]


def slots_for(ids: int) -> int:
    """Slots of a table that is to hold ``ids`` and never to evict.

    Of buckets with m ids in the mean, none of 128 slots is likely to be over: m + 6 sqrt(m) = 128.
    """
    root = (-_SURE + math.sqrt(_SURE * _SURE + 4 * SLOTS)) / 2
    return max(SLOTS, math.ceil(ids * SLOTS / (root * root)))
