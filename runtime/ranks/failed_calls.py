"""After a call failed on one rank only, with messages already sent, that rank must not start
another.

A batch of the wrong width fails in a dense layer, while the other ranks wait for rows. If the error
were caught and the next batch started, its ids would be taken for those rows, and torch ends the
process when sizes differ. So before its next call, a rank whose call failed asks whether the same
call failed on all others, as it does when ids are refused or when all batches are wrong. It asks
through the store of the process group, at no cost to calls that do not fail.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from recast.errors import RankError
from recast.runtime.ranks import faults

_HERE = threading.local()  # ranks that are threads count for themselves
_PATIENCE = 10  # heartbeat intervals, in which another rank may reach the same error


class _Failure(NamedTuple):
    call: int
    why: str


def begin() -> None:
    """Begin a call of a sharded model. Raises RankError if the last call failed here, but not on
    all other ranks.
    """
    failure: _Failure | None = getattr(_HERE, "failure", None)
    if failure is not None:
        _check_all(failure)
        _HERE.failure = None
        faults.withdraw_failure()
    _HERE.calls = getattr(_HERE, "calls", 0) + 1


def record(error: Exception) -> None:
    """Note that the current call failed with ``error``, perhaps on this rank only."""
    failure = _Failure(_HERE.calls, f"left a step by {faults.error_text(error)}")
    _HERE.failure = failure
    with contextlib.suppress(RuntimeError):  # the store may be gone, and the error is the user's
        _store().set(_key(failure.call, dist.get_rank()), failure.why)
        faults.announce_failure(failure.why)


def _check_all(failure: _Failure) -> None:
    store, here, world = _store(), dist.get_rank(), dist.get_world_size()
    keys = [_key(failure.call, rank) for rank in range(world)]
    try:
        store.wait(keys, timedelta(seconds=_PATIENCE * faults.INTERVAL))
    except RuntimeError as late:
        others = [rank for rank, key in enumerate(keys) if not store.check([key])]
        ranks = ("rank " if len(others) == 1 else "ranks ") + ", ".join(map(str, others))
        raise RankError(
            f"rank {here} {failure.why}",
            where=f"rank {here} of {world}, call {failure.call}",
            why=f"{ranks} did not leave it and cannot take part in another",
            tries=("let that error end the process: it ends the others, by its name",
                   "restart from the last recast.checkpoint"),
        ) from late  # fmt: skip


def _key(call: int, rank: int) -> str:
    return f"recast/failed_calls/{call}/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
