"""What a user says of a dynamic table, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.ranks.initial_rows import Kind
from recast.runtime.tiers import settings as tiers

Policy = Literal["lru", "lfu", "epoch_lru", "epoch_lfu"]
Score = Callable[[Tensor], Tensor]
_MOST_STEPS = 2**31 - 3  # that the id table can look back, always (csrc/id_table.h)


@dataclass(frozen=True, slots=True)
class MinCount:
    """An id is stored once it was looked up ``count`` times in training; until then it is answered
    by its initial value, and its gradient is dropped.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Initial:
    """How new rows begin: "normal" of mean ``a`` and deviation ``b``, or "uniform" between them."""

    kind: Kind
    a: float
    b: float

    def pack(self) -> Tensor:
        """(3,) float64."""
        return torch.tensor([float(self.kind == "uniform"), self.a, self.b], dtype=torch.float64)

    @staticmethod
    def unpack(packed: Tensor) -> Initial:
        """What :meth:`pack` packed."""
        uniform, a, b = map(float, packed)
        return Initial("uniform" if uniform else "normal", a, b)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A table without end: any int64 id, rows as ids come.

    It is where the module is: in the memory of the host, or of a GPU, where rows are in buckets of
    128, each of which evicts by itself, and where steps can be recorded, but not with tiers (see
    ``runtime.dynamic.cuda_table``). On many ranks each has the ids that a hash gives it.

    Args:
        max_rows: the most rows that are stored. On a GPU and without ``evict`` room is made for 1.7
            times as many, so that no bucket is full before.
        max_bytes: the same in bytes ("2GiB", "500 MB", or a number): weights, optimizer state and
            the map of ids. One of the two.
        evict: which row makes room when the table is full: "lru" the one not looked up for longest;
            "lfu" the least often looked up (all counts are halved every ten lookups a row);
            "epoch_lru" and "epoch_lfu" the same, those of earlier epochs first (``table.epoch``); a
            function of (n,) int64 ids that gives (n,) int64 scores: the lowest one, and an id whose
            score is lower still is not stored. None: a full table raises. Rows that were looked up
            since the last optimizer step are never evicted.
        admit: ``MinCount(k)``; None stores every id at once.
        ttl: optimizer steps after which a row that was not looked up is forgotten; None: never.
        tiers: memory and disk under it, in place of the other budgets:
            ``[recast.Host("2GiB"), recast.Disk("/nvme/rows", "20GiB")]``. ``evict`` decides who
            goes to disk, "lru" where it is None, and who goes for good when the disk is full. A row
            that is on disk is fetched when it is looked up; ``table.prefetch(ids)`` begins that for
            the next batch. Checkpoints hold all rows.
            On a GPU ``[recast.Device(...), recast.Host(...)]``, with a ``recast.Disk`` or none: the
            hot rows are there, and the others below.
        initial: how rows begin; None takes normal or uniform, mean and deviation from the rows that
            the module has, which are themselves dropped.
        seed: of the initial values, which depend on it, the name of the table and the id only.
    """

    max_rows: int | None = None
    max_bytes: int | str | None = None
    evict: Policy | Score | None = None
    admit: MinCount | None = None
    ttl: int | None = None
    tiers: Sequence[Any] = ()
    initial: Initial | None = None
    seed: int = 0

    @property
    def policy(self) -> str:
        """The name by which the id table knows ``evict``."""
        if self.evict is None:
            return "never"
        return self.evict if isinstance(self.evict, str) else "given"


def check(name: str, given: object) -> Dynamic:
    """``given``, its bytes as a number. Raises what is wrong with it: UsageError, NotBuiltError."""
    if not isinstance(given, Dynamic):
        raise _wrong(
            name, f"{given!r} is no recast.Dynamic", f'tables={{"{name}": recast.Dynamic(...)}}'
        )
    budgets = [given.max_rows, given.max_bytes, tiers.check(name, given.tiers)]
    if sum(budget is not None for budget in budgets) != 1:
        count = sum(budget is not None for budget in budgets)
        raise _wrong(
            name,
            f"a budget is one of max_rows, max_bytes and tiers, and {count or 'none'} are given",
            "max_rows=1_000_000",
        )
    if isinstance(given.max_bytes, str):
        number = tiers.bytes_of(name, given.max_bytes, 'max_bytes="2GiB"')
        given = replace(given, max_bytes=number)
    for field in ("max_rows", "max_bytes", "ttl"):
        value = getattr(given, field)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise _wrong(name, f"{field}={value!r} is not a positive number")
    if given.ttl is not None and given.ttl > _MOST_STEPS:
        raise _wrong(name, f"ttl={given.ttl} is more than the {_MOST_STEPS} steps it can count")
    if isinstance(given.evict, str) and given.evict not in get_args(Policy):
        known = ", ".join(get_args(Policy))
        raise _wrong(name, f"evict={given.evict!r} is none of {known}, a function and None")
    if given.evict is not None and not isinstance(given.evict, str) and not callable(given.evict):
        raise _wrong(name, f"evict={given.evict!r} is neither a name nor a function of ids")
    if given.admit is not None and not isinstance(given.admit, MinCount):
        raise _wrong(name, f"admit={given.admit!r}", "admit=recast.MinCount(3)")
    count = 1 if given.admit is None else given.admit.count
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _wrong(
            name, f"admit={given.admit!r}: an id is looked up a number of times, from 1 on"
        )
    if isinstance(given.seed, bool) or not isinstance(given.seed, int):
        raise _wrong(name, f"seed={given.seed!r} is not a whole number")
    if given.initial is not None and not isinstance(given.initial, Initial):
        raise _wrong(
            name, f"initial={given.initial!r}", 'initial=recast.dynamic.Initial("normal", 0, 0.01)'
        )
    return given


def _wrong(name: str, what: str, *tries: str) -> UsageError:
    return UsageError(f"tables: {name}: {what}", tries=tries)


_FEW = 32  # numbers of which no deviation is measured
_NORMALS_REACH = 1.8  # deviations; those of a uniform distribution end at the root of 3


def initial_of(rows: Tensor) -> Initial:
    """How ``rows`` (n, D) seem to have been drawn: what new ones are like them."""
    numbers = rows.detach().double().reshape(-1)
    if numbers.numel() == 0:
        return Initial("normal", 0.0, 1.0)
    low, high = float(numbers.min()), float(numbers.max())
    mean, deviation = float(numbers.mean()), float(numbers.std(correction=0))
    if low == high:
        return Initial("normal", low, 0.0)
    if numbers.numel() < _FEW or not torch.isfinite(numbers).all():
        return Initial("normal", 0.0, 1.0)
    if max(high - mean, mean - low) < _NORMALS_REACH * deviation:
        return Initial("uniform", low, high)
    return Initial("normal", mean, deviation)
