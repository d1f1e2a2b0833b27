"""The user's settings for tiers: ``[recast.Host("2GiB"), recast.Disk("/nvme/rows", "20GiB")]``; for
a table on a GPU, ``recast.Device("8GiB")`` before them.
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
    """Host memory: at most ``budget`` bytes ("2GiB", "500 MB", or a number) for one table,
    including its ids and the memory that the disk tier needs. On many ranks each has an equal
    share.
    """

    budget: Bytes


@dataclass(frozen=True, slots=True)
class Disk:
    """Files of at most ``budget`` bytes in ``path``/<name of the table>. They take more only during
    compaction, when new files are written before the old ones are deleted. On many ranks each has
    an equal share, in ``path``/rank-<number>/<name of the table>.

    The files are temporary and belong to the training process. What outlives it is a checkpoint,
    which contains all rows in memory and on disk. Files left by a process that has ended are
    deleted when the next one needs the folder; a folder that a running process uses, or one with
    other files, is refused.
    """

    path: str | os.PathLike[str]
    budget: Bytes


@dataclass(frozen=True, slots=True)
class Device:
    """GPU memory, above host memory: at most ``budget`` bytes for a table whose module is on that
    GPU, including its ids and the rows for ids that are not stored. Each step waits for the GPU to
    learn which rows are missing, so steps are not recorded. On many ranks each has an equal share.
    """

    budget: Bytes


@dataclass(frozen=True, slots=True)
class Tiers:
    """The checked tiers of a table: ``device``, ``host`` and ``disk`` in bytes, 0 for none;
    ``path``: the folder of all tables.
    """

    host: int
    disk: int
    path: Path
    device: int = 0

    def of_part(self, part: int, parts: int) -> Tiers:
        """The share of one of ``parts`` ranks in each budget, with a folder of its own."""
        if parts == 1:
            return self
        folder = self.path / f"rank-{part}"
        return Tiers(self.host // parts, self.disk // parts, folder, self.device // parts)


def share(parts: int) -> str:
    """What an error adds to a budget that has been divided by ``parts``."""
    return "" if parts == 1 else f", one of {parts} shares,"


def check(name: str, given: Sequence[object]) -> Tiers | None:
    """``given`` as :class:`Tiers`; None if it is empty.

    Raises:
        UsageError: it is not a list of tiers in a valid order with valid budgets.
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
    """``given`` in bytes, such as "2GiB" or a number. ``name``: the table's; ``tries``: advice for
    the error. Raises UsageError if it is not a number of bytes.
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
