"""The user's settings for a dynamic table, and their checks."""

from __future__ import annotations

import math
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
_MOST_STEPS = 2**31 - 3  # how far back the id table can always tell steps (csrc/id_table.h)


@dataclass(frozen=True, slots=True)
class MinCount:
    """Store an id once it has been looked up ``count`` times in training. Until then lookups return
    its initial value, and its gradient is dropped.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Initial:
    """The distribution of initial rows: "normal" with mean ``a`` and standard deviation ``b``, or
    "uniform" between them.
    """

    kind: Kind
    a: float
    b: float

    def pack(self) -> Tensor:
        """As a tensor, (3,) float64."""
        return torch.tensor([float(self.kind == "uniform"), self.a, self.b], dtype=torch.float64)

    @staticmethod
    def unpack(packed: Tensor) -> Initial:
        """The inverse of :meth:`pack`."""
        uniform, a, b = map(float, packed)
        return Initial("uniform" if uniform else "normal", a, b)


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A dynamic table: it takes any int64 id, and makes rows as ids arrive.

    It is on the device of the module: in host memory, or on a GPU. There, rows are in buckets of
    128, each of which evicts by itself, and steps can be recorded, but not with tiers (see
    ``runtime.dynamic.cuda_table``). On many ranks, each owns the ids that a hash assigns to it.

    Args:
        max_rows: how many rows can be stored. On a GPU and without ``evict``, there is room for 1.7
            times as many, so that no bucket is full before the table is.
        max_bytes: the same in bytes ("2GiB", "500 MB", or a number): weights, optimizer state and
            the id table. Give one of the two, or ``tiers``.
        evict: which row to drop when the table is full. "lru": the least recently looked up; "lfu":
            the least often looked up (all counts are halved every ten lookups per row);
            "epoch_lru" and "epoch_lfu": the same, but earlier epochs first (``table.epoch``); a
            function from (n,) int64 ids to (n,) int64 scores: the lowest score, and an id with an
            even lower one is not stored. None: a full table raises. Rows that were looked up since
            the last optimizer step are never evicted.
        admit: ``MinCount(k)``; None stores every id at once.
        ttl: optimizer steps after which a row that was not looked up is forgotten; None: never.
        tiers: memory and disk, in place of the other budgets:
            ``[recast.Host("2GiB"), recast.Disk("/nvme/rows", "20GiB")]``. ``evict`` decides which
            rows go to disk ("lru" if it is None), and which are dropped when the disk is full. A
            row on disk is fetched when it is looked up; ``table.prefetch(ids)`` starts that early,
            for the next batch. Checkpoints contain all rows.
            On a GPU ``[recast.Device(...), recast.Host(...)]``, with or without a ``recast.Disk``:
            hot rows are on the GPU, the others below.
        initial: the distribution of initial rows; None: normal or uniform, with the mean and
            deviation of the module's present rows, which are themselves dropped.
        seed: for initial rows, which depend only on it, the name of the table and the id.
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
        """The id table's name for ``evict``."""
        if self.evict is None:
            return "never"
        return self.evict if isinstance(self.evict, str) else "given"


def check(name: str, given: object) -> Dynamic:
    """``given``, with bytes as a number. Raises UsageError or NotBuiltError if it is wrong."""
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
    if given.initial is not None and (why := _no_distribution(given.initial)):
        raise _wrong(
            name, f"initial={given.initial!r}: {why}",
            'initial=recast.dynamic.Initial("normal", 0, 0.01)',
            'initial=recast.dynamic.Initial("uniform", -0.01, 0.01)',
        )  # fmt: skip
    return given


def _no_distribution(initial: Initial) -> str | None:
    """Why no row can be drawn from ``initial``."""
    if initial.kind not in get_args(Kind):
        return f"kinds are {' and '.join(get_args(Kind))}"
    for number in (initial.a, initial.b):
        try:
            finite = math.isfinite(number)
        except TypeError:
            finite = False
        if not finite:
            return f"{number!r} is no finite number"
    if initial.kind == "normal" and initial.b < 0:
        return "a standard deviation is not negative"
    return None


def _wrong(name: str, what: str, *tries: str) -> UsageError:
    return UsageError(f"tables: {name}: {what}", tries=tries)


_FEW = 32  # with fewer numbers, no deviation is measured
_NORMALS_REACH = 1.8  # standard deviations; a uniform distribution ends at sqrt(3) of them


def initial_of(rows: Tensor) -> Initial:
    """The distribution that ``rows`` (n, D) seem to have been drawn from."""
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
