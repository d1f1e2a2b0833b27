"""How the buckets of dense gradients are reduced: the communication hook of ``dense_reduce``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from recast.errors import UsageError
from recast.runtime.ranks import collectives, faults
from recast.runtime.ranks.step_record import AppendedNumbers, StepRecord, Told

WHAT = "all_reduce of dense gradients"
# What a rank tells of its steps goes with the first bucket of gradients if that has at most so many
# elements, as it is copied for this; else by a message of its own, in every so many passes.
_COPIED, _SELDOM = 1 << 14, 16
Telling = tuple[StepRecord, Told]
_UNFINISHED = "finished reduction in the prior iteration"  # torch's words


def sort_buckets(wrapped: DistributedDataParallel, unfinished: Callable[[], UsageError]) -> None:
    """Let DDP reorder its buckets, which it does once, after the first backward pass, with a
    broadcast. Raises ``unfinished()`` if that pass was not finished.
    """
    with faults.collective("order of dense gradients"):
        try:
            wrapped.reducer._rebuild_buckets()
        except RuntimeError as error:
            if _UNFINISHED in str(error):
                raise unfinished() from error
            raise


def reduced(
    share: float, reduced_pass: list[int], telling: list[Telling], bucket: Any
) -> torch.futures.Future[Tensor]:
    """The mean of ``bucket`` over ranks: issued now, done at the end of this backward pass.

    With the last bucket, ``reduced_pass`` is set to this pass.
    """
    if bucket.is_last():
        reduced_pass[:] = [torch._C._current_graph_task_id()]
    buffer = bucket.buffer().mul_(share)
    if telling and bucket.index() == 0:
        record, told = telling.pop()
        record.passes += 1
        size = buffer.numel()
        if not buffer.is_cpu:
            record.sent(told)  # to nobody: a GPU would have to be waited for
        elif size <= _COPIED:
            record.sent(told)
            return _issue(AppendedNumbers(told, buffer)).then(lambda f: f.value()[0][:size])
        elif record.passes % _SELDOM == 0:
            record.sent(told)
            _issue(AppendedNumbers(told, buffer[:0]))
    return _issue(buffer).then(lambda f: f.value()[0])


def _issue(what: Tensor | AppendedNumbers) -> torch.futures.Future[list[Tensor]]:
    """Issue the sum over ranks of a buffer, which is awaited at the end of this backward pass."""
    appended = None if isinstance(what, Tensor) else what
    buffer = what if isinstance(what, Tensor) else what.buffer
    with faults.collective(WHAT):
        work = dist.all_reduce(buffer, async_op=True)
    # Callbacks run in order, and DistributedDataParallel queues its own after the last bucket.
    Variable._execution_engine.queue_callback(partial(_wait, work, buffer, appended))
    done: torch.futures.Future[list[Tensor]] = work.get_future()
    return done


def _wait(work: Any, buffer: Tensor, appended: AppendedNumbers | None) -> None:
    with faults.collective(WHAT):
        collectives.wait(work, buffer)
    if appended is not None:  # after DistributedDataParallel's own: its state is whole by then
        Variable._execution_engine.queue_callback(appended.check)
