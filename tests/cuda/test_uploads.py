"""Uploads: equal words are copied once, and pinned memory is not written while it is read."""

from __future__ import annotations

from array import array

import pytest
import torch

from recast.runtime import uploads
from recast.runtime.uploads import Uploads

CPU = torch.device("cpu")
events: list[Event] = []


class Event:
    """Notes what is asked of it, with its number."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        events.append(self)

    def record(self) -> None:
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
    return Uploads(CPU, pinned=False, event=Event, stream=lambda: streams[0])


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
