"""Collectives of all ranks: issued in one place, waited for in another.

The process group is the default one, NCCL on GPUs and gloo on CPUs. Every rank runs the same graph,
so all issue the same collectives in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.ranks import faults

_POLL = 2e-5  # seconds between two looks


def ranks() -> int:
    """The size of the default process group; 1 without one."""
    there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if there else 1


def rank() -> int:
    """The rank of this process in the default group; 0 without one."""
    there = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if there else 0


@dataclass(slots=True)
class Flight:
    """What is on its way: ``wait`` for it before reading it."""

    received: Tensor
    work: Any
    sent: Tensor | None  # kept until it has left
    what: str = "all_to_all"

    def wait(self) -> Tensor:
        """The buffer that was received."""
        if self.work is not None:
            with faults.collective(self.what):
                self.work.wait()
            self.work = self.sent = None
        return self.received

    def read(self) -> list[Any]:
        """The numbers that were received.

        The wait of NCCL is one of streams: Python goes on, and what would fail to arrive would be
        found by whatever reads it, by nobody's name. So it is watched until it is there.
        """
        if self.work is not None and self.received.is_cuda:
            with faults.collective(self.what):
                until_done(self.work, faults.patience())
        found: list[Any] = self.wait().tolist()
        return found


def until_done(work: Any, seconds: float) -> None:
    """Return when ``work`` is. Raises RuntimeError where that takes longer than ``seconds``."""
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"it was not done within {seconds:.0f} s")
        time.sleep(_POLL)


def all_to_all(
    buffer: Tensor, send: Sequence[int], receive: Sequence[int], what: str = "all_to_all"
) -> Flight:
    """Issue: ``send[r]`` elements of ``buffer`` (1-d) to each rank r, ``receive[r]`` from it.

    ``what``: its name, where it fails.
    """
    received = buffer.new_empty(sum(receive))
    with faults.collective(what):  # it may fail at once, where a rank is known to be gone
        work = dist.all_to_all_single(received, buffer, list(receive), list(send), async_op=True)
    return Flight(received, work, buffer, what)


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Every rank gets the values of rank 0, in place."""
    with torch.no_grad():
        for tensor in tensors:
            whole = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
            with faults.collective("broadcast of parameters"):
                dist.broadcast(whole, 0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def from_first(make: Callable[[], str]) -> str:
    """What ``make()`` gives on rank 0, on every rank; its error is an error on all.

    Only rank 0 calls ``make``. Raises UsageError on the others where it failed.
    """
    text, failed = "", None
    if rank() == 0:
        try:
            text = make()
        except Exception as error:
            failed = error
    data = bytearray(text.encode())
    where = _device()
    size = torch.tensor([-1 if failed is not None else len(data)], device=where)
    with faults.collective("broadcast of the plan"):
        dist.broadcast(size, 0)
    if failed is not None:
        raise failed
    if int(size) < 0:
        raise UsageError(
            "optimize failed on rank 0", why="it decides for all ranks; its own error says more"
        )
    held = torch.tensor(list(data) if rank() == 0 else [0] * int(size), dtype=torch.uint8)
    held = held.to(where)
    with faults.collective("broadcast of the plan"):
        dist.broadcast(held, 0)
    return bytes(held.tolist()).decode()


def _device() -> torch.device:
    """Where small tensors go: NCCL has no CPU."""
    nccl = "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
