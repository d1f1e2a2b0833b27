"""Which pass of a sort by ``csrc/cuda/row_sort.cu`` takes which digits of which tables.

A table needs as many passes as its number of rows has digits. All tables end with the last pass, so
that their entries end up in one buffer; those with few rows start later.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

DIGIT = 10  # bits per pass, at most
SEGMENT = 10  # words of a Segment
_COUNTED, _OTHER = 1, 2  # as in row_sort.cu


class Pass(NamedTuple):
    """A pass of a sort: its Segments, starting at ``first``, and its counts."""

    first: int
    segments: int
    tiles: int
    first_count: int
    counts: int
    counted: bool  # whether linearise has done all counts already


class Plan:
    """What each pass of a sort does with each table.

    tables: (rows, entries, first key) of each; none is without entries. tile: entries per tile.
    words: all Segments, as words: first, for linearise, that of each table's first pass, then those
    of each pass. tiles: the number for all tables. counts: the number for all passes.
    """

    def __init__(self, tables: Sequence[tuple[int, int, int]], tile: int) -> None:
        # The number of rows is itself a key: that of ids without gradient.
        passes = [-(-rows.bit_length() // DIGIT) for rows, _, _ in tables]
        most = max(passes)
        starts = list(accumulate([entries for _, entries, _ in tables], initial=0))
        tiles = [-(-entries // tile) for _, entries, _ in tables]
        front: array[int] = array("q", [0]) * (SEGMENT * len(tables))
        rest: array[int] = array("q")
        self.passes: list[Pass] = []
        self.counts = 0
        for p in range(most):
            before = first_tile = segments = 0
            counted, first, first_count = True, len(tables) + len(rest) // SEGMENT, self.counts
            for k, (rows, entries, first_key) in enumerate(tables):
                own = p - (most - passes[k])
                if own < 0:
                    continue
                bits, n = rows.bit_length(), passes[k]
                shift = own * bits // n
                width = (own + 1) * bits // n - shift
                flags = (own == 0) * _COUNTED + (n % 2) * _OTHER
                fields = (
                    starts[k], entries, first_key, first_tile, tiles[k], self.counts,
                    starts[k] - before, shift, width, flags,
                )  # fmt: skip
                rest.extend(fields)
                if own == 0:
                    front[SEGMENT * k : SEGMENT * (k + 1)] = array("q", fields)
                counted = counted and own == 0
                segments += 1
                before += entries
                first_tile += tiles[k]
                self.counts += tiles[k] << width
            counts = self.counts - first_count
            self.passes.append(Pass(first, segments, first_tile, first_count, counts, counted))
        for k, first in enumerate(accumulate(tiles[:-1], initial=0)):
            front[SEGMENT * k + 3] = first
        self.words, self.tiles = front + rest, sum(tiles)


@lru_cache(64)
def plan(tables: tuple[tuple[int, int, int], ...], tile: int) -> Plan:
    """The Plan for ``tables``, made once."""
    return Plan(tables, tile)
