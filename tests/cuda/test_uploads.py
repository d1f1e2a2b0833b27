"""Uploads: equal words are copied once, and pinned memory is not written while it is read."""

from __future__ import annotations

import contextlib
import random
import threading
from array import array
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from recast.runtime.gpu import uploads
from recast.runtime.gpu.uploads import Uploads

CPU = torch.device("cpu")
events: list[Event] = []
current: list[torch.device] = []  # devices made the current one, the innermost last


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    current.append(device)
    yield
    current.pop()


class Event:
    """Notes what is asked of it, with its number."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        events.append(self)

    def record(self) -> None:
        assert current[-1:] == [CPU], "the event is another device's"
        self.asked.append("record")

    def synchronize(self) -> None:
        self.asked.append("wait")


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    events.clear()
    monkeypatch.setattr(uploads, "_SLOTS", 3)
    monkeypatch.setattr(uploads, "_KEPT", 4)
    monkeypatch.setattr(uploads, "_LEAST", 2)
    streams[:] = [7]
    return Uploads(CPU, pinned=False, event=Event, stream=lambda: streams[0], on=on)


streams = [7]


def words(k: int, n: int = 2) -> array[int]:
    return array("q", [k] * n)


def test_equal_words_are_copied_once(ring: Uploads) -> None:
    first = ring.of(words(1))
    assert first.tolist() == [1, 1] and first.dtype == torch.int64
    assert ring.of(words(1)) is first and ring.of(words(2)) is not first
    assert sum(len(e.asked) for e in events) == 2  # two copies
    assert ring.of(words(1, 3)).tolist() == [1, 1, 1]


def test_each_stream_has_its_own(ring: Uploads) -> None:
    first = ring.of(words(1))
    streams[0] = 8
    other = ring.of(words(1))
    assert other is not first and other.tolist() == [1, 1]
    streams[0] = 7
    assert ring.of(words(1)) is first


def test_a_slot_is_waited_for_before_it_is_written_again(ring: Uploads) -> None:
    made = [ring.of(words(k)) for k in range(5)]
    assert [t.tolist() for t in made] == [[k, k] for k in range(5)]
    assert [e.asked for e in events] == [
        ["record", "wait", "record"], ["record", "wait", "record"], ["record"],
    ]  # fmt: skip


def test_more_words_than_a_slot_has(ring: Uploads) -> None:
    for k in range(3):
        ring.of(words(k))
    assert ring.of(words(9, 5)).tolist() == [9] * 5
    assert len(events) == 4 and events[3].asked == ["record"], (
        "a new slot, with nothing to wait for"
    )
    assert ring.of(words(8, 7)).tolist() == [8] * 7
    assert ring.of(words(0)).tolist() == [0, 0]


def test_the_oldest_go(ring: Uploads) -> None:
    first = ring.of(words(0))
    for k in range(1, 4):
        ring.of(words(k))
    assert ring.of(words(0)) is first  # now the youngest
    for k in range(4, 7):
        ring.of(words(k))
    assert ring.of(words(0)) is first and len(ring._known) == 4
    for k in range(7, 11):
        ring.of(words(k))
    assert ring.of(words(0)) is not first


# ---------------------------------------------------------------- copies that take their time


class Late(Uploads):
    """A device that copies as late as it may: when an event behind the copy is waited for."""

    def __init__(self) -> None:
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.waits = 0
        late = self

        class Behind:
            at = 0

            def record(self) -> None:
                self.at = late.done + len(late.queue)

            def synchronize(self) -> None:
                late.waits += 1
                late.drain(self.at - late.done)

        self.done = 0
        super().__init__(
            CPU, pinned=False, event=Behind, stream=threading.get_ident,
            on=lambda device: contextlib.nullcontext(),
        )  # fmt: skip

    def _start(self, made: Tensor, pinned: Tensor) -> None:
        made.fill_(-1)
        self.queue.append((made, pinned))

    def drain(self, count: int) -> None:
        for made, pinned in self.queue[: max(count, 0)]:
            made.copy_(pinned)
            self.done += 1
        del self.queue[: max(count, 0)]


def test_a_slot_keeps_its_words_until_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many uploads from several threads, in buffers that grow, none sees those of another."""
    monkeypatch.setattr(uploads, "_SLOTS", 5)
    monkeypatch.setattr(uploads, "_KEPT", 7)
    monkeypatch.setattr(uploads, "_LEAST", 2)
    late = Late()
    made: list[tuple[array[int], Tensor]] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            given = array("q", [draw.randrange(40)] * draw.choice([1, 2, 3, 9]))
            made.append((given, late.of(given)))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert late.waits > 100, "the ring never came round"
    late.drain(len(late.queue))
    assert len(made) == 1200
    assert all(t.tolist() == list(given) for given, t in made)


def test_without_waiting_words_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: an event that lets the host go on is seen."""
    monkeypatch.setattr(uploads, "_SLOTS", 2)
    late = Late()
    monkeypatch.setattr(late, "drain", lambda count: None)
    made = [late.of(words(k)) for k in range(4)]
    Late.drain(late, 4)
    assert [t.tolist() for t in made] != [[k, k] for k in range(4)]
