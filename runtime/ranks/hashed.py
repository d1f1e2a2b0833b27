"""Which rank owns an id of a dynamic table: that is decided by the id's hash.

    part(id) = top 31 bits of mix(id) mod parts,   mix: xor by a shifted self and multiply, twice

It depends on the id alone, and is the same on every machine. The id table of a rank uses another
hash, so ids of one part do not crowd in a few of its buckets. Multipliers: Steele et al., "Fast
splittable pseudorandom number generators", 2014 (variant 13 by Stafford).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64  # as int64


def part_of(ids: Tensor, parts: int) -> Tensor:
    """(n,) integers of any value -> (n,) int64, each from 0 to ``parts - 1``."""
    x = ids.long()
    x = (x ^ _down(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _down(x, 27)) * _MULTIPLIERS[1]
    return torch.remainder(_down(x, 33), parts)


def _down(x: Tensor, bits: int) -> Tensor:
    """``x`` shifted to the right by ``bits``, zeros coming in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
