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
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from recast.errors import RankError, UsageError
from recast.runtime.ranks import faults

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TRIES = "the same model, seed of its construction, options and versions on every rank"
_LOOK = 1.0  # seconds between two checks whether a missing rank has gone
_PAUSE, _LONG_PAUSE = 0.0005, 0.05  # seconds between two checks whether it has come
_LONGEST = 100_000  # characters of a text that is compared line by line


@dataclass
class _Known:
    """What a rank knows of earlier agreements."""

    turn: int = 0  # how many there were
    standing: dict[str, str] = field(default_factory=dict)  # what was agreed upon for good
    tries: str = ""


_OF_PROCESS = _Known()  # whichever of its threads asks: optimize in one, and training in another
_OF_THREAD = threading.local()  # ranks that are threads count for themselves


def _known() -> _Known:
    if dist.get_backend() != "threaded":
        return _OF_PROCESS
    if not hasattr(_OF_THREAD, "known"):
        _OF_THREAD.known = _Known()
    known: _Known = _OF_THREAD.known
    return known


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
    mine = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in facts.items()}
    found = [json.loads(text) for text in of_all(json.dumps(mine), timeout=timeout)]
    prefix = _prefix(_known().turn)
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


def agree_for_good(facts: Mapping[str, str], *, tries: str) -> None:
    """:func:`agree`, and answer with the same if another rank asks again, for which this one is not
    prepared (:func:`answer`).
    """
    agree(facts, tries=tries)
    known = _known()
    known.standing, known.tries = {**known.standing, **facts}, tries


def question() -> Mapping[str, str] | None:
    """What another rank asks for, of that which was agreed upon for good; None: none asks."""
    known = _known()
    if not known.standing:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    for rank in range(dist.get_world_size()):
        key = f"{_prefix(known.turn + 1)}/{rank}"
        if rank != dist.get_rank() and store.check([key]):
            asked = json.loads(store.get(key).decode())
            if isinstance(asked, dict) and asked and asked.keys() <= known.standing.keys():
                return asked
    return None


def answer(asked: Mapping[str, str]) -> None:
    """Answer a :func:`question`, while this rank waits for that one in a collective to which it
    will not come. Raises UsageError, on both.
    """
    known = _known()
    agree({name: known.standing[name] for name in asked}, tries=known.tries)


def of_all(mine: str, *, timeout: float | None = None) -> list[str]:
    """The texts of all ranks, in their order. Raises RankError as :func:`agree` does."""
    store: Any = dist.distributed_c10d._get_default_store()
    timeout = store.timeout.total_seconds() if timeout is None else timeout
    known = _known()
    known.turn += 1
    prefix = _prefix(known.turn)
    store.set(f"{prefix}/{dist.get_rank()}", mine)
    return [_get(store, f"{prefix}/{r}", timeout, r) for r in range(dist.get_world_size())]


def _prefix(turn: int) -> str:
    return f"recast/agree/{turn}"


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
