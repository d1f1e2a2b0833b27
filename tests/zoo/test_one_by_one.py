"""Work of a benchmark in a process of its own: if that dies, its earlier answers are kept."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import pytest
from one_by_one import answers


def work(end: str) -> Iterator[int]:
    yield 1
    yield 2
    if end == "dies":
        os._exit(7)
    if end == "hangs":
        time.sleep(60)


def test_what_ends_well_gives_its_answers() -> None:
    assert list(answers(work, ("well",), 60)) == [1, 2]


def test_the_end_of_its_process_is_the_last_answer() -> None:
    *given, last = answers(work, ("dies",), 60)
    assert given == [1, 2]
    assert isinstance(last, RuntimeError) and "code 7" in str(last)


@pytest.mark.long
def test_a_process_that_does_not_answer_is_ended() -> None:
    given = answers(work, ("hangs",), 10)
    assert [next(given), next(given)] == [1, 2]
    assert isinstance(next(given), TimeoutError)
    assert next(given, None) is None
