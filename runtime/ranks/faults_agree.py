"""Checks that all ranks have the same graph, plan and model; else all of them say which differ, and
stop.

This goes through the store of the process group, not through a collective: ranks that differ would
not issue the same collectives, and this way a rank that never arrives can be named.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from recast.errors import RankError, UsageError
from recast.runtime.ranks import faults

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TRIES = "the same model, seed of its construction, options and versions on every rank"
_TURN = threading.local()  # ranks that are threads count for themselves
_LOOK = 1.0  # seconds between two checks whether a missing rank has gone
_PAUSE, _LONG_PAUSE = 0.0005, 0.05  # seconds between two checks whether it has come
_LONGEST = 100_000  # characters of a text that is compared line by line


def agree(facts: Mapping[str, str], *, tries: str = _TRIES, timeout: float | None = None) -> None:
    """Compare ``facts`` (name to text) over all ranks of the default group.

    ``tries``: what to do if they differ. ``timeout``: seconds to wait for each rank; None: the
    group's timeout.

    Raises:
        UsageError: on every rank, if any differs: which ranks, in what, and the first line.
        RankError: a rank did not come within ``timeout`` seconds.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    rank, world = dist.get_rank(), dist.get_world_size()
    timeout = store.timeout.total_seconds() if timeout is None else timeout
    _TURN.count = getattr(_TURN, "count", 0) + 1
    prefix = f"recast/agree/{_TURN.count}"
    mine = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in facts.items()}
    store.set(f"{prefix}/{rank}", json.dumps(mine))
    found = [json.loads(text) for text in _all(store, prefix, world, timeout)]
    names = [name for name in mine if len({f.get(name) for f in found}) > 1]
    if not names:
        return
    name = names[0]
    usual, _ = Counter(f.get(name) for f in found).most_common(1)[0]
    one = next(r for r, f in enumerate(found) if f.get(name) == usual)
    odd = [r for r, f in enumerate(found) if f.get(name) != usual]
    if rank in (one, odd[0]):
        store.set(f"{prefix}/text/{rank}", facts[name][:_LONGEST])
    texts = [_get(store, f"{prefix}/text/{r}", timeout, r) for r in (one, odd[0])]
    ranks = ("rank " if len(odd) == 1 else "ranks ") + ", ".join(map(str, odd))
    raise UsageError(
        f"{ranks} of {world} differ{'s' if len(odd) == 1 else ''} from the others in:"
        f" {', '.join(names)}",
        why=_first_difference(name, texts, (one, odd[0])),
        tries=(tries,),
    )


def _all(store: Store, prefix: str, world: int, timeout: float) -> list[str]:
    return [_get(store, f"{prefix}/{r}", timeout, r) for r in range(world)]


def _get(store: Store, key: str, timeout: float, rank: int) -> str:
    """The value at ``key`` from ``rank``. Raises RankError if it has gone, or after ``timeout``."""
    began = looked = time.monotonic()
    try:
        while not store.check([key]):
            now = time.monotonic()
            if now - began > timeout:
                raise _late(f"rank {rank} did not come to recast.optimize within {timeout:.0f} s")
            if now - looked > _LOOK:
                looked, gone = now, faults.why_gone(rank)
                if gone is not None:
                    raise _late(f"recast.optimize: rank {rank} {gone}")
            # Polling, as torch's own wait() logs a warning at each timeout.
            time.sleep(min(_LONG_PAUSE, _PAUSE + (now - began) / 20))
        return store.get(key).decode()
    except RankError:
        raise
    except RuntimeError as error:
        raise _late(f"recast.optimize: rank {rank} is out of reach: the store is gone") from error


def _late(what: str) -> RankError:
    return RankError(what, why="all ranks call it, as many times", tries=("what that rank wrote",))


def _first_difference(name: str, texts: list[str], ranks: tuple[int, int]) -> str:
    for number, lines in enumerate(zip_longest(*(t.splitlines() for t in texts)), 1):
        if lines[0] != lines[1]:
            here = [
                f"rank {r}: {'(ends)' if line is None else line.strip()[:160]}"
                for r, line in zip(ranks, lines, strict=True)
            ]
            return f"{name}, line {number}: {'; '.join(here)}"
    return f"{name} differs behind its first {_LONGEST} characters"
