"""Ranks that may die: forked processes over gloo, each with its own result or error."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def forked(
    world: int, folder: Path, timeout: float, fn: Callable[[int], Any], *, missing: int = -1
) -> list[Any]:
    """``(value, error, seconds)`` of ``fn(rank)`` on each rank; None of one that was killed.

    ``missing``: a rank that is not waited for.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    init = f"file://{folder / f'init-{time.monotonic_ns()}'}"
    ranks = [
        context.Process(target=_one, args=(r, world, init, timeout, fn, pipes[r][1]))
        for r in range(world)
    ]
    for rank in ranks:
        rank.start()
    found: list[Any] = []
    for _, sender in pipes:
        sender.close()
    for r, (receiver, _) in enumerate(pipes):
        try:
            assert r == missing or receiver.poll(90), "no rank may hang"
            found.append(None if r == missing else receiver.recv())
        except EOFError:
            found.append(None)
    for rank in ranks:
        rank.kill()
        rank.join()
    return found


def _one(
    rank: int, world: int, init: str, timeout: float, fn: Callable[[int], Any], sender: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    began = time.monotonic()
    value, failed = None, None
    try:
        value = fn(rank)
    except Exception as error:
        failed = error
    sender.send((value, failed, time.monotonic() - began))
    sender.close()
    time.sleep(60 if failed else 0)  # who answered is not dead yet
    dist.barrier()  # nor does the first to end take the store away
    os._exit(0)
