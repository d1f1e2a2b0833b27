"""Checks at every call that entries of many dicts are still the same objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_ABSENT = object()


def _one_by_one(
    dicts: list[dict[str, Any]], keys: list[str], known: list[Any], absent: object
) -> bool:
    """Whether each dict still has the known object under its key; ``absent`` means no entry."""
    held = zip(dicts, keys, known, strict=True)
    return all([d.get(k, absent) is value for d, k, value in held])


Same = Callable[[list[dict[str, Any]], list[str], list[Any], object], bool]
same: Same = _one_by_one  # api_link replaces it by the runtime's, which is faster


class Entries:
    """What dicts have under given keys, or that they have nothing, when this is made."""

    def __init__(self, places: Iterable[tuple[dict[str, Any], str]]) -> None:
        held = list(places)
        self._dicts, self._keys = [d for d, _ in held], [k for _, k in held]
        self._known = [d.get(k, _ABSENT) for d, k in held]

    def stand(self) -> bool:
        """Whether each entry is still the same object; a different object may be equal all the
        same.
        """
        return same(self._dicts, self._keys, self._known, _ABSENT)
