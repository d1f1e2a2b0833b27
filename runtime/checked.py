"""Ids outside their tables on a GPU: left out and counted, or, in checked mode, an error at once.

On a CPU they are always an error. On a GPU, raising would mean to wait for the device at every
call. So by default the kernels leave such ids out and count them in memory that the host can read
without waiting, and the next call warns, once per call site. In checked mode each call waits and
raises the same IdError as on a CPU::

    with checked():
        model(*batch)

``RECAST_CHECKED=1`` sets it for a whole process.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Iterator

from torch import Tensor

from recast.errors import RecastWarning

_PLACE_BITS = 40  # of a first error: ~(lookup << 40 | place), see csrc/cuda/embedding_forward.cu

_checked = os.environ.get("RECAST_CHECKED", "0") not in ("", "0")
_live: weakref.WeakSet[Counts] = weakref.WeakSet()
_gone = 0


@contextlib.contextmanager
def checked(on: bool = True) -> Iterator[None]:
    """Within the context, check ids and offsets on a GPU before a call returns, in all threads.
    Inside the capture of a CUDA graph this is not possible; there they are only counted.
    """
    global _checked
    before, _checked = _checked, on
    try:
        yield
    finally:
        _checked = before


def is_checked() -> bool:
    """Whether calls wait for the device and raise."""
    return _checked


def bad_ids() -> int:
    """How many ids and offsets GPU kernels have left out in this process so far."""
    return _gone + sum(sum(counts.read()) for counts in _live)


def since(before: int) -> list[str]:
    """A sentence that says how many more :func:`bad_ids` there are than ``before``; none if no
    more.
    """
    count = bad_ids() - before
    what = "ids and offsets outside their tables were left out on the GPU since"
    return [f"{count} {what}; recast.checked() raises where it happens"] if count > 0 else []


class Counts:
    """What the kernels of one call site left out.

    words: (4,) int64 that kernels write and the host reads: how many ids, the first of them, how
    many offsets, the first of them.
    """

    def __init__(self, words: Tensor, site: str, tables: tuple[int, ...]) -> None:
        self.words, self._seen = words, words.numpy()
        self._site, self._tables, self._told = site, tables, False
        _live.add(self)
        weakref.finalize(self, _keep, self._seen).atexit = False

    def read(self) -> tuple[int, int]:
        """How many ids and how many offsets."""
        return int(self._seen[0]), int(self._seen[2])

    def look(self) -> None:
        """Warn, once, if any were left out."""
        if not self._told and any(self.read()):
            self._told = True
            warnings.warn(self.sentence(), RecastWarning, stacklevel=2)

    def sentence(self) -> str:
        """How many, where the first of them stood, and what to do."""
        ids, offsets = self.read()
        parts = []
        if ids:
            parts.append(f"{_plural(ids, 'id')} outside the table, first {self._first(1)}")
        if offsets:
            parts.append(f"{_plural(offsets, 'bag')} of wrong offsets, first {self._first(3)}")
        return (
            f"{self._site} left out {' and '.join(parts)};"
            " recast.checked() or RECAST_CHECKED=1 raises where it happens"
        )

    def _first(self, word: int) -> str:
        packed = ~int(self._seen[word])
        lookup, place = packed >> _PLACE_BITS, packed & ((1 << _PLACE_BITS) - 1)
        return f"at place {place} of lookup {lookup} (table {self._tables[lookup]})"


def _keep(seen: object) -> None:
    """Count on what a site counted that is gone."""
    global _gone
    _gone += int(seen[0]) + int(seen[2])  # type: ignore[index]


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
