"""Runs work in a process of its own; if that dies, the caller is told like any other answer."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


def answers(
    work: Callable[..., Iterator[Any]], args: tuple[Any, ...], limit: float
) -> Iterator[Any]:
    """What ``work(*args)`` yields in another process; if that fails or dies, an error at the end.

    ``limit``: the process is ended after so many seconds without an answer.
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
        process.kill()  # no effect if it has ended
        process.join()
        here.close()


def _send(to: Connection, work: Callable[..., Iterator[Any]], args: tuple[Any, ...]) -> None:
    for answer in work(*args):
        to.send(answer)
    to.close()
