"""Finds out which rank is missing: ranks report that they live through the process group's store.

Torch says that a collective failed, by a closed connection or at the timeout of its group, but not
because of which rank. Here every rank counts the collectives that it enters, and a thread writes
the count to the store every second. When a collective fails, a rank that no longer writes has died,
and one that writes but is not in the collective hangs. A rank that ends with an exception leaves it
in the store, so that the others can report it; that a process on the same machine has ended is seen
at once. If all ranks wait, but in different collectives, none of these will ever be done; that is
seen after a minute.

The timeout is that of the group: ``init_process_group(timeout=...)``.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from recast.errors import RankError, RecastError
from recast.runtime.ranks import faults_process

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
INTERVAL = 1.0  # seconds between two heartbeats
# Seconds after which ranks in different collectives wait for each other. Until then one of them may
# only be receiving more than the others, who are in the next collective already.
STANDSTILL = 60.0
_SOON = 0.02  # seconds, initially, between two checks for a rank that has gone
_PREFIX = "recast/faults"
_STORE_TIMEOUT = timedelta(seconds=10)


class Deadlock(RuntimeError):
    """All ranks wait, in different collectives. Not torch's error: it would come at the timeout."""


@dataclass
class Heartbeat:
    """What a rank reports about itself."""

    beat: int  # goes up as long as it lives
    count: int  # collectives entered
    inside: str  # the collective it is in, or ""
    since: float  # seconds since it entered or left the last one

    def text(self) -> str:
        return f"{self.beat}|{self.count}|{self.inside}|{self.since:.1f}"

    @staticmethod
    def parse(text: bytes) -> Heartbeat:
        beat, count, inside, since = text.decode().split("|")
        return Heartbeat(int(beat), int(count), inside, float(since))


