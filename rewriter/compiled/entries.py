"""Entries of many dicts, asked at every call whether they are what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_ABSENT = object()


def _one_by_one(
    dicts: list[dict[str, Any]], keys: list[str], known: list[Any], absent: object
) -> bool:
    """Whether each dict has the very object known under its key, ``absent`` where it has none."""
    held = zip(dicts, keys, known, strict=True)
    return all([d.get(k, absent) is value for d, k, value in held])


Same = Callable[[list[dict[str, Any]], list[str], list[Any], object], bool]
same: Same = _one_by_one  # in whose place the entry puts the runtime's, which is quicker


class Entries:
    """What dicts have under keys, or that they do not, when this is made."""

    def __init__(self, places: Iterable[tuple[dict[str, Any], str]]) -> None:
        held = list(places)
        self._dicts, self._keys = [d for d, _ in held], [k for _, k in held]
        self._known = [d.get(k, _ABSENT) for d, k in held]

    def stand(self) -> bool:
        """Whether each entry is the very object that it was. One that is another may be equal."""
        return same(self._dicts, self._keys, self._known, _ABSENT)
