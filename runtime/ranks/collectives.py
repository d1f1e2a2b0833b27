"""Collectives over all ranks, issued at one point and waited for at another.

The process group is the default one, NCCL on GPUs and gloo on CPUs. Every rank runs the same graph,
so all issue the same collectives in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recast.errors import UsageError
from recast.runtime.ranks import faults, faults_agree

_POLL = 2e-5  # seconds
_PATIENCE = timedelta(seconds=1)  # until it is looked whether another rank does something else


def ranks() -> int:
    """The size of the default process group; 1 without one."""
    there = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if there else 1


def rank() -> int:
    """The rank of this process in the default group; 0 without one."""
    there = dist.is_available() and dist.is_initialized()
    return dist.get_rank() if there else 0


@dataclass(slots=True)
class Pending:
    """A message that is on its way; call ``wait`` before reading it."""

    received: Tensor
    work: Any
    sent: Tensor | None  # kept alive until it has been sent
    what: str = "all_to_all"

    def wait(self) -> Tensor:
        """Wait for it; returns the buffer that was received."""
        if self.work is not None:
            with faults.collective(self.what):
                wait(self.work, self.received)
            self.work = self.sent = None
        return self.received

    def read(self) -> list[Any]:
        """The numbers that were received.

        NCCL's wait makes only streams wait, and Python goes on. If the message never came, a later
        read would hang, and no error could name the missing rank. So poll until it is there.
        """
        if self.work is not None and self.received.is_cuda:
            with faults.collective(self.what):
                until_done(self.work, faults.wait_limit())
        found: list[Any] = self.wait().tolist()
        return found


def wait(work: Any, buffer: Tensor) -> None:
    """Wait for ``work`` on ``buffer``. Raises UsageError if another rank does not come to it, but
    asks for something that it has agreed upon with this one; Deadlock if all ranks wait for long,
    in different collectives.
    """
    if not (buffer.is_cpu and faults.watching()):
        work.wait()
        return
    store: Any = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + store.timeout.total_seconds() + _PATIENCE.total_seconds()
    before: Mapping[str, str] | None = None
    stood: list[int] | None = None
    while True:
        try:
            work.wait(_PATIENCE)
            return
        except RuntimeError:
            if time.monotonic() > end:
                raise
        if work.is_completed():  # it failed, or was done after all
            work.wait()
            return
        asked = faults_agree.question()
        if asked is not None and asked == before:  # else this rank is only somewhat behind it
            faults_agree.answer(asked)
        before = asked
        stands = faults.standstill()
        if stands is not None and stands == stood:
            raise faults.Deadlock("all ranks wait, in different collectives")
        stood = stands


def until_done(work: Any, seconds: float) -> None:
    """Poll until ``work`` is done. Raises RuntimeError if that takes longer than ``seconds``."""
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"it was not done within {seconds:.0f} s")
        time.sleep(_POLL)


def all_to_all(
    buffer: Tensor, send: Sequence[int], receive: Sequence[int], what: str = "all_to_all"
) -> Pending:
    """Issue an all-to-all: ``send[r]`` elements of ``buffer`` (1-d) to rank r, ``receive[r]`` back.

    ``what``: its name in an error. Raises RankError if it fails at once.
    """
    received = buffer.new_empty(sum(receive))
    with faults.collective(what):  # it fails at once if a rank is known to be gone
        work = dist.all_to_all_single(received, buffer, list(receive), list(send), async_op=True)
    return Pending(received, work, buffer, what)


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Every rank gets the values of rank 0, in place."""
    with torch.no_grad():
        for tensor in tensors:
            whole = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
            with faults.collective("broadcast of parameters"):
                dist.broadcast(whole, 0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def of_all(mine: Any, what: str) -> list[Any]:
    """The values of all ranks, in their order; they must be picklable."""
    found: list[Any] = [None] * ranks()
    with faults.collective(what):
        dist.all_gather_object(found, mine)
    return found


def from_first(make: Callable[[], str]) -> str:
    """The result of ``make()`` on rank 0, on every rank.

    Only rank 0 calls ``make``. If it raises, the other ranks raise UsageError.
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
    """The device for small tensors: NCCL cannot send from the CPU."""
    nccl = "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