class Watch:
    """The heartbeats of this rank, and what is known of the others."""

    def __init__(self, store: Store, rank: int, world: int, group: Any = None) -> None:
        # A clone has its own connection, so one that waits does not block the other.
        self.writer, self.reader = store.clone(), store.clone()  # type: ignore[attr-defined]
        for own in (self.writer, self.reader):
            own.set_timeout(_STORE_TIMEOUT)
        self.rank, self.world, self.group = rank, world, group
        self.heartbeat = Heartbeat(0, 0, "", 0.0)
        self.moved = time.monotonic()
        self.ended = threading.Event()
        self.processes: dict[int, str] = {}  # those of other ranks, in faults_process's form
        self.writer.set(f"{_PREFIX}/{rank}/process", faults_process.here())
        self.beat()
        self.thread = threading.Thread(target=self._run, name="recast-faults", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.ended.wait(INTERVAL):
            try:
                self.beat()
                self._learn_processes(self.writer)
            except RuntimeError:  # the store is gone: others will report what happened
                return

    def beat(self) -> None:
        """Write a heartbeat."""
        self.heartbeat.beat += 1
        self.heartbeat.since = time.monotonic() - self.moved
        self.writer.set(f"{_PREFIX}/{self.rank}", self.heartbeat.text())

    def enter(self, what: str) -> None:
        """This rank enters the collective ``what``."""
        self.heartbeat.count += 1
        self.heartbeat.inside, self.moved = what, time.monotonic()

    def leave(self) -> None:
        """This rank leaves the collective."""
        self.heartbeat.inside, self.moved = "", time.monotonic()

    def announce_end(self, why: str) -> None:
        """Tell the others why this rank ends. Only the first call counts."""
        if not self.ended.is_set():
            self.ended.set()
            self.writer.set(f"{_PREFIX}/{self.rank}/left", why)

    # ------------------------------------------------------------ asking

    def _heartbeats(self) -> list[Heartbeat | None]:
        keys = [f"{_PREFIX}/{rank}" for rank in range(self.world)]
        there = [k if self.reader.check([k]) else None for k in keys]
        return [None if k is None else Heartbeat.parse(self.reader.get(k)) for k in there]

    def _left(self) -> dict[int, str]:
        keys = {rank: f"{_PREFIX}/{rank}/left" for rank in range(self.world)}
        return {r: self.reader.get(k).decode() for r, k in keys.items() if self.reader.check([k])}

    def _learn_processes(self, store: Any) -> None:
        """Learn the processes of the other ranks, while the store can still be read."""
        if len(self.processes) < self.world - 1:
            keys = {r: f"{_PREFIX}/{r}/process" for r in range(self.world) if r != self.rank}
            new = {r: k for r, k in keys.items() if r not in self.processes and store.check([k])}
            self.processes |= {r: store.get(k).decode() for r, k in new.items()}

    def _gone(self) -> list[int]:
        """Ranks whose processes were on this machine and have ended."""
        return [rank for rank, who in self.processes.items() if faults_process.gone(who)]

    def _wait_for_ends(self) -> list[int]:
        """Ranks that have died. Watches for three heartbeat intervals, or until some rank is known
        to have gone.
        """
        pause, end = _SOON, time.monotonic() + 3 * INTERVAL
        self._learn_processes(self.reader)
        while time.monotonic() < end:
            gone = self._gone()
            if gone or any(_FOLLOWED not in why for why in self._left().values()):
                return gone
            self.ended.wait(min(pause, max(0.0, end - time.monotonic())))
            pause *= 2
        return self._gone()

    def explain(self, what: str, error: BaseException) -> RankError | None:
        """The error for the collective ``what``, naming the ranks to blame; None if none is."""
        try:
            found = self._suspects(what)
        except RuntimeError as lost:
            found = [f"rank {rank} died" for rank in self._gone()]
            found.append("the store of the process group is gone, with rank 0 or its launcher")
            found.append(str(lost).splitlines()[0])
        if not found:
            return None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        teller = "" if isinstance(error, Deadlock) else "torch: "
        why = f"{'; '.join(found)}. {teller}{lines[0][:200]}"
        known = RankError(
            f"{what}: {found[0]}",
            where=f"rank {self.rank} of {self.world}, collective {self.heartbeat.count}",
            why=why,
            tries=(_advice(found[0]), "restart from the last recast.checkpoint"),
        )
        return known

    def standstill(self) -> list[int] | None:
        """The numbers of the collectives that the ranks are in, if each has waited in its own for
        ``STANDSTILL`` seconds and they differ; None: some rank may still come.
        """
        if time.monotonic() - self.moved < STANDSTILL:
            return None
        seen = [h for h in self._heartbeats() if h is not None and h.inside]
        if len(seen) < self.world or min(h.since for h in seen) < STANDSTILL:
            return None
        return [h.count for h in seen] if len({h.inside for h in seen}) > 1 else None

    def why_gone(self, rank: int) -> str | None:
        """What happened to ``rank`` if it has gone; None: it may still come."""
        try:
            self._learn_processes(self.reader)
            left = self._left().get(rank, "")
            if left.startswith(_ENDINGS):  # it has ended, not merely left a step
                return left
            return "died" if rank in self._gone() else None
        except RuntimeError:
            return "is out of reach: the store of the process group is gone"

    def _suspects(self, what: str) -> list[str]:
        before, began = self._heartbeats(), time.monotonic()
        gone = self._wait_for_ends()
        known = time.monotonic() - began < 3 * INTERVAL  # too short to have missed a heartbeat
        after, left = self._heartbeats(), self._left()
        found: list[list[str]] = [[], [], [], [], []]  # causes first, consequences last
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            if rank == self.rank:
                continue
            silent = not known and (old is None or new is None or new.beat == old.beat)
            if rank in left:
                found[4 if _FOLLOWED in left[rank] else 1].append(f"rank {rank} {left[rank]}")
            elif rank in gone or silent:
                found[0].append(
                    f"rank {rank} died{'' if new is None else f', last seen {_at(new)}'}"
                )
            elif known or new is None:
                continue
            elif new.inside and new.inside != what:  # it waits, too
                found[3].append(f"rank {rank} {_ELSE}, {_at(new)}, for {new.since:.0f} s")
            elif new.count < self.heartbeat.count or not new.inside:
                found[2].append(f"rank {rank} hangs, {_at(new)}, for {new.since:.0f} s")
        return [text for some in found for text in some] or [
            "no rank is missing: the network failed"
        ]


_FOLLOWED, _ELSE, _DIED = "gave up because ", "does something else", " died"
_OUTSIDE = "outside of any collective"
_ENDED, _BY = "has ended", "ended by "
_ENDINGS = (_FOLLOWED, _ENDED, _BY)


def _advice(found: str) -> str:
    if _ELSE in found:
        return "all calls on every rank, in one order: steps, evaluation, clipping, checkpoints"
    if found.endswith(_ENDED):
        return "as many steps on every rank (their batches may be empty)"
    if _OUTSIDE in found and _DIED not in found:
        return (
            "every call on every rank: none can evaluate, clip or save alone; if that rank is only"
            " slow, init_process_group(timeout=...)"
        )
    if _DIED in found and dist.get_backend() == "gloo":
        # It ends a process that gets what was sent to another collective than its own.
        return (
            "what that rank wrote; if it is gloo's EnforceNotMet, ranks called different things: a"
            " batch that one rank skips, all must skip"
        )
    return "what that rank wrote"


def _at(seen: Heartbeat) -> str:
    if seen.inside:
        return f"in {seen.inside} (collective {seen.count})"
    return f"{_OUTSIDE} (after {seen.count} of them)"


# --- of this process -----------------------------------------------------------------------------

_WATCH: Watch | None = None


def start() -> None:
    """Start to write heartbeats, once per default process group; all its ranks call it.

    Ranks that are threads give none: a process cannot lose single threads.
    """
    global _WATCH
    if dist.get_backend() == "threaded" or dist.get_world_size() == 1:
        return
    if _WATCH is not None and _WATCH.group is dist.group.WORLD:
        return
    if _WATCH is None:
        atexit.register(_at_exit)
        sys.excepthook = _announcing(sys.excepthook)
    else:
        _WATCH.ended.set()
    store = dist.distributed_c10d._get_default_store()
    _WATCH = Watch(store, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def watching() -> bool:
    """Whether the ranks are processes, which write heartbeats."""
    return _WATCH is not None


def standstill() -> list[int] | None:
    """What :meth:`Watch.standstill` finds; None also if the store is gone."""
    try:
        return None if _WATCH is None else _WATCH.standstill()
    except RuntimeError:
        return None


def wait_limit() -> float:
    """Seconds to wait for other ranks: somewhat less than the group's timeout, at which a thread of
    NCCL ends the process.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    timeout: float = store.timeout.total_seconds()
    return timeout - min(timeout / 2, 4 * INTERVAL)


def _announcing(previous: _Hook) -> _Hook:
    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        announce_end(error)
        previous(kind, error, trace)

    return excepthook


def error_text(error: BaseException) -> str:
    """The error's type, and the first line of its message if there is one."""
    text = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def announce_end(error: BaseException | None) -> None:
    """Tell the others why this rank ends; None: it is done."""
    if _WATCH is None:
        return
    if error is None:
        why = _ENDED
    elif isinstance(error, RankError):
        here, _, because = error.what.partition(": ")
        why = f"{_FOLLOWED}{because or error.what}"
        if _ELSE in because and _FOLLOWED not in because:
            why += f"; it was in {here} itself"  # the rank that reads this is the one that it names
    else:
        why = f"{_BY}{error_text(error)}"
    try:
        _WATCH.announce_end(why)
    except RuntimeError:
        return  # the store is gone, so nobody could read it


def announce_failure(why: str) -> None:
    """Let the others report ``why`` about this rank if they wait for it in vain."""
    if _WATCH is not None:
        _WATCH.writer.set(f"{_PREFIX}/{_WATCH.rank}/left", why)


def why_gone(rank: int) -> str | None:
    """What happened to ``rank`` if it has gone; None: it may still come."""
    return None if _WATCH is None else _WATCH.why_gone(rank)


def withdraw_failure() -> None:
    """Withdraw what :func:`announce_failure` said: all ranks continue."""
    if _WATCH is not None:
        _WATCH.writer.delete_key(f"{_PREFIX}/{_WATCH.rank}/left")


def _at_exit() -> None:
    announce_end(None)
    if _WATCH is not None:
        _WATCH.thread.join(2 * INTERVAL)  # it must not be using the store when Python exits


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Wraps code that waits for other ranks. If it fails, raises RankError, which names them."""
    watch = _WATCH
    if watch is None:
        yield
        return
    watch.enter(what)
    try:
        yield
    except RecastError:
        raise
    except RuntimeError as error:
        known = watch.explain(what, error)
        if known is None:
            raise
        announce_end(known)
        raise known from error
    finally:
        watch.leave()
