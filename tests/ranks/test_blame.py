"""Which rank is blamed when ranks wait in vain, judging by the keys of a store; no rank runs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from recast.errors import RankError
from recast.runtime.ranks import faults, faults_agree


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Those of three ranks, which beat in this process."""
    monkeypatch.setattr(faults, "INTERVAL", 0.02)
    store = HashStore()
    made = [faults.Watch(store, rank, 3) for rank in range(3)]
    yield made
    for watch in made:
        watch.ended.set()
        watch.thread.join()


def explained(watch: Any, what: str) -> RankError:
    found = watch.explain(what, RuntimeError("Timed out"))
    assert isinstance(found, RankError)
    return found


def test_a_rank_that_saves_alone_does_something_else(watches: list[Any]) -> None:
    """It waits as the others do, after fewer collectives; a rank that is in none hangs."""
    for watch in watches[1:]:
        for _ in range(3):
            watch.enter("counts of ids")
    watches[0].enter("checkpoint")
    error = explained(watches[1], "counts of ids")
    assert error.what.startswith("counts of ids: rank 0 does something else, in checkpoint (")
    assert error.tries[0].startswith("all calls on every rank")
    watches[2].leave()
    error = explained(watches[1], "counts of ids")
    assert error.what.startswith("counts of ids: rank 2 hangs, outside of any collective")
    assert "rank 0 does something else" in error.why
    assert error.tries[0].startswith("every call on every rank: none can evaluate, clip or save")


def test_who_gave_up_says_where_it_was(watches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank would read only that it does something else, and not than what."""
    watches[0].enter("counts of ids")
    watches[2].enter("counts of ids")
    watches[1].enter("norms of gradients")
    monkeypatch.setattr(faults, "_WATCH", watches[1])
    faults.announce_end(explained(watches[1], "norms of gradients"))
    error = explained(watches[0], "counts of ids")
    assert error.what.startswith(
        "counts of ids: rank 1 gave up because rank 0 does something else, in counts of ids"
    )
    assert error.what.endswith("it was in norms of gradients itself")


def test_a_rank_with_fewer_batches_has_ended(watches: list[Any]) -> None:
    watches[1].announce_end(faults._ENDED)
    error = explained(watches[0], "counts of ids")
    assert error.what == "counts of ids: rank 1 has ended"
    assert error.tries[0] == "as many steps on every rank (their batches may be empty)"


@pytest.mark.parametrize(
    ("error", "said"),
    [(AssertionError(), "AssertionError"), (ValueError("a\nb"), "ValueError: a")],
)
def test_an_error_without_words_is_named_by_its_type(error: Exception, said: str) -> None:
    assert faults.error_text(error) == said


def test_who_left_is_not_waited_for(watches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that failed before the ranks compare what they have: the others stop at once."""
    monkeypatch.setattr(faults, "_WATCH", watches[0])
    monkeypatch.setattr(faults_agree, "_LOOK", 0.02)
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    watches[1].writer.set(f"{faults._PREFIX}/1/left", "left a step by ValueError")
    with pytest.raises(RankError, match=r"rank 1 did not come to .* within 0 s"):
        faults_agree._get(store, "facts", 0.1, 1)  # which may come yet
    watches[1].announce_end(f"{faults._BY}ValueError: no such file")
    with pytest.raises(RankError, match="optimize: rank 1 ended by ValueError: no such file"):
        faults_agree._get(store, "facts", 60.0, 1)
