"""A lower bound of what a call of an op costs: arithmetic and memory traffic.

Counts are of the forward pass, with every operand read or written once; they give a roofline time.
Ids are assumed distinct; the traffic of a table is the rows that are read, not all of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cost:
    """``flops``: operations, a multiply-add being two; ``bytes``: moved to or from memory."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The roofline time: that of arithmetic or of memory, whichever is longer."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def moved(*tensors: torch.Tensor | None) -> int:
    """Bytes of the given tensors, each once."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of ``costs``."""
    return sum(costs, Cost())
