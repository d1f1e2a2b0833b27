"""Runs something on one rank or on all, such that all ranks continue or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from recast.errors import CheckpointError, RecastError, UsageError
from recast.runtime.ranks import faults

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")


class Ranks:
    """The ranks of ``group`` (None: the default one); without process groups, this process."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.world = 1 if self.alone else dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.world
        with faults.collective("checkpoint"):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def check_same(self, call: str, **given: str) -> None:
        """Raise UsageError, on every rank, unless all have been ``given`` the same arguments."""
        for rank, other in enumerate(all_given := self.gather(given)):
            for name, value in other.items():
                if value != all_given[0][name]:
                    raise UsageError(
                        f"{call}: rank {rank} has {name} {value}, rank 0 {all_given[0][name]}",
                        why="all ranks write and read one checkpoint together",
                        tries=("the same arguments on every rank",),
                    )

    def together(self, fn: Callable[[], _T]) -> _T:
        """The result of ``fn()`` on this rank; if it raised on any rank, raises on all."""
        value, error = _tried(fn)
        errors = self.gather(error)
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                other.add_note(f"on rank {rank}")
                raise other
        assert value is not None
        return value[0]

    def first(self, fn: Callable[[], _T]) -> _T:
        """The result of ``fn()`` on rank 0, on every rank; if it raised, raises on all."""
        value, error = _tried(fn) if self.rank == 0 else (None, None)
        if not self.alone:
            told: list[Any] = [(value, error)]
            with faults.collective("checkpoint"):
                dist.broadcast_object_list(told, group=self.group, group_src=0)
            value, error = told[0]
        if error is not None:
            raise error
        assert value is not None
        return value[0]


def _tried(fn: Callable[[], _T]) -> tuple[tuple[_T] | None, Exception | None]:
    try:
        return (fn(),), None
    except RecastError as error:
        return None, error
    except Exception as error:  # another rank might be unable to unpickle it
        known = CheckpointError(f"{type(error).__name__}: {error}")
        known.__cause__ = error
        return None, known
