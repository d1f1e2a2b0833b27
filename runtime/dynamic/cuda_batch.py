"""What the id table of a GPU returns for a batch of ids, and how large such a table has to be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = 128  # per bucket, at most
FRESH, TOOK = 1, 2
_SURE = 6.0  # standard deviations between a bucket's mean and its being full


@dataclass(frozen=True, slots=True)
class Batch:
    """What the id table returns for a batch of ids; (n,) each.

    ids, rows: int64. what: int32, bit 0: the row is new to its id; bit 1: it was another id's,
    which is in ``gone`` (undefined elsewhere). facts: in a table that demotes, (n, 2) int64, the
    score and the last step of the ids in ``gone``.
    """

    ids: Tensor
    rows: Tensor
    what: Tensor
    gone: Tensor | None = None
    facts: Tensor | None = None

    def fresh(self, spare: int) -> Tensor:
        """(n,) the rows that are new to their ids, with row ``spare`` in place of the others.

        So an ``index_put`` of constants need not know how many are new, and does not wait for the
        GPU.
        """
        return torch.where((self.what & FRESH) != 0, self.rows, spare)


def slots_for(ids: int) -> int:
    """How many slots a table needs to hold ``ids`` ids without eviction.

    With m ids per bucket on average, a bucket of 128 slots is unlikely to overflow if
    m + 6 sqrt(m) = 128.
    """
    root = (-_SURE + math.sqrt(_SURE * _SURE + 4 * SLOTS)) / 2
    return max(SLOTS, math.ceil(ids * SLOTS / (root * root)))
