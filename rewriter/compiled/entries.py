"""Checks at every call that entries of many dicts are still the same objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

ABSENT = object()


def _one_by_one(
    dicts: list[dict[str, Any]], keys: list[str], known: list[Any], absent: object
) -> bool:
    """Whether each dict still has the known object under its key; ``absent`` means no entry."""
    held = zip(dicts, keys, known, strict=True)
    return all([d.get(k, absent) is value for d, k, value in held])


Same = Callable[[list[dict[str, Any]], list[str], list[Any], object], bool]
same: Same = _one_by_one  # api_link replaces it by the runtime's, which is faster


class Watch(Protocol):
    """Tells whether any of some dicts was written to."""

    def unwritten(self) -> bool:
        """True: none was since this was made or renewed. False: maybe one was."""

    def renew(self) -> None:
        """From now on."""


watch: Callable[[list[dict[Any, Any]]], Watch] | None = None  # the runtime's, by api_link


class EmptyDicts:
    """Whether ``dicts`` are empty."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self.dicts = list(dicts)
        self._watched = None if watch is None else watch(self.dicts)
        self._were_empty = False  # when the watch began, as far as is known

    def are_empty(self) -> bool:
        """Whether all of them are."""
        if self._watched is not None:
            if self._were_empty and self._watched.unwritten():
                return True
            self._watched.renew()
        self._were_empty = not any(self.dicts)
        return self._were_empty


class Entries:
    """What ``dicts`` have under ``keys``, one each: ``known``, or ABSENT, when this is made."""

    def __init__(self, places: Iterable[tuple[dict[str, Any], str]]) -> None:
        held = list(places)
        self.dicts, self.keys = [d for d, _ in held], [k for _, k in held]
        self._watched = None if watch is None else watch(self.dicts)
        self.renew()

    def renew(self) -> None:
        """Take what they have now for as good as what they had."""
        self._stood = False  # when the watch began, as far as is known
        self.known = [d.get(k, ABSENT) for d, k in zip(self.dicts, self.keys, strict=True)]

    def stand(self) -> bool:
        """Whether each entry is still the same object; a different object may be equal all the
        same.
        """
        if self._watched is not None:
            if self._stood and self._watched.unwritten():
                return True
            self._stood = False
            self._watched.renew()
        self._stood = same(self.dicts, self.keys, self.known, ABSENT)
        return self._stood
