"""Run a function on W ranks: threads of this process, or real processes over gloo.

``run(world, fn, *args)`` and ``processes(world, fn, *args)`` call ``fn(rank, *args)`` on every rank
with the default process group up, and return the results in rank order. The first error of any
rank is raised here, with its rank.

Threads are quick (8 ranks in a fraction of a second), share all memory, and use torch's own group
for tests; collectives are done when they return. Processes are the real thing and take seconds:
they are forked, so ``fn`` may be a closure, and what it returns must be picklable.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

T = TypeVar("T")
Errors = list[tuple[float, int, BaseException]]  # when, on which rank, what


def run(world: int, fn: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
    """``[fn(rank, *args) for each rank]``, on ``world`` threads. Skips if torch lacks the group.

    ``timeout``: seconds until the ranks are ended with a TimeoutError.
    """
    threaded = pytest.importorskip("torch.testing._internal.distributed.multi_threaded_pg")
    isolate = getattr(torch._C._distributed_c10d, "_set_thread_isolation_mode", lambda on: None)
    results: list[Any] = [None] * world
    errors: Errors = []
    group = threaded.ProcessLocalGroup

    def one(rank: int, store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = fn(rank, *args)
        except BaseException as error:  # SystemExit too: by it the group ends the other ranks
            errors.append((time.monotonic(), rank, error))
            group.exception_handle(error)

    with_threads = torch._C._is_multithreading_enabled()  # torch's group leaves it off
    threaded._install_threaded_pg()
    isolate(True)
    try:
        store = dist.HashStore()
        ranks = [threading.Thread(target=one, args=(r, store), daemon=True) for r in range(world)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(timeout)
        hanging = [rank for rank, thread in enumerate(ranks) if thread.is_alive()]
        if hanging:
            group.exception_handle(TimeoutError())
            raise TimeoutError(f"ranks {hanging} of {world} still run after {timeout:g} s")
    finally:
        group.reset()
        isolate(False)
        threaded._uninstall_threaded_pg()
        torch._C._set_multithreading_enabled(with_threads)
    _raise_first(errors)
    return results


def processes(world: int, fn: Callable[..., T], *args: Any, timeout: float = 240.0) -> list[T]:
    """``[fn(rank, *args) for each rank]``, on ``world`` forked processes over gloo.

    ``timeout``: seconds for the whole, and for each collective.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(
                target=_process, args=(r, world, folder, pipes[r][1], timeout, fn, args)
            )
            for r in range(world)
        ]
        for rank in ranks:
            rank.start()
        results: list[Any] = [None] * world
        errors: Errors = []
        try:
            for r, (receiver, sender) in enumerate(pipes):
                sender.close()
                try:
                    if not receiver.poll(timeout):
                        raise TimeoutError(f"no answer within {timeout:g} s")
                    when, results[r], error = pickle.loads(receiver.recv_bytes())
                except (EOFError, TimeoutError) as lost:
                    when, error = time.monotonic(), lost
                if error is not None:
                    errors.append((when, r, error))
        finally:
            for rank in ranks:
                rank.join(5)
                if rank.is_alive():
                    rank.kill()
                    rank.join()
    _raise_first(errors)
    return results


def _process(
    rank: int, world: int, folder: str, sender: Any, timeout: float, fn: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    result: Any = None
    failed: BaseException | None = None
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'ranks'}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        result = fn(rank, *args)
    except BaseException as error:
        failed = error
    when = time.monotonic()  # of all processes
    try:
        answer = pickle.dumps((when, result, failed))
    except Exception as error:
        answer = pickle.dumps((when, None, RuntimeError(f"{failed or result!r}: {error}")))
    sender.send_bytes(answer)
    sender.close()
    if failed is None:
        dist.barrier()  # no rank leaves while another is still answering
        dist.destroy_process_group()


def _raise_first(errors: Errors) -> None:
    """Raise the earliest error: those after it may be its consequence."""
    if errors:
        _, rank, error = min(errors, key=lambda found: found[0])
        error.add_note(f"on rank {rank}")
        raise error
