"""Dynamic tables in checkpoints of many ranks: the rows of all parts, one after the other.

They are written in the order of the ranks, under the names and shapes of one process, so a
checkpoint does not depend on the number of ranks. When one of many ranks loads it, it reads all ids
first, and then, 64 MiB at a time, those blocks of rows that contain ids of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recast.runtime.checkpoint.blocks import Blocks, whole
from recast.runtime.dynamic.module import _Dynamic
from recast.runtime.dynamic.parts import BY_ROW, kept
from recast.runtime.dynamic.table import DynamicTable
from recast.runtime.ranks import shards_state

Counts = dict[str, tuple[int, int, int]]


def spread(model: nn.Module) -> dict[str, DynamicTable]:
    """The dynamic tables that are spread over ranks, by the path of their module."""
    return {
        path: m.table
        for path, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, _Dynamic) and m.table.parts > 1
    }


def counts(model: nn.Module) -> Counts:
    """For each of these: rows stored here, ids waiting for MinCount, the lookups counted here."""
    return {
        path: (len(table.ids()), table.candidates().shape[1], table.index.looked_up)
        for path, table in spread(model).items()
    }


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's rows among those of all ranks: ``(first, total)``; likewise its waiting ids."""

    rows: tuple[int, int]
    seen: tuple[int, int]
    looked_up: int  # the sum over all ranks
    speaks: bool  # whether this rank writes what all ranks have in common

    def of(self, key: str, value: Tensor) -> tuple[tuple[int, ...], Blocks | None]:
        """The whole shape of entry ``key`` of a module's state, and the blocks to write here."""
        if key in BY_ROW:
            return self.by_row(value)
        if key == "seen":
            shape = (3, self.seen[1])
            return shape, Blocks(shape, [((0, self.seen[0]), value)])
        if key == "clock":
            value = value.clone()
            value[2] = self.looked_up
        return tuple(value.shape), whole(value) if self.speaks else None

    def by_row(self, value: Tensor) -> tuple[tuple[int, ...], Blocks]:
        """The same for a tensor with one entry per row of this rank."""
        shape = (self.rows[1], *value.shape[1:])
        at = (self.rows[0],) + (0,) * (value.dim() - 1)
        return shape, Blocks(shape, [(at, value.detach())])


def parts(found: Sequence[Counts], rank: int) -> dict[str, Part]:
    """The parts of ``rank``, from the :func:`counts` of all ranks."""

    def place(path: str, k: int) -> tuple[int, int]:
        numbers = [one[path][k] for one in found]
        return sum(numbers[:rank]), sum(numbers)

    return {
        path: Part(place(path, 0), place(path, 1), place(path, 2)[1], rank == 0)
        for path in found[rank]
    }


def split(name: str) -> tuple[str, str]:
    """A name in ``state_dict()`` as the path of its module and the entry there."""
    path, _, key = name.rpartition(".")
    return path, key


# --- loading -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Wanted:
    """A tensor with one entry per row of all ranks, of which this rank wants its own.

    ``ids``: returns the ids of all rows, once they are read. ``take``: called with this rank's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    table: DynamicTable
    ids: Callable[[], Tensor]
    take: Callable[[Tensor], object]


def rounds(wanted: Sequence[Wanted]) -> Iterator[dict[str, Blocks]]:
    """What to read, round by round: at most one block at a time, in as many rounds on all ranks."""
    for one in wanted:
        own = kept(one.table, one.ids())
        rows = torch.empty(len(own), *one.shape[1:], dtype=one.dtype)
        width = torch.Size(one.shape[1:]).numel() * one.dtype.itemsize
        step = max(1, shards_state.BLOCK // max(1, width))
        for first in range(0, one.shape[0], step):
            n = min(step, one.shape[0] - first)
            begin, end = torch.searchsorted(own, torch.tensor([first, first + n])).tolist()
            block = torch.empty(n if begin < end else 0, *one.shape[1:], dtype=one.dtype)
            at = (first,) + (0,) * (len(one.shape) - 1)
            yield {one.name: Blocks(one.shape, [(at, block)])}
            if begin < end:
                rows[begin:end] = block[own[begin:end] - first]
        one.take(rows)
