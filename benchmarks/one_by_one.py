"""Work in a process of its own, whose end is an answer like any other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


def answers(
    work: Callable[..., Iterator[Any]], args: tuple[Any, ...], limit: float
) -> Iterator[Any]:
    """What ``work(*args)`` yields in another process; last an error where that did not end well.

    ``limit``: seconds between two answers, after which the process is ended.
    """
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, work, args), daemon=True)
    process.start()
    there.close()
    try:
        while True:
            if not here.poll(limit):
                yield TimeoutError(f"no answer in {limit:.0f} s")
                return
            try:
                given = here.recv()
            except EOFError:
                process.join()
                if process.exitcode:
                    yield RuntimeError(f"its process ended with code {process.exitcode}")
                return
            yield given
    finally:
        process.kill()  # of no effect on one that has ended
        process.join()
        here.close()


def _send(to: Connection, work: Callable[..., Iterator[Any]], args: tuple[Any, ...]) -> None:
    for answer in work(*args):
        to.send(answer)
    to.close()
