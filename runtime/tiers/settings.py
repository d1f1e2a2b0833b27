"""What a user says of tiers: ``[recast.Host("2GiB"), recast.Disk("/nvme/rows", "20GiB")]``, with
``recast.Device("8GiB")`` before them for a table on a GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recast.errors import UsageError

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip

Bytes = int | str


@dataclass(frozen=True, slots=True)
class Host:
    """Memory of the host: at most ``budget`` bytes ("2GiB", "500 MB", or a number) for one table,
    with its ids and what the disk tier needs of memory. On many ranks each has an equal share.
    """

    budget: Bytes


@dataclass(frozen=True, slots=True)
class Disk:
    """Files of at most ``budget`` bytes in ``path``/<name of the table>; more only while some of
    them are compacted, as the new ones are written before the old ones go. On many ranks each has
    an equal share, in ``path``/rank-<number>/<name of the table>.

    They are room to work in and belong to the process that trains: what outlives it is a
    checkpoint, which holds all rows of memory and disk. What a process that has ended left there is
    dropped when the next one needs the place; a folder of a process that runs, or one with files
    that are no tier's, is refused.
    """

    path: str | os.PathLike[str]
    budget: Bytes


@dataclass(frozen=True, slots=True)
class Device:
    """Memory of a GPU, over that of the host: at most ``budget`` bytes for a table whose module is
    there, with its ids and rows for those that are not stored. Every step waits for the GPU to hear
    which rows are missing, so it is not recorded. On many ranks each has an equal share.
    """

    budget: Bytes


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of a table, checked: ``device``, ``host`` and ``disk`` bytes, 0 for none, and the
    folder of all tables.
    """

    host: int
    disk: int
    path: Path
    device: int = 0

    def of_part(self, part: int, parts: int) -> Tiers:
        """What one of ``parts`` ranks has of it: its share of each, in a folder of its own."""
        if parts == 1:
            return self
        folder = self.path / f"rank-{part}"
        return Tiers(self.host // parts, self.disk // parts, folder, self.device // parts)


def share(parts: int) -> str:
    """What an error adds to a budget that is one of ``parts``."""
    return "" if parts == 1 else f", one of {parts} shares,"


def check(name: str, given: Sequence[object]) -> Tiers | None:
    """``given`` as :class:`Tiers`; None where there are none.

    Raises:
        UsageError: anything that is wrong.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise _wrong(name, f"tiers={given!r} is not a list of tiers")
    if not given:
        return None
    kinds = [type(tier) for tier in given]
    if kinds not in ([Host, Disk], [Device, Host], [Device, Host, Disk]):
        raise _wrong(name, f"tiers={list(given)!r}: they are memory, and disk under it")
    sizes = {type(tier): bytes_of(name, tier.budget) for tier in given}  # type: ignore[attr-defined]
    disk = given[-1]
    try:
        path = Path(disk.path) if isinstance(disk, Disk) else Path()
    except TypeError as error:
        raise _wrong(name, f"{disk!r}: the path is no path") from error
    return Tiers(sizes[Host], sizes.get(Disk, 0), path, sizes.get(Device, 0))


_EXAMPLE = 'tiers=[recast.Host("2GiB"), recast.Disk("/nvme/rows", "20GiB")]'
_ON_GPU = 'tiers=[recast.Device("8GiB"), recast.Host("64GiB")], and a recast.Disk under it or none'


def bytes_of(name: str, given: object, *tries: str) -> int:
    """The bytes of "2GiB". Raises UsageError where it is none; ``name``: of the table, ``tries``:
    what else might be written.
    """
    number = -1
    if isinstance(given, int) and not isinstance(given, bool):
        number = given
    elif isinstance(given, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", given)
        if found is not None and found[2].upper() in _UNITS:
            number = int(float(found[1]) * _UNITS[found[2].upper()])
    if number < 1:
        raise _wrong(name, f"a budget of {given!r} is no number of bytes", *tries)
    return number


def _wrong(name: str, what: str, *tries: str) -> UsageError:
    return UsageError(f"tables: {name}: {what}", tries=tries or (_EXAMPLE, _ON_GPU))
